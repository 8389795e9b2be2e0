"""Files on the operator's machine that the spec refers to: public keys, secrets, requirements.

Only regular files of a plausible size are read: a device such as `/dev/zero` never ends, and a FIFO waits forever.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from shoal.errors import UsageError

MAX_KEY_BYTES = 64 * 1024
"""The longest key, a service account's JSON included, has a few thousand bytes."""


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file. OSError, with its text in `strerror`, for anything else or a longer one."""
    # O_NONBLOCK: opening a FIFO would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes // 1024} KiB", str(path))
    return data


def resolve_secret(reference: str, what: str) -> bytes:
    """The value behind a reference. `what` is the key of the spec that asks for it."""
    kind, _, place = reference.partition(":")
    if kind == "env":
        value = os.environ.get(place, "").strip()
        if not value:
            raise UsageError(f"{what} is {reference}, and {place} is not set", hint=f"export {place}=...")
        return value.encode()
    try:
        data = read_regular_file(Path(place).expanduser(), MAX_KEY_BYTES).strip()
    except OSError as error:
        hint = "write the secret into a file of its own, readable by you alone"
        raise UsageError(f"{what} is {reference}, and it cannot be read: {error.strerror}", hint=hint) from None
    if not data:
        raise UsageError(f"{what} is {reference}, and the file is empty", hint="write the secret into it")
    return data
