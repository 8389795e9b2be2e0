"""What runs on the nodes of a job: one program of the standard library, for Python 3.8 and later, run by `start.py`.

    runner.py rank --rank-from VARIABLE -- COMMAND    one rank: its log with time stamps, its signals, how it ended
    runner.py spawn --nproc N -- COMMAND              one a node, starts N of the above
    runner.py agent -- TORCHRUN ...                   one a node, starts torchrun and passes signals on to its ranks

Below $SHOAL_JOB_DIR a rank leaves `rank-R.N.node`, where N counts the job's restarts, `rank-R.N.log`, and when it ends
`rank-R.N.end`.
With $SHOAL_PROFILE its profiler leaves `profile/rank-R.N.*` there too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # as typing has it, which takes longer to import than all the rest
    from types import FrameType
    from typing import Iterator

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
LONGEST_LINE = 16 * 1024


def main(argv: list[str]) -> int:
    mode, options, command = argv[0], argv[1 : argv.index("--")], argv[argv.index("--") + 1 :]
    if mode == "rank":
        return Rank(int(os.environ[options[1]]), command).run()
    if mode == "spawn":
        return spawn(int(options[1]), command)
    return agent(command)


class Rank:
    """One process of the user's script."""

    def __init__(self, rank: int, command: list[str]) -> None:
        self.rank = rank
        self.command = command
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.directory = os.environ["SHOAL_JOB_DIR"]
        self.name = os.path.join(self.directory, "rank-%d.%d" % (rank, self.restart))
        self.traces = os.path.join(self.directory, "profile", "rank-%d.%d" % (rank, self.restart))
        self.node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.echo = os.environ.get("SHOAL_ECHO") == "1"
        self.log = -1
        self.partial = b""
        self.signals: list[int] = []
        self.unsent: list[int] = []
        self.child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        try:
            own_directory(self.directory, os.environ.get("SHOAL_SUBMISSION", ""))
            with contextlib.suppress(OSError), open(self.name + ".node", "w") as file:
                file.write(self.node + "\n")
            self.log = os.open(self.name + ".log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            # Without a log; the batch script's output has it, and `shoal logs` reads that too.
            where = os.fsdecode(error.filename or self.directory)
            sys.stderr.write("shoal: error: cannot use %s: %s\n" % (where, error.strerror))
            return 127
        torch_variables(self.rank)
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_w, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in STOP_SIGNALS:
            signal.signal(number, self._pass_on)
        start, before = time.time(), out_of_memory_kills()
        try:
            os.chdir(working_tree(self.directory))
            out_r, out_w = os.pipe()
            command = profiled(self.command, os.environ.get("SHOAL_PROFILE", ""), self.traces, self.name + ".pid")
            child = self.child = subprocess.Popen(
                command, stdout=out_w, stderr=out_w, stdin=subprocess.DEVNULL, preexec_fn=_deaf_to_warnings
            )
        except OSError as error:
            self._say("cannot start %s: %s" % (os.fsdecode(error.filename or self.command[0]), error.strerror))
            self._ended(start, 127, False)
            return 127
        os.close(out_w)
        for early in self.signals:  # those that came before there was a child
            self._send(early)
        with register(self.directory):
            self._copy(child, out_r, wake_r)
            status = child.wait()
        with contextlib.suppress(OSError):
            os.unlink(self.name + ".pid")
        if self.partial:
            self._line(time.time(), self.partial)
        self._tell_traces(status)
        self._ended(start, status, status == -signal.SIGKILL and out_of_memory_kills() > before)
        if status == int(os.environ.get("SHOAL_EXIT_REQUEUE", "-1")):
            # Slurm and torchrun take any other status than 0 for a failure and would end the other ranks at once.
            with open(os.path.join(self.directory, "requeue.%d" % self.restart), "w") as note:
                note.write("%d\n" % self.rank)
            return 0
        return status if status >= 0 else 128 - status

    def _copy(self, child: subprocess.Popen[bytes], out: int, wake: int) -> None:
        """Copy what the child prints into the log until it has ended. What it left running may hold the pipe open."""
        os.set_blocking(out, False)
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            until = 0.0
            while True:
                ended = child.poll() is not None
                if ended and not until:
                    until = time.monotonic() + 1
                for key, _ in selector.select(0 if ended else 0.2 if self.unsent else None):
                    if key.fd == wake:
                        os.read(wake, 4096)
                    elif not self._read(out):
                        selector.unregister(out)
                for number in [] if ended else [self.unsent.pop(0) for _ in list(self.unsent)]:
                    self._send(number)
                if ended and (not self._read(out) or time.monotonic() > until):
                    return

    def _read(self, out: int) -> bool:
        try:
            data = os.read(out, 65536)
        except BlockingIOError:
            return False
        now = time.time()
        lines = (self.partial + data).split(b"\n")
        self.partial = lines.pop()
        for line in lines:
            self._line(now, line)
        if len(self.partial) > LONGEST_LINE:
            self._line(now, self.partial)
            self.partial = b""
        return bool(data)

    def _line(self, now: float, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk does not stop training
            os.write(self.log, b"%.6f %s\n" % (now, text))
        if self.echo:
            with contextlib.suppress(OSError):
                os.write(1, text + b"\n")

    def _say(self, text: str) -> None:
        self._line(time.time(), ("shoal: " + text).encode())

    def _tell_traces(self, status: int) -> None:
        kind = os.environ.get("SHOAL_PROFILE")
        place, start = os.path.split(self.traces)
        if kind == "line" and os.path.exists(self.traces + ".lprof"):
            # Here, where the script is: its lines are in the report, and a person can read it anywhere.
            with contextlib.suppress(OSError, subprocess.SubprocessError), open(self.traces + ".txt", "w") as report:
                line = [self.command[0], "-m", "line_profiler", self.traces + ".lprof"]
                subprocess.run(line, stdout=report, stdin=subprocess.DEVNULL, timeout=60, check=False)
        with contextlib.suppress(OSError):
            left = [name for name in sorted(os.listdir(place)) if name.startswith(start + ".")] if kind else []
            for name in left:
                self._say("--profile %s: %s:%s/%s" % (kind, self.node, place, name))
            if kind and not left and status == 0:
                self._say("--profile %s left nothing" % kind)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        note_warning(number)
        self._send(number)

    def _send(self, number: int) -> None:
        if self.child is None or self.child.returncode is not None:
            return
        if os.environ.get("SHOAL_PROFILE") != "nsys":
            self.child.send_signal(number)
            return
        # nsys keeps signals to itself, and starts the script in a session of its own.
        try:
            with open(self.name + ".pid") as file:
                script = int(file.read())
        except (OSError, ValueError):
            self.unsent.append(number)  # until there is one
            return
        with contextlib.suppress(OSError):
            os.kill(script, number)

    def _ended(self, start: float, status: int, out_of_memory: bool) -> None:
        record = {
            "rank": self.rank,
            "node": self.node,
            "restart": self.restart,
            "start": start,
            "end": time.time(),
            "status": status,
            "out_of_memory": out_of_memory,
            "signals": [signal.Signals(number).name for number in self.signals],
        }
        import json  # not before the script has started: the person waits for that

        with contextlib.suppress(OSError), open(self.name + ".end", "w") as file:
            file.write(json.dumps(record) + "\n")


def _deaf_to_warnings() -> None:
    """A script that does not handle the warning signals does not die of them; one that does sets its own handler."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


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


def profiled(command: list[str], kind: str, traces: str, pid: str) -> list[str]:
    """The command with a profiler around it, which leaves files whose names begin with `traces`.

    Where the profiler starts the script out of our sight, the script's process id is left in the file `pid`.
    """
    if not kind:
        return command
    os.makedirs(os.path.dirname(traces), exist_ok=True)
    if kind == "nsys":
        place, name = os.path.split(traces)
        restart = name.rpartition(".")[2]
        output = os.path.join(place, "rank-%q{RANK}." + restart)  # nsys puts the variable in
        # What the GPUs do. Samples of the CPUs would make gigabytes of the imports alone.
        options = ["--trace=cuda,nvtx,cudnn,cublas", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true"]
        known = ["sh", "-c", 'echo $$ > "$0.new" && mv "$0.new" "$0" && exec "$@"', pid]
        return ["nsys", "profile", *options, "--output=" + output, *known, *command]
    python, script = command[0], command[1:]
    if kind == "line":
        # Every function of the script, not only those that are marked for it.
        options = ["--line-by-line", "--prof-mod", script[0], "--outfile", traces + ".lprof"]
        return [python, "-m", "kernprof", *options, *script]
    return [python, "-m", "shoal.train.profile", *script]


def note_warning(number: int) -> None:
    """Leave word of a warning for a script that still starts, and does not hear it: shoal.train.stop looks here."""
    if number in (signal.SIGUSR1, signal.SIGUSR2):
        name = "stop.%s" % os.environ.get("SLURM_RESTART_COUNT", "0")
        with contextlib.suppress(OSError), open(os.path.join(os.environ["SHOAL_JOB_DIR"], name), "w") as note:
            note.write("%d\n" % number)


def torch_variables(rank: int) -> None:
    """What torch reads from the environment, where the launcher has not set it."""
    given = os.environ
    nodes = int(given.get("SLURM_NNODES", "1"))
    world = int(given.get("SLURM_NTASKS", "1"))
    wanted = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": given.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": world // nodes,
        "GROUP_RANK": given.get("SLURM_NODEID", "0"),
        "NODE_RANK": given.get("SLURM_NODEID", "0"),
    }
    for name, value in wanted.items():
        given.setdefault(name, str(value))


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
                    said = done.stderr.decode(errors="replace").partition("\n")[0]
                    raise OSError(0, said, os.environ["SHOAL_CODE"])
                with contextlib.suppress(OSError):  # on shared storage another node may have been first
                    os.rename(fresh, tree)
    return os.path.join(tree, os.environ.get("SHOAL_WORKDIR", "."))


def spawn(count: int, command: list[str]) -> int:
    """Start the ranks of this node, wait for all; the first that fails ends the others."""
    node, nodes = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_NNODES"])
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.returncode is None:
                child.send_signal(number)

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    for local in range(count):
        own = dict(os.environ, RANK=str(node * count + local), LOCAL_RANK=str(local), WORLD_SIZE=str(nodes * count))
        own.update(LOCAL_WORLD_SIZE=str(count), GROUP_RANK=str(node), NODE_RANK=str(node), SHOAL_SPAWN="1")
        line = [sys.executable, "-I", "-S", os.path.abspath(sys.argv[0]), "rank", "--rank-from", "RANK", "--"]
        children.append(subprocess.Popen(line + command, env=own))
    worst = 0
    running = list(children)
    while running:
        time.sleep(0.05)
        for child in [child for child in running if child.poll() is not None]:
            running.remove(child)
            if child.returncode and not worst:
                worst = child.returncode if child.returncode > 0 else 128 - child.returncode
                for other in running:
                    other.terminate()
    return worst


def agent(command: list[str]) -> int:
    """Start torchrun deaf to the stop signals and pass these on to the ranks, which it starts out of our sight."""
    directory = os.environ["SHOAL_JOB_DIR"]
    first = os.environ.get("SLURM_NODEID", "0") == "0"
    # What differs from node to node. torchrun reads any of its options from a variable with PET_ before its name.
    os.environ["PET_RDZV_CONF"] = "is_host=%s" % ("true" if first else "false")
    os.environ["PET_LOCAL_ADDR"] = os.environ.get("SLURMD_NODENAME", "")
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"

    def pass_on(number: int, frame: FrameType | None) -> None:
        note_warning(number)
        for pid in registered(directory):
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    child = subprocess.Popen(command, preexec_fn=_deaf)
    if not first:
        import unreached  # type: ignore[import-not-found]

        unreached.watch(lambda: bool(registered(directory)))
    status = child.wait()
    return status if status >= 0 else 128 - status


def _deaf() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
