"""Where a node builds an image, below the user's directory: its name, its programs' variables, and its removal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys

from .variables import DEFAULT_PATH

PLACE, SAVE_PLACE = PLACES = ("build.", "save.")
"""How the names of such places begin, and of those where a container is saved."""
REMOVAL_TIMEOUT_S = 600


def end_early(number: int, frame: object) -> None:
    """Handles the signal with which Slurm ends a job: what it has made is removed before Slurm kills it."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def remove_leftovers(store: str) -> None:
    """What builds and saves left whose job was killed. What cannot be removed stays: nobody needs it gone now."""
    for name in os.listdir(store):
        if not name.startswith(PLACES) or not name.endswith(".lock"):
            continue
        with contextlib.suppress(OSError):  # it is being built, or another job of the user's removes it
            lock = os.open(os.path.join(store, name), os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                place = os.path.join(store, name[: -len(".lock")])
                remove_place(place)
                if not os.path.lexists(place):
                    os.unlink(place + ".lock")
            finally:
                os.close(lock)


def remove_place(place: str) -> None:
    """Files in it may belong to other ids of the user's, which only a user namespace can remove."""
    if os.path.lexists(place):
        quiet = subprocess.DEVNULL
        # Root's builds mount on the node itself, where a build that is ended leaves its mounts.
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [path for path in (line.split()[1] for line in file) if path.startswith(place + "/")]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            for path in reversed(mounts):
                subprocess.run(["umount", "--lazy", path], stdin=quiet, stdout=quiet, stderr=quiet, check=False)
            subprocess.run(
                ["buildah", "unshare", "rm", "-rf", place],
                env=environment(place),
                stdin=quiet,
                stdout=quiet,
                stderr=quiet,
                timeout=REMOVAL_TIMEOUT_S,
                check=False,
            )
        shutil.rmtree(place, ignore_errors=True)


def environment(place: str) -> dict[str, str]:
    """buildah's own: nothing of the job's settings reaches the image."""
    names = {"HOME": "home", "XDG_RUNTIME_DIR": "run", "TMPDIR": "tmp"}
    paths = {name: os.path.join(place, directory) for name, directory in names.items()}
    return {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", "USER": user_name(), **paths}


def user_name() -> str:
    """A user who has left has files here still."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
