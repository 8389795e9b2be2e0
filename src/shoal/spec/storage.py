"""Shares: directories of one host that all hosts of the cluster have, as the file says them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, StrictBool, WithJsonSchema

from shoal.spec.closed import Closed
from shoal.spec.words import Between, choice, host_name, refusal

KINDS = ("nfs", "sshfs", "stage")
CONTROLLER = "controller"
"""The word for the cluster's controller, whatever its name is."""

_PATH = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+")
_SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "root", "run", "sbin", "sys", "tmp")
_HALF = ("usr", "var")
"""A directory below one of these may be shared, the whole may not."""


def absolute_path(value: object) -> str:
    """A directory on a host. It ends up in unit files, exports and command lines: nothing in it needs quoting."""
    if not isinstance(value, str) or not _PATH.fullmatch(value) or len(value) > 200 or ".." in value.split("/"):
        raise refusal("not a directory's path", "write it like /data/sets: letters, digits, `_`, `-` and `.` after `/`")
    return value


def share_path(value: object) -> str:
    """Where a share is mounted: nothing that a host needs to run."""
    path = absolute_path(value)
    first, _, rest = path[1:].partition("/")
    if first in _SYSTEM or (first in _HALF and not rest):
        raise refusal("a host needs this directory for itself", "choose another, such as /data or /srv/data")
    return path


_PATH_SCHEMA = WithJsonSchema({"type": "string", "title": "path", "pattern": f"^{_PATH.pattern}$"})
SharePath = Annotated[str, BeforeValidator(share_path), _PATH_SCHEMA]
ServerName = Annotated[str, BeforeValidator(host_name), WithJsonSchema({"type": "string", "title": "host name"})]


class SharedDirectory(Closed):
    """A directory that all hosts have, by the path under which they have it. One of them keeps it and serves it."""

    kind: Annotated[Literal["nfs", "sshfs", "stage"], BeforeValidator(choice("kind of share", KINDS))] = "nfs"
    """How hosts get at it: NFS, SSH (`sshfs`) or a copy for each job (`stage`). A host that cannot takes the next."""
    host: ServerName = CONTROLLER
    """The host that keeps it: `controller`, or the name of a host."""
    path: SharePath | None = None
    """The directory on that host. Without it, the same path as everywhere."""
    read_only: StrictBool = False
    """Only the host that keeps it writes to it: for software and data sets."""
    homes: StrictBool = False
    """The users' homes are in it. A share at `/home` says so by its name."""
    connections: Annotated[int, Between(1, 16)] = 4
    """NFS: how many TCP connections a host opens to the server (`nconnect`)."""
