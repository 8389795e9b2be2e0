"""The text of shares that are copied: for hosts that can mount neither NFS nor FUSE. Pure functions.

Before a job, newer files of the server come to the node; after it, newer files of the node go back. A copy is open to
all users, as a share over SSH is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal import contract
from shoal.agent.document import HEADER
from shoal.remote import program_text
from shoal.storage import sshfs

ACCOUNT = "shoal-copy"
"""Another name of the account of shares, for which sshd starts rsync."""
PROGRAM = contract.STAGE_PROGRAM
DIRECTORY = "/etc/shoal/copying"
"""What the account needs to reach the servers: a copy of the host's key, and the servers' host keys."""
KEY, KNOWN_HOSTS = f"{DIRECTORY}/key", f"{DIRECTORY}/known_hosts"
LIST = "/etc/shoal/stage"
SUDOERS = "/etc/sudoers.d/shoal-stage"
SERVER_PROGRAM = "/usr/bin/rrsync"
"""Of the package rsync: restricts an SSH login to rsync below one directory."""

_SSH = (
    f"ssh -i {KEY} -o UserKnownHostsFile={KNOWN_HOSTS} -o GlobalKnownHostsFile=/dev/null "
    "-o StrictHostKeyChecking=yes -o IdentitiesOnly=yes -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5"
)


@dataclass(frozen=True)
class StagedShare:
    """A share of which the host has a copy."""

    where: str
    address: str
    """Of the host that keeps it."""
    read_only: bool = False


def render_list(shares: Iterable[StagedShare]) -> str:
    """The list that the program reads."""
    return HEADER + "".join(f"{share.where} {share.address} {'ro' if share.read_only else 'rw'}\n" for share in shares)


def render_program() -> str:
    """`stage in` before a job, `stage out` after it. It copies as the account of shares, whoever runs it:
    links that users create could lead root's rsync anywhere.

    A copy is writable even where the share is not. Files that Python compiles there do not go back.
    """
    accounts = {"ACCOUNT": sshfs.ACCOUNT, "SERVER_ACCOUNT": ACCOUNT}
    return program_text("share_copy.sh", SSH=_SSH, LIST=LIST, **accounts)


def render_sudoers(group: str) -> str:
    """Allow users to run the copy, and nothing else, as root."""
    return f"{HEADER}%{group} ALL=(root) NOPASSWD: {PROGRAM} in, {PROGRAM} out\n"


def sshd_block() -> str:
    """What sshd allows logins that copy."""
    # Several hosts copy at a time; rsync renames each file when it is complete.
    command = f"ForceCommand {SERVER_PROGRAM} -no-lock {sshfs.ROOT}"
    return sshfs.match_block(ACCOUNT, f"{sshfs.KEYS}/{sshfs.ACCOUNT}", command)
