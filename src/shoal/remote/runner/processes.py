"""What the processes of a job on a node know of each other, and what the kernel did to them."""

from __future__ import annotations

import contextlib
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:  # as typing has it, which takes longer to import than all the rest
    from typing import Iterator

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def note_warning(number: int) -> None:
    """Leave word of a warning for a script that still starts, and does not hear it: shoal.train.stop looks here."""
    if number in (signal.SIGUSR1, signal.SIGUSR2):
        name = "stop.%s" % os.environ.get("SLURM_RESTART_COUNT", "0")
        with contextlib.suppress(OSError), open(os.path.join(os.environ["SHOAL_JOB_DIR"], name), "w") as note:
            note.write("%d\n" % number)


@contextlib.contextmanager
def register(directory: str) -> Iterator[None]:
    """Let this node's agent know the rank while it runs."""
    place = os.path.join(directory, "pids.%s" % os.uname().nodename)
    os.makedirs(place, exist_ok=True)
    mine = os.path.join(place, str(os.getpid()))
    with open(mine, "w"):
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(mine)


def registered(directory: str) -> list[int]:
    place = os.path.join(directory, "pids.%s" % os.uname().nodename)
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(place) if _is_ours(int(name))]
    return []


def _is_ours(pid: int) -> bool:
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
