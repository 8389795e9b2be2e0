"""Makes room for images on a node, as their user; `start.py evict --` does it for every user, daily and as root.

Whoever uses an image or a container holds its lock. What is removed loses its name first, so no half of it has one.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import signal
import stat
import sys
import time
import traceback

from .build_place import PLACES, remove_leftovers
from .unpacked_image import IMAGES, LIMIT_FILE, RECORD, Problem, own_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

KEEP_DAYS = 30
"""What no job has used for so long is removed daily, and when another image is unpacked."""
OWNER_TIMEOUT_S = 600
"""For the files of one user: they may be on a file system of the user's own, which does not answer."""


def evict_all() -> int:
    """Remove what users have not used for long: the status. Each as its owner, as root would follow a user's links."""
    left = False
    with os.scandir(IMAGES) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            # A user can move here what root has opened to all. Root's own is closed, and nobody can.
            is_foreign = status.st_uid == 0 and stat.S_IMODE(status.st_mode) != 0o700
            if is_foreign or not stat.S_ISDIR(status.st_mode):
                continue
            child = os.fork()
            if child == 0:
                evict_as_owner(entry.path, status)
            if os.waitpid(child, 0)[1] != 0:
                sys.stderr.write("not all of %s could be looked through\n" % entry.path)
                left = True
    return int(left)


def evict_as_owner(path: str, status: os.stat_result) -> None:
    """The rest of a process. It must not become anything of root's."""
    code = 1
    try:
        signal.alarm(OWNER_TIMEOUT_S)
        os.setgroups([])
        os.setresgid(status.st_gid, status.st_gid, status.st_gid)
        os.setresuid(status.st_uid, status.st_uid, status.st_uid)
        evict(path)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def evict(store: str) -> None:
    """Remove images that no job has used for long, and what was killed before it was whole.

    Named containers have users' changes. What cannot be removed stays: no job fails because of it.
    """
    remove_leftovers(store)
    for new in (*glob.glob(os.path.join(store, "*.new")), *glob.glob(os.path.join(store, "containers", "*.new"))):
        with contextlib.suppress(OSError), sole_use(new[: -len(".new")]):
            remove(new)
    for path, used_at in images_by_use(store).items():
        if used_at <= time.time() - KEEP_DAYS * 86400:
            remove_unused(path)


def images_by_use(store: str) -> dict[str, float]:
    """When each image was last used, the one that was used longest ago first. Places of builds have locks, too."""
    images = {}
    for name in os.listdir(store):
        if name.endswith(".lock") and not name.startswith(PLACES):
            with contextlib.suppress(OSError):
                images[os.path.join(store, name[: -len(".lock")])] = os.stat(os.path.join(store, name)).st_mtime
    return dict(sorted(images.items(), key=lambda item: item[1]))


def make_space(store: str, needed: int, what: str, new: str = "") -> None:
    """Remove images that no process runs in, the one that was used longest ago first, where that makes enough room.

    `new` is what is needed and there already: it was expected to be smaller.
    """
    limit, disk = disk_limit(), os.statvfs(store)
    there = size_of(new) if new else 0
    free = disk.f_bavail * disk.f_frsize + there
    own = limit - size_of(store) + there if limit else free
    room = min(free, own)
    if needed <= room:
        return
    sizes = {path: size_of(path) for path in images_by_use(store) if os.path.isdir(path)}
    if needed <= room + sum(sizes.values()):
        for path in sizes:
            if remove_unused(path):
                sys.stderr.write("shoal: removed image %.12s here, for %s\n" % (os.path.basename(path), what))
                room += sizes[path]
                if needed <= room:
                    return
    found = "%d MB are free; remove files there" % (free // 1000000)
    if own < free:
        found = "%d MB of your %d MB are left; " % (max(own, 0) // 1000000, limit // 1000000)
        found += (
            "ask the operator for more (`containers: {disk: ...}`)"
            if needed > limit
            else "remove containers with `shoal image remove NAME --node NODE`"
        )
    text = "%s needs about %d MB in %s, and %s, or use another node"
    raise Problem(text % (what, needed // 1000000, store, found))


def disk_limit() -> int:
    """Zero where there is none."""
    with contextlib.suppress(OSError, ValueError), open(LIMIT_FILE) as file:
        return int(file.read())
    return 0


def size_of(root: str) -> int:
    """What a directory takes of the disk. A file with more than one name counts once."""
    seen: set[int] = set()
    total = 0
    for place, directories, files in os.walk(root):
        for name in directories + files:
            with contextlib.suppress(OSError):  # another job of the user's removes it meanwhile
                status = os.lstat(os.path.join(place, name))
                if status.st_nlink == 1 or stat.S_ISDIR(status.st_mode) or status.st_ino not in seen:
                    total += status.st_blocks * 512
                    seen.add(status.st_ino)
    return total


def remove_container(name: str) -> int:
    """`shoal image remove NAME --node`: the status."""
    path = os.path.join(own_store(), "containers", name)
    if not os.path.isdir(path):
        raise Problem("there is no container %s of yours here" % name)
    try:
        with sole_use(path):
            discard(path)
    except BlockingIOError:
        raise Problem("a job runs in container %s; cancel it first" % name) from None
    return 0


def remove_unused(path: str) -> bool:
    """Remove an image that no process runs in. Whether it is gone."""
    try:
        with sole_use(path):
            discard(path)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def sole_use(path: str) -> Iterator[None]:
    """Hold the lock of an image or container alone. Raises BlockingIOError where a process runs in it."""
    lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def discard(path: str) -> None:
    new = path + ".new"
    remove(new)
    if os.path.lexists(path):
        os.rename(path, new)
        remove(new)


def remove(path: str) -> None:
    if os.path.lexists(path):
        with contextlib.suppress(OSError), open(os.path.join(path, RECORD)) as file:
            os.unlink(file.read())
        open_directories(path)
        shutil.rmtree(path)


def open_directories(root: str) -> None:
    """Let the owner enter and change all directories, each before it is read."""
    os.chmod(root, os.lstat(root).st_mode & 0o7777 | 0o700)
    for place, names, _ in os.walk(root):
        for path in (os.path.join(place, name) for name in names):
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
                os.chmod(path, mode & 0o7777 | 0o700)
