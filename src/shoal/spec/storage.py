"""Shares in the file: directories of one host that all hosts mount."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, StrictBool

from shoal.spec.checks import choice, matching, refusal
from shoal.spec.finding import Problem, nearest, show
from shoal.spec.values import Between, MemberName, SpecModel, text_schema

KINDS = ("nfs", "sshfs", "stage")
CONTROLLER = "controller"
"""The word for the cluster's controller, whatever its name is."""

SANDBOX_SHARED = "/shared"
"""A directory that all sandbox hosts share without a `storage` entry."""

_PATH = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+")
_SYSTEM = (
    *("bin", "boot", "dev", "efi", "etc", "lib", "lib32", "lib64", "libx32", "nix", "ostree", "proc", "root", "run"),
    *("sbin", "snap", "sys", "sysroot", "tmp"),
)
_SYSTEM_BELOW = {
    "opt": ("shoal",),
    "usr": (
        *("bin", "games", "include", "lib", "lib32", "lib64", "libexec", "libx32", "sbin", "share", "src"),
        *(f"local/{name}" for name in ("bin", "etc", "games", "include", "lib", "lib64", "libexec", "sbin", "share")),
    ),
    "var": ("backups", "cache", "empty", "lib", "lock", "log", "mail", "run", "spool", "tmp"),
}
"""A directory below one of these may be shared, but neither the whole nor what the system and Shoal keep there."""


# It ends up in unit files, exports and command lines: nothing in it needs quoting.
_absolute_path = matching(
    f"(?=.{{,200}}$){_PATH.pattern}",
    "not a directory's path",
    "write it like /data/sets: letters, digits, `_`, `-` and `.` after `/`",
)


def share_path(value: object) -> str:
    """Where a share is mounted: nothing that a host needs to run."""
    path = _absolute_path(value)
    first, _, below = path[1:].partition("/")
    kept = _SYSTEM_BELOW.get(first, ())
    # A share around such a directory hides it as much as one inside it does.
    overlaps = any(_is_inside(below, name) or _is_inside(name, below) for name in kept)
    if first in _SYSTEM or (first in _SYSTEM_BELOW and not below) or overlaps:
        raise refusal("a host needs this directory for itself", "choose another, such as /data or /srv/data")
    return path


_PATH_SCHEMA = text_schema("path", pattern=f"^{_PATH.pattern}$")
SharePath = Annotated[str, BeforeValidator(share_path), _PATH_SCHEMA]


class SharedDirectory(SpecModel):
    """A directory that all hosts have, by the path under which they have it. One of them keeps it and serves it."""

    kind: Annotated[Literal["nfs", "sshfs", "stage"], BeforeValidator(choice("kind of share", KINDS))] = "nfs"
    """How hosts get at it: NFS, SSH (`sshfs`) or a copy for each job (`stage`). A host that cannot takes the next."""
    host: MemberName = CONTROLLER
    """The host that keeps it: `controller`, or the name of a host."""
    path: SharePath | None = None
    """The directory on that host. Without it, the same path as everywhere."""
    read_only: StrictBool = False
    """Only the host that keeps it writes to it: for software and data sets."""
    homes: StrictBool = False
    """The users' homes are in it. A share at `/home` says so by its name."""
    connections: Annotated[int, Between(1, 16)] = 4
    """NFS: how many TCP connections a host opens to the server (`nconnect`)."""

    def server(self, controller: str) -> str:
        """The name of the host that keeps it."""
        return controller if self.host == CONTROLLER else self.host


Shares = Mapping[str, SharedDirectory | None]
"""None stands for an entry of the file that is not a share."""


def storage_problems(shares: Shares, hosts: Sequence[str], *, has_sandbox: bool) -> Iterator[Problem]:
    """Every rule about shares that does not hold. `hosts` are the names of all members, the controller first."""
    homes: list[str] = []
    for path, share in shares.items():
        if share is None:
            continue
        place = ("storage", path)
        if share.host not in (CONTROLLER, *hosts):
            fix = nearest(share.host, [CONTROLLER, *hosts])
            yield Problem((*place, "host"), "no host of the cluster", show(share.host), fix)
        if has_sandbox and _is_inside(path, SANDBOX_SHARED):
            fix = "delete it, or choose another path"
            yield Problem(place, "sandbox hosts have this directory in common already", show(path), fix)
        yield from _overlaps(path, share, shares, hosts[0] if hosts else CONTROLLER)
        outer = next((other for other in shares if other != path and _is_inside(path, other)), None)
        if outer:
            yield Problem(place, "a share inside another", show(outer), "give it a path beside that one")
        if path == "/home" or share.homes:
            if homes:
                fix = f"`{homes[0]}` has them already; delete `homes` in one"
                yield Problem(place, "two shares for the users' homes", show(path), fix)
            homes.append(path)
            if share.read_only:
                yield Problem((*place, "read_only"), "homes that no user can write to", "true", "delete it")


def _overlaps(mount: str, share: SharedDirectory, shares: Shares, controller: str) -> Iterator[Problem]:
    """A directory is served once, and on its host nothing is mounted over it."""
    if share.path is None:
        return
    place = ("storage", mount, "path")
    for other_mount, other in shares.items():
        if other_mount == mount or other is None:
            continue
        if other.server(controller) == share.server(controller):
            if share.path == (other.path or other_mount):
                what = f"the share {show(other_mount)} is this directory already"
                yield Problem(place, what, show(share.path), "choose another, or delete one of the two shares")
        elif _is_inside(share.path, other_mount) or _is_inside(other_mount, share.path):
            what = f"the share {show(other_mount)} is mounted there, and would hide what is in it"
            yield Problem(place, what, show(share.path), "choose a directory beside that one")


def _is_inside(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory}/")
