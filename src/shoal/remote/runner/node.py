"""A job on one node: its directory with the code, and what its processes know of each other."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from .variables import IMAGE

WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
STOP_SIGNALS = (*WARNING_SIGNALS, signal.SIGTERM, signal.SIGINT)
SUBMISSION = "SHOAL_SUBMISSION"
"""A variable in the environment of sbatch, which Slurm keeps with the job: a number of this submission's own."""
RENAME_ATTEMPTS = 5
RENAME_PAUSE_S = 0.2
"""Between the attempts of a node to make the directory of a job."""


def ignore_signals(numbers: tuple[signal.Signals, ...]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def contained(command: list[str]) -> list[str]:
    """The command that runs a command in the job's image, where it has one."""
    if IMAGE not in os.environ:
        return command
    return [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), "image", "--", *command]


def note_warning(number: int) -> None:
    """Leave word of a warning for a script that still starts, and does not hear it: shoal.train.stop looks here."""
    if number in WARNING_SIGNALS:
        name = "stop.%s" % os.environ.get("SLURM_RESTART_COUNT", "0")
        with contextlib.suppress(OSError), open(os.path.join(os.environ["SHOAL_JOB_DIR"], name), "w") as note:
            note.write("%d\n" % number)


def read_warnings(take: Callable[[int], None]) -> None:
    """Call `take` with each warning that the batch script writes to our standard input: a signal's name or number."""

    def read() -> None:
        text = b""
        while True:
            try:
                data = os.read(0, 4096)
            except OSError:
                return
            if not data:
                return
            *words, text = (text + data).split(b"\n")
            for word in map(bytes.decode, words):
                with contextlib.suppress(KeyError, OSError):
                    take(int(word) if word.isdecimal() else signal.Signals["SIG" + word])

    threading.Thread(target=read, daemon=True).start()


def signal_handlers(pid: int, number: int) -> list[int]:
    """The process if it handles the signal, else the nearest of its descendants that do.

    What is below a handler is not looked at: a data worker inherits the handler of its trainer.
    """
    with contextlib.suppress(OSError):
        with open("/proc/%d/status" % pid) as file:
            handled = next((int(line.split()[1], 16) for line in file if line.startswith("SigCgt:")), 0)
        if handled >> (number - 1) & 1:
            return [pid]
        return [handler for child in _children(pid) for handler in signal_handlers(child, number)]
    return []


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for thread in os.listdir("/proc/%d/task" % pid):
        with contextlib.suppress(OSError), open("/proc/%d/task/%s/children" % (pid, thread)) as file:
            children += map(int, file.read().split())
    return children


@contextlib.contextmanager
def register(directory: str, rank: int) -> Iterator[None]:
    """Let this node's agent know the rank while it runs. One that is killed with its host stays registered."""
    place = _registrations(directory)
    os.makedirs(place, exist_ok=True)
    registration = os.path.join(place, str(os.getpid()))
    with open(registration, "w") as file:
        file.write("%d %s %s\n" % (rank, os.environ.get("SLURM_RESTART_COUNT", "0"), boot_identity()))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(registration)


def registered(directory: str) -> dict[int, int]:
    """The processes of the ranks that run here, and which rank each is."""
    with contextlib.suppress(OSError):
        entries = [(int(name), _registration(directory, name)) for name in os.listdir(_registrations(directory))]
        return {pid: rank for pid, (rank, _, boot) in entries if boot == boot_identity() and _is_rank(pid)}
    return {}


def ranks_before_boot(directory: str, restart: str) -> list[int]:
    """The ranks of this turn that ran here when this host was started again."""
    with contextlib.suppress(OSError):
        entries = [_registration(directory, name) for name in os.listdir(_registrations(directory))]
        return sorted(rank for rank, turn, boot in entries if turn == restart and boot != boot_identity())
    return []


