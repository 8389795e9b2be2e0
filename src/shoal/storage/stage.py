"""The text of shares that are copied: for hosts that can mount neither NFS nor FUSE. From pure functions.

Before a job what the server has newer comes to the node, after it what the node has newer goes back. A copy is
everybody's, as a share over SSH is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.storage import sshfs

ACCOUNT = "shoal-copy"
"""Another name of the shares' account, by which sshd knows who comes to copy."""
PROGRAM = "/usr/local/lib/shoal/stage"
DIRECTORY = "/etc/shoal/copying"
"""What the account needs to get to the servers: the host's key, which only root can read elsewhere, and theirs."""
KEY, KNOWN_HOSTS = f"{DIRECTORY}/key", f"{DIRECTORY}/known_hosts"
LIST = "/etc/shoal/stage"
SUDOERS = "/etc/sudoers.d/shoal-stage"
SERVER_PROGRAM = "/usr/bin/rrsync"
"""Of the package rsync: lets who comes by SSH use rsync below one directory, and nothing else."""

_HEADER = "# Written by shoal; changes here are lost.\n"
_SSH = (
    f"ssh -i {KEY} -o UserKnownHostsFile={KNOWN_HOSTS} -o GlobalKnownHostsFile=/dev/null "
    "-o StrictHostKeyChecking=yes -o IdentitiesOnly=yes -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5"
)


@dataclass(frozen=True)
class Copied:
    """A share of which the host has a copy."""

    where: str
    address: str
    """Of the host that keeps it."""
    read_only: bool = False


def copied(some: Iterable[Copied]) -> str:
    """The list that the program goes through."""
    return _HEADER + "".join(f"{one.where} {one.address} {'ro' if one.read_only else 'rw'}\n" for one in some)


def program() -> str:
    """`stage in` before a job, `stage out` after it. Whoever runs it, the shares' account copies, as on servers:
    what users put in the way of root's rsync could lead it anywhere.

    A copy may be written to where the share may not. What Python compiles there on its own is no result, and does not
    fail to go back.
    """
    return f"""\
#!/bin/sh
{_HEADER}set -u
case ${{1-}} in in | out) ;; *) echo "usage: $0 in|out" >&2; exit 2 ;; esac
[ "$(id -u)" = 0 ] || exec sudo -n "$0" "$1"
exec 9> /run/shoal-stage.lock
flock 9
as="setpriv --reuid={sshfs.ACCOUNT} --regid={sshfs.ACCOUNT} --clear-groups --no-new-privs"
umask 0
copy() {{ $as rsync -rltO --update --chmod=ugo=rwX -e '{_SSH}' "$@" < /dev/null; }}
status=0
while read -r where server mode; do
    there={ACCOUNT}@$server:$where/
    case $1.$mode.$where in
        in.*./*) copy "$there" "$where/" || status=1 ;;
        out.rw./*) copy --exclude=__pycache__/ "$where/" "$there" || status=1 ;;
    esac
done < {LIST}
exit "$status"
"""


def sudoers(group: str) -> str:
    """Users may have the shares copied, and nothing more."""
    return f"{_HEADER}%{group} ALL=(root) NOPASSWD: {PROGRAM} in, {PROGRAM} out\n"


def sshd_block() -> str:
    """What sshd lets those do that come to copy."""
    return (
        f"Match User {ACCOUNT}\n"
        f"    AuthorizedKeysFile {sshfs.KEYS}/{sshfs.ACCOUNT}\n"
        "    AuthenticationMethods publickey\n"
        # Several hosts come at a time; rsync puts a file in place when it is whole.
        f"    ForceCommand {SERVER_PROGRAM} -no-lock {sshfs.ROOT}\n"
        "    DisableForwarding yes\n"
        "    PermitTTY no\n"
        "    PermitUserRC no\n"
    )
