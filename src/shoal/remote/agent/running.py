"""Running programs on the host, and the words for what fails: cause and fix."""

from __future__ import annotations

import errno
import fcntl
import os
import time

from shoal.remote.agent.fast_stdlib import signal

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Any, Callable

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
    "DEBIAN_FRONTEND": "noninteractive",
    "HOME": "/root",
    **{name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")},
}


def run(
    argv: list[str], stdin: bytes = b"", timeout: float = 60.0, watch: Callable[[str], None] | None = None
) -> tuple[int, str]:
    """Run a program to its end: its status and output. 127: not there; 124: took longer than `timeout`.

    Output goes to memory files, not to pipes: if the agent is killed, a half-done `dpkg` goes on undisturbed. `watch`
    is called with each line the program writes to descriptor 3.
    """
    output, progress, input_file = open_memory_file(), open_memory_file(), open_memory_file()
    try:
        os.write(input_file, stdin)
        os.lseek(input_file, 0, os.SEEK_SET)
        actions = [
            (os.POSIX_SPAWN_DUP2, fd, to) for fd, to in ((input_file, 0), (output, 1), (output, 2), (progress, 3))
        ]
        try:
            pid = os.posix_spawnp(
                argv[0], argv, ENVIRONMENT, file_actions=actions, setsid=True, setsigdef=[signal.SIGPIPE]
            )
        except OSError as error:
            return 127, f"{argv[0]}: {error.strerror}"
        return _await(pid, timeout, progress, watch), text_of(output)
    finally:
        for fd in (output, progress, input_file):
            os.close(fd)


def _await(pid: int, timeout: float, progress: int, watch: Callable[[str], None] | None) -> int:
    deadline, pause, offset = time.monotonic() + timeout, 0.0005, 0
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if watch:
            data = os.pread(progress, 1 << 20, offset)
            complete = data[: data.rfind(b"\n") + 1]
            offset += len(complete)
            for line in complete.decode("utf-8", "replace").splitlines():
                watch(line)
        if ended:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            reap(pid)
            return 124
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def reap(pid: int, seconds: float = 2.0) -> bool:
    """Whether a killed process has ended. One that waits in the kernel for a share whose server is away does not."""
    deadline = time.monotonic() + seconds
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def open_memory_file() -> int:
    if hasattr(os, "memfd_create"):
        # High enough to stay clear of the descriptors 0 to 3 that are handed to the child.
        return _move_up(os.memfd_create("shoal"))
    import tempfile

    with tempfile.TemporaryFile() as file:
        return _move_up(os.dup(file.fileno()))


def _move_up(fd: int) -> int:
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return high


def text_of(fd: int) -> str:
    size = os.fstat(fd).st_size
    start = max(0, size - (1 << 20))
    return os.pread(fd, size - start, start).decode("utf-8", "replace")


def run_checked(argv: list[str], what: str, timeout: float = 120.0) -> str:
    """Run a program that has to succeed."""
    status, text = run(argv, timeout=timeout)
    if status:
        raise Failure(f"{what}: `{' '.join(argv)}` ended with status {status}\n{last_lines(text)}")
    return text


def last_lines(text: str, count: int = 20) -> str:
    return "\n".join(text.strip().splitlines()[-count:])


def has_settled(pid: str, seconds: float) -> bool:
    """Whether a daemon has been up long enough. On a busy host it may take long to get to what it dies of."""
    return seconds > 0.3 and (seconds > 10 or not is_busy(pid))


def is_busy(leader: str) -> bool:
    """Whether a process, or one of its session, has something to do now: it runs, or waits for a CPU or a disk.

    A zombie counts too: its end is not noticed yet.
    """
    for look in range(3):  # a child that is forked while we look is seen the next time
        time.sleep(0.02 * look)
        if _needs_cpu(leader):
            return True
    return False


def _needs_cpu(leader: str) -> bool:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
        except (OSError, ValueError):  # it has ended
            continue
        if (leader == pid and state == b"Z") or (leader in (pid, session.decode()) and state in (b"R", b"D")):
            return True
    return False


def which(name: str) -> str | None:
    for folder in (ENVIRONMENT["PATH"] + ":/usr/lib/wsl/lib").split(":"):
        path = folder + "/" + name
        if os.access(path, os.X_OK):
            return path
    return None


class Failure(Exception):
    """An item cannot be applied. The text is what was found; `fix` is what to do elsewhere than on the host."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


def explain(error: OSError, path: str, what: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "No space left on device: " + space_left(path)
    return f"{error.filename or what}: {error.strerror}"


def space_left(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    total, free = disk_space(path)
    return f"{path} has {free} MB free of {total} MB; free some space (apt-get clean, old logs) and run again"


def disk_space(path: str) -> tuple[int, int]:
    usage = os.statvfs(path)
    return usage.f_blocks * usage.f_frsize >> 20, usage.f_bavail * usage.f_frsize >> 20


def most_relevant_line(text: str, items: list[dict[str, Any]]) -> str:
    """The line of a log that best names the cause: one with a word of `advice`, else the first fatal one."""
    lines = [line.strip() for line in text.splitlines() if "error" in line.lower() or "fatal" in line.lower()]
    patterns = [word for item in items for word, _ in item.get("advice", ())]
    for signs in (patterns, ["fatal"], [""]):
        for line in lines:
            if any(sign.lower() in line.lower() for sign in signs):
                return line
    return ""


def advice(items: list[dict[str, Any]], text: str) -> str:
    """What to do, by the words that a complaint names; "" where it names none of ours."""
    line = most_relevant_line(text, items).lower()
    steps = [todo for item in items for word, todo in item.get("advice", ()) if word.lower() in line]
    return steps[0] if steps else ""
