"""Reading and writing files: a reader sees the old one or the new one, never a half."""

from __future__ import annotations

import errno
import os


def read_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def read_text(path: str) -> str:
    """A small file's text; "" when it cannot be read."""
    try:
        return read_bytes(path).decode("utf-8", "replace")
    except OSError:
        return ""


def block_marks(name: str) -> tuple[str, str]:
    """The lines before and after the part of a file that is ours."""
    return f"# BEGIN shoal {name}", f"# END shoal {name}"


LARGE_BYTES = 1 << 20
"""From this size on OpenSSL saves more time than it takes to load."""


def sha256(data: bytes) -> str:
    # `hashlib` loads all of OpenSSL; the small module is in every CPython, under a name that changed with 3.12.
    try:
        if len(data) > LARGE_BYTES:
            raise ImportError
        from _sha2 import sha256 as digest  # type: ignore[import-not-found]
    except ImportError:
        try:
            from _sha256 import sha256 as digest  # type: ignore[import-not-found]
        except ImportError:
            from hashlib import sha256 as digest
    hexdigest: str = digest(data).hexdigest()
    return hexdigest


def write_atomic(path: str, data: bytes, mode: int, uid: int, gid: int) -> None:
    """Put a whole file in place: a reader sees the old one or the new one. A link there is replaced, not followed."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        os.makedirs(folder, 0o755)
    temporary = temporary_name(path)
    remove(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        try:
            write_all(fd, data)
            os.fchown(fd, uid, gid)
            os.fchmod(fd, mode)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError as error:
        remove(temporary)
        if error.errno != errno.EBUSY:
            raise
        write_in_place(path, data)


def write_in_place(path: str, data: bytes) -> None:
    """For a file that is itself a mount point, as /etc/hosts is in many containers: it cannot be renamed over."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        write_all(fd, data)
        os.ftruncate(fd, len(data))
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def temporary_name(path: str) -> str:
    return f"{os.path.dirname(path)}/.{os.path.basename(path)}.shoal-tmp"


def remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def existing_parent(path: str) -> str:
    """The path, or the nearest directory above it that exists."""
    while path != "/" and not os.path.exists(path):
        path = os.path.dirname(path)
    return path


MIN_FREE_MB = 32


def write_problem(path: str) -> str:
    """Why ordinary users cannot write a few megabytes there; "" where they can. Root has a reserve of its own."""
    usage = os.statvfs(existing_parent(path))
    free_mb = usage.f_bavail * usage.f_frsize >> 20
    if usage.f_flag & os.ST_RDONLY:
        return "its file system is read-only"
    if free_mb < MIN_FREE_MB:
        return f"its file system has {free_mb} MB left"
    return "its file system has no inode left" if usage.f_files and not usage.f_favail else ""


def file_status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
