"""The text of shares over SSH: what the server's sshd lets whom do, and how the others mount it. From pure functions.

SSH gives a mount one account on the server, whatever users are on the host. So a share is read and written there by an
account of its own, `shoal-share`, that can do nothing else; and a user's home by the user's own. No host is root on
another. Each host has a key of its own, made there, good from its own address only, and for SFTP only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ACCOUNT = "shoal-share"
DIRECTORY = "/etc/shoal/storage"
KEY = f"{DIRECTORY}/key"
PUBLIC_KEY = f"{KEY}.pub"
KNOWN_HOSTS = f"{DIRECTORY}/known_hosts"
HOST_KEY = "/etc/ssh/ssh_host_ed25519_key.pub"
SSHD_CONF = "/etc/ssh/sshd_config.d/10-shoal-storage.conf"
KEYS = "/etc/ssh/shoal-keys"
"""A directory of public keys, a file a user. Not in the users' homes: those may be on a share that is away."""
ROOT = "/srv/shoal-shares"
"""What the account sees as its whole file system: the shares, and nothing else."""
TRANSPORT = "/usr/local/lib/shoal/patient_sftp.py"

_HEADER = "# Written by shoal; changes here are lost.\n"

WITH_LINKS = "no_contain_symlinks"
"""For mounts by the sshfs of 2026 and later, which otherwise reads no symbolic link that is absolute or has `..` in it:
every Python environment has the one kind, every cache of models the other. By NFS they are read as well."""


@dataclass(frozen=True)
class HostKey:
    """A host's own key and the address it is good from."""

    host: str
    address: str
    key: str
    """`ssh-ed25519 AAAA...`, without a comment."""


def plain_key(text: str) -> str:
    """A public key without its comment; "" when it is none."""
    parts = text.split()
    return " ".join(parts[:2]) if len(parts) >= 2 and parts[0].startswith("ssh-") else ""


def authorized(keys: Iterable[HostKey]) -> str:
    """Lines of an authorized_keys file: each key for SFTP alone, from its host alone."""
    return "".join(
        f'restrict,from="{key.address}",command="internal-sftp" {key.key} shoal {key.host}\n'
        for key in sorted(keys, key=lambda key: key.host)
    )


def read_authorized(text: str) -> dict[str, HostKey]:
    """The hosts' keys in such a file, by host: one that does not answer just now keeps its place."""
    found = {}
    for line in text.splitlines():
        options, _, rest = line.partition(" ")
        words = rest.split()
        if options.startswith("restrict,from=") and len(words) == 4 and words[2] == "shoal":
            found[words[3]] = HostKey(words[3], options.split('"')[1], " ".join(words[:2]))
    return found


def sshd_conf() -> str:
    """What sshd lets the shares' account do. A `Match` block: nobody else's login changes."""
    return (
        f"{_HEADER}Match User {ACCOUNT}\n"
        f"    AuthorizedKeysFile {KEYS}/%u\n"
        "    AuthenticationMethods publickey\n"
        f"    ChrootDirectory {ROOT}\n"
        # Modes are as the host asks: what is everybody's there is everybody's here.
        "    ForceCommand internal-sftp -u 0\n"
        "    DisableForwarding yes\n"
        "    PermitTTY no\n"
        "    PermitUserRC no\n"
    )


def known_hosts(servers: Mapping[str, str]) -> str:
    """The servers' host keys by their addresses, as told over the operator's own connection to each."""
    return _HEADER + "".join(f"{address} {key}\n" for address, key in sorted(servers.items()))


def mount_options(*, read_only: bool, owner: tuple[int, int] | None = None) -> str:
    """`owner`: whose home it is, by number; without one, what the server lets its account do is what anybody may."""
    mode = "ro" if read_only else "rw"
    options = [mode, "_netdev", "nofail", "noatime", "nosuid", "nodev", "allow_other"]
    if owner is not None:
        options += ["default_permissions", "idmap=user", f"uid={owner[0]}", f"gid={owner[1]}"]
    options += [
        f"ssh_command={TRANSPORT}",
        f"IdentityFile={KEY}",
        f"UserKnownHostsFile={KNOWN_HOSTS}",
        "GlobalKnownHostsFile=/dev/null",
        "StrictHostKeyChecking=yes",
        "IdentitiesOnly=yes",
        "BatchMode=yes",
        "ServerAliveInterval=5",
        "ServerAliveCountMax=3",
        "ConnectTimeout=10",
        # The fastest there is, where both ends have it: processors have instructions for it.
        "Ciphers=^aes128-gcm@openssh.com",
        # What one host has written and closed, another sees at once.
        "dcache_timeout=1",
        "max_conns=1",
    ]
    return ",".join(options)
