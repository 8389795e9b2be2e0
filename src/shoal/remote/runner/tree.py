"""The job's directory on a node, and in it the copy of the code that its ranks start in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess


def own_directory(directory: str, submission: str) -> None:
    """Make the job's directory. A cluster that was built again counts its jobs from 1 again: what an earlier job of
    this number left there, code and checkpoints too, is put aside."""
    place, name = os.path.split(directory)
    os.makedirs(place, exist_ok=True)
    if not submission:
        return os.makedirs(directory, exist_ok=True)
    mark = os.path.join(directory, "submission")
    # The user's own, for what an earlier job of somebody else left here is not ours to open.
    with open(os.path.join(place, ".%s.%d.lock" % (name, os.getuid())), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError), open(mark) as file:
            if file.read() == submission:
                return
        if os.path.isdir(directory):
            _put_aside(directory, "%s.before-%s" % (directory, submission))
        os.makedirs(directory)
        with open(mark, "w") as file:
            file.write(submission)


def _put_aside(directory: str, place: str) -> None:
    try:
        os.rename(directory, place)
    except PermissionError as error:
        import pwd

        owner = str(os.stat(directory).st_uid)
        with contextlib.suppress(KeyError):
            owner = pwd.getpwuid(int(owner)).pw_name
        text = "an earlier job of this number left it, and it belongs to %s: remove it, or use --directory" % owner
        raise OSError(error.errno, text, directory) from None


def working_tree(directory: str) -> str:
    """The job's own copy of the code, unpacked by the first rank of the node that comes here; where to start in it."""
    tree = os.path.join(directory, "tree")
    if not os.path.isdir(tree):
        with open(os.path.join(directory, "tree.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.isdir(tree):
                fresh = "%s.%s.%d" % (tree, os.uname().nodename, os.getpid())
                os.mkdir(fresh)
                # Python's own tarfile takes longer to import than this takes, and everybody waits for it.
                line = ["tar", "-x", "-p", "--no-same-owner", "-f", os.environ["SHOAL_CODE"], "-C", fresh]
                done = subprocess.run(line, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
                if done.returncode != 0:
                    message = done.stderr.decode(errors="replace").partition("\n")[0]
                    raise OSError(0, message, os.environ["SHOAL_CODE"])
                with contextlib.suppress(OSError):  # on shared storage another node may have been first
                    os.rename(fresh, tree)
    return os.path.join(tree, os.environ.get("SHOAL_WORKDIR", "."))