def boot_identity() -> str:
    """Differs from one start of this host to the next. A container has the boot id of the machine it is on."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    with contextlib.suppress(OSError), open("/proc/1/stat") as file:
        boot += "-" + file.read().rpartition(") ")[2].split()[19]  # when its first process started
    return boot


def _registrations(directory: str) -> str:
    return os.path.join(directory, "pids.%s" % os.uname().nodename)


def _registration(directory: str, name: str) -> tuple[int, str, str]:
    """The rank, the turn and the boot in which it runs; no turn and no boot where that is still being written."""
    rank, turn, boot = _content(os.path.join(_registrations(directory), name)).split() or ("-1", "", "")
    return int(rank), turn, boot


def _is_rank(pid: int) -> bool:
    """A number that a killed rank left behind may be another process by now."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return b"/start.py\0rank\0" in file.read()
    except OSError:
        return False


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for memory: in our cgroup where that is counted, else on the node."""
    for path in _memory_events():
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _memory_events() -> Iterator[str]:
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                yield "/sys/fs/cgroup" + path + "/memory.events"
            elif "memory" in controllers.split(","):
                yield "/sys/fs/cgroup/memory" + path + "/memory.oom_control"
    yield "/proc/vmstat"


def own_directory(directory: str, submission: str) -> None:
    """Make the job's directory. A cluster that was built again counts its jobs from 1 again: what an earlier job of
    this number left there, code and checkpoints too, is put aside."""
    place, name = os.path.split(directory)
    os.makedirs(place, exist_ok=True)
    if not submission:
        return os.makedirs(directory, exist_ok=True)
    mark = os.path.join(directory, "submission")
    if _content(mark) == submission:
        return None
    # The user's own, for what an earlier job of somebody else left here is not ours to open.
    with open(os.path.join(place, ".%s.%d.lock" % (name, os.getuid())), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _content(mark) == submission:
            return None
        _begin_directory(directory, submission)
    return None


def _begin_directory(directory: str, submission: str) -> None:
    """Make the directory under another name and rename it: it appears with its mark, or not at all. Several nodes may
    do so at once, for over SSH a lock holds on its own node only; the first one counts."""
    place, name = os.path.split(directory)
    mark = os.path.join(directory, "submission")
    fresh = os.path.join(place, ".%s.%s.%d" % (name, os.uname().nodename, os.getpid()))
    os.mkdir(fresh, 0o700)
    try:
        with open(os.path.join(fresh, "submission"), "w") as file:
            file.write(submission)
        for attempt in range(RENAME_ATTEMPTS):
            try:
                return os.rename(fresh, directory)
            except OSError:  # an earlier directory, or that of another node; over SSH every reason is EPERM
                if _content(mark) == submission:
                    return None
            try:
                _set_aside(directory, "%s.before-%s" % (directory, submission))
            except OSError:
                # Another node may have been first with this as well.
                if attempt == RENAME_ATTEMPTS - 1:
                    raise
                time.sleep(RENAME_PAUSE_S)
        raise OSError(errno.EAGAIN, "others make it anew all the time", directory)
    finally:
        with contextlib.suppress(OSError):  # it has its place
            os.unlink(os.path.join(fresh, "submission"))
            os.rmdir(fresh)


def _content(path: str) -> str:
    try:
        with open(path) as file:
            return file.read(256)
    except OSError:
        return ""


def _set_aside(directory: str, place: str) -> None:
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
    """The job's own copy of the code, unpacked by the first rank of the node that comes here; where to start in it.

    Where others may write to the job's directory, as on a share over SSH, the copy is on the node.
    """
    own = os.environ.get("SHOAL_TREE_DIR")
    if own:
        own_directory(own, os.environ.get(SUBMISSION, ""))
        directory = own
    tree = os.path.join(directory, "tree")
    if not os.path.isdir(tree):
        with open(os.path.join(directory, "tree.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.isdir(tree):
                fresh = "%s.%s.%d" % (tree, os.uname().nodename, os.getpid())
                os.mkdir(fresh)
                archive = verified_archive(os.environ["SHOAL_CODE"], os.environ.get("SHOAL_CODE_HASH", ""))
                # Python's own tarfile takes longer to import than this takes, and everybody waits for it.
                line = ["tar", "-x", "-p", "--no-same-owner", "-f", "-", "-C", fresh]
                result = subprocess.run(line, input=archive, stderr=subprocess.PIPE, check=False)
                if result.returncode != 0:
                    message = result.stderr.decode(errors="replace").partition("\n")[0]
                    raise OSError(0, message, os.environ["SHOAL_CODE"])
                try:
                    os.rename(fresh, tree)
                except OSError:  # on shared storage another node may have been first
                    import shutil

                    shutil.rmtree(fresh, ignore_errors=True)
                    if not os.path.isdir(tree):
                        raise
    return os.path.join(tree, os.environ.get("SHOAL_WORKDIR", "."))


def verified_archive(path: str, expected: str) -> bytes:
    """The code as it was sent. On some storage others may write: what they changed does not run."""
    with open(path, "rb") as file:
        data = file.read()
    if not hashlib.sha256(data).hexdigest().startswith(expected):
        text = "this is not the code that was sent: somebody changed it; use --directory with one of your own"
        raise OSError(0, text, path)
    return data
