"""The text of shares over SSH: what the server's sshd allows, and how the other hosts mount. Pure functions.

A mount over SSH has one account on the server, whatever users the host has. A share uses the account `shoal-share`,
which can do nothing else; a home uses its user's account. No host is root on another. Each host creates its own key,
valid from its address only, and for SFTP only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.agent.document import HEADER

ACCOUNT = "shoal-share"
DIRECTORY = "/etc/shoal/storage"
KEY = f"{DIRECTORY}/key"
PUBLIC_KEY = f"{KEY}.pub"
KNOWN_HOSTS = f"{DIRECTORY}/known_hosts"
HOST_KEY = "/etc/ssh/ssh_host_ed25519_key.pub"
SSHD_CONF = "/etc/ssh/sshd_config.d/10-shoal-storage.conf"
KEYS = "/etc/ssh/shoal-keys"
"""A directory of public keys, one file per user. Not in the homes: those may be on a share that is down."""
HOME_KEYS = f"{KEYS}/shoal-homes"
"""On the server of homes: the keys of the other hosts, for every user's account. A file of its own, because hosts that
join and leave change it, and not the keys of users."""
ROOT = "/srv/shoal-shares"
"""The account's chroot: the shares, and nothing else."""
PROXY_PROGRAM = "/usr/local/lib/shoal/patient_sftp.py"


SYMLINK_OPTION = "no_contain_symlinks"
"""For sshfs of 2026 and later, which otherwise follows no symbolic link that is absolute or has `..` in it: every
Python environment has the first kind, every cache of models the second. NFS follows them too."""


@dataclass(frozen=True)
class MemberKey:
    """A member's public key and the address it is valid from."""

    host: str
    address: str
    key: str
    """`ssh-ed25519 AAAA...`, without a comment."""


def strip_comment(text: str) -> str:
    """A public key without its comment; "" if the text is no key."""
    fields = text.split()
    return " ".join(fields[:2]) if len(fields) >= 2 and fields[0].startswith("ssh-") else ""


def render_authorized_keys(keys: Iterable[MemberKey]) -> str:
    """The lines of an authorized_keys file: each key for SFTP only, from its host only."""
    return "".join(
        f'restrict,from="{key.address}",command="internal-sftp" {key.key} shoal {key.host}\n'
        for key in sorted(keys, key=lambda key: key.host)
    )


def parse_authorized_keys(text: str) -> dict[str, MemberKey]:
    """The keys in such a file, by host: a host that does not answer now keeps its line."""
    keys = {}
    for line in text.splitlines():
        options, _, key_text = line.partition(" ")
        fields = key_text.split()
        if options.startswith("restrict,from=") and len(fields) == 4 and fields[2] == "shoal":
            keys[fields[3]] = MemberKey(fields[3], options.split('"')[1], " ".join(fields[:2]))
    return keys


def sshd_conf() -> str:
    """What sshd allows the account of shares. A `Match` block: no other login changes."""
    # Modes are as the client sets them: a file open to all there is open to all here.
    command = "ForceCommand internal-sftp -u 0"
    return HEADER + match_block(ACCOUNT, f"{KEYS}/%u", f"ChrootDirectory {ROOT}", command)


def match_block(account: str, keys: str, *lines: str) -> str:
    """A block of sshd_config for an account that logs in with a key and may do one thing."""
    login = (f"AuthorizedKeysFile {keys}", "AuthenticationMethods publickey")
    closed = ("DisableForwarding yes", "PermitTTY no", "PermitUserRC no")
    return f"Match User {account}\n" + "".join(f"    {line}\n" for line in (*login, *lines, *closed))


def render_known_hosts(servers: Mapping[str, str]) -> str:
    """The servers' host keys by address, as read over the operator's connection to each."""
    return HEADER + "".join(f"{address} {key}\n" for address, key in sorted(servers.items()))


def mount_options(*, read_only: bool, owner: tuple[int, int] | None = None) -> str:
    """`owner`: uid and gid of a home's user; without it, all users have the rights of the server's account."""
    mode = "ro" if read_only else "rw"
    options = [mode, "_netdev", "nofail", "noatime", "nosuid", "nodev", "allow_other"]
    if owner is not None:
        options += ["default_permissions", "idmap=user", f"uid={owner[0]}", f"gid={owner[1]}"]
    options += [
        f"ssh_command={PROXY_PROGRAM}",
        f"IdentityFile={KEY}",
        f"UserKnownHostsFile={KNOWN_HOSTS}",
        "GlobalKnownHostsFile=/dev/null",
        "StrictHostKeyChecking=yes",
        "IdentitiesOnly=yes",
        "BatchMode=yes",
        "ServerAliveInterval=5",
        "ServerAliveCountMax=3",
        "ConnectTimeout=10",
        # The fastest cipher, where both ends have it: processors have instructions for it.
        "Ciphers=^aes128-gcm@openssh.com",
        # Files that one host has closed are visible on the others after a second.
        "dcache_timeout=1",
        "max_conns=1",
    ]
    return ",".join(options)
