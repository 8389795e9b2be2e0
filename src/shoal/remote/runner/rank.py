"""One rank of a job: a process of the user's script.

Below $SHOAL_JOB_DIR a rank leaves `rank-R.N.node`, where N counts the job's restarts, `rank-R.N.log`, and when it ends
`rank-R.N.end`. With $SHOAL_PROFILE its profiler leaves `profile/rank-R.N.*` there too. While the last line is not
finished, as that of a progress bar, `rank-R.N.bar` has its state: the log gets a line once it is finished.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time

from .node import (
    STOP_SIGNALS,
    SUBMISSION,
    WARNING_SIGNALS,
    contained,
    note_warning,
    out_of_memory_kills,
    own_directory,
    read_warnings,
    register,
    signal_handlers,
    working_tree,
)
from .output import Output
from .variables import torch_variables

BAR_INTERVAL_S = 0.5
"""So often at most the state of an unfinished line is written."""
LONGEST_BAR = 1024
RETRY_S = 0.5
"""How often a script that does not handle a warning yet is looked at."""


class Rank:
    """One process of the user's script."""

    def __init__(self, rank_from: str, command: list[str]) -> None:
        self.rank_from = rank_from
        """The variable of the launcher that has the rank."""
        self.rank = rank = int(os.environ[rank_from])
        self.command = command
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.directory = os.environ["SHOAL_JOB_DIR"]
        self.name = os.path.join(self.directory, "rank-%d.%d" % (rank, self.restart))
        self.traces = os.path.join(self.directory, "profile", "rank-%d.%d" % (rank, self.restart))
        self.node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.echo = os.environ.get("SHOAL_ECHO", "0")
        self.log = -1
        self.output = Output()
        self.bar = b""
        """What the file of the unfinished line has."""
        self.bar_time = 0.0
        self.signals: list[int] = []
        self.unsent: list[int] = []
        self.warnings: list[int] = []
        """Those that no process of the script handles yet."""
        self.child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        wake = self._take_signals()
        try:
            own_directory(self.directory, os.environ.get(SUBMISSION, ""))
            self.log = os.open(self.name + ".log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            # Without a log; the batch script's output has it, and `shoal logs` reads that too.
            path = os.fsdecode(error.filename or self.directory)
            sys.stderr.write("shoal: error: cannot use %s: %s\n" % (path, error.strerror))
            return 127
        with register(self.directory, self.rank):
            with contextlib.suppress(OSError), open(self.name + ".node", "w") as file:
                file.write(self.node + "\n")
            return self._run_script(wake)

    def _take_signals(self) -> int:
        """Take signals and warnings from now on; the end of a pipe from which each can be read."""
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_w, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in STOP_SIGNALS:
            signal.signal(number, self._pass_on)

        def take_warning(number: int) -> None:
            self._warn(number)
            os.write(wake_w, b"w")

        read_warnings(take_warning)
        return wake_r

    def _run_script(self, wake: int) -> int:
        torch_variables(self.rank_from)
        start, before = time.time(), out_of_memory_kills()
        try:
            os.chdir(working_tree(self.directory))
            out_r, out_w = os.pipe()
            command = profiled(self.command, os.environ.get("SHOAL_PROFILE", ""), self.traces, self.name + ".pid")
            child = subprocess.Popen(contained(command), stdout=out_w, stderr=out_w, stdin=subprocess.DEVNULL)
            self.child = child
        except OSError as error:
            self._print("cannot start %s: %s" % (os.fsdecode(error.filename or self.command[0]), error.strerror))
            self._record_end(start, 127, False)
            return 127
        os.close(out_w)
        self._copy(child, out_r, wake)
        status = child.wait()
        with contextlib.suppress(OSError):
            os.unlink(self.name + ".pid")
        self._write_lines(self.output.end())
        self._show_unfinished()
        self._tell_traces(status)
        self._record_end(start, status, status == -signal.SIGKILL and out_of_memory_kills() > before)
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
                if not ended:
                    self._send_waiting()
                waiting = self.unsent or self.warnings
                changes = self.output.waits or self.output.unfinished() != self.bar
                pause = RETRY_S if waiting else BAR_INTERVAL_S if changes else None
                for key, _ in selector.select(0 if ended else pause):
                    if key.fd == wake:
                        os.read(wake, 4096)
                    elif not self._read(out):
                        selector.unregister(out)
                self._write_lines(self.output.finished())
                self._show_unfinished()
                if ended and (not self._read(out) or time.monotonic() > until):
                    return

    def _read(self, out: int) -> bool:
        try:
            data = os.read(out, 65536)
        except BlockingIOError:
            return False
        self._write_lines(self.output.take(data))
        return bool(data)

    def _show_unfinished(self) -> None:
        """Write the state of unfinished lines, now and then. A line that is finished at once is never written."""
        now, state = time.monotonic(), self.output.unfinished()
        if not state:
            self.bar_time = 0.0
        if state == self.bar:
            return
        if not state:
            self.bar = b""
            with contextlib.suppress(OSError):
                os.unlink(self.name + ".bar")
        elif not self.bar_time:
            self.bar_time = now
        elif now - self.bar_time >= BAR_INTERVAL_S:
            self.bar, self.bar_time = state, now
            with contextlib.suppress(OSError), open(self.name + ".bar", "wb") as file:
                file.write(b"%.6f %s\n" % (time.time(), state[:LONGEST_BAR]))

    def _write_lines(self, lines: list[tuple[float, bytes]]) -> None:
        for moment, text in lines:
            self._line(moment, text)

    def _line(self, now: float, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk does not stop training
            os.write(self.log, b"%.6f %s\n" % (now, text))
        if self.echo == "1":
            with contextlib.suppress(OSError):
                os.write(1, text + b"\n")

    def _print(self, text: str) -> None:
        self._line(time.time(), ("shoal: " + text).encode())

    def _tell_traces(self, status: int) -> None:
        kind = os.environ.get("SHOAL_PROFILE")
        place, start = os.path.split(self.traces)
        if kind == "line" and os.path.exists(self.traces + ".lprof"):
            # Here, where the script is: its lines are in the report, and a person can read it anywhere.
            with contextlib.suppress(OSError, subprocess.SubprocessError), open(self.traces + ".txt", "w") as report:
                line = [self.command[0], "-m", "line_profiler", self.traces + ".lprof"]
                subprocess.run(contained(line), stdout=report, stdin=subprocess.DEVNULL, timeout=60, check=False)
        with contextlib.suppress(OSError):
            left = [name for name in sorted(os.listdir(place)) if name.startswith(start + ".")] if kind else []
            for name in left:
                self._print("--profile %s: %s:%s/%s" % (kind, self.node, place, name))
            if kind and not left and status == 0:
                self._print("--profile %s left nothing" % kind)

    def _pass_on(self, number: int, frame: object) -> None:
        """Leave the signal to the loop, which this wakes up."""
        if number in WARNING_SIGNALS:
            self._warn(number)
        else:
            self.signals.append(number)
            self.unsent.append(number)

    def _warn(self, number: int) -> None:
        note_warning(number)
        self.warnings.append(number)

    def _send_waiting(self) -> None:
        """Send the script what has come for it: a warning only to those of its processes that handle it."""
        script = self._script()
        if script is None:
            return
        while self.unsent:
            _kill(script, self.unsent.pop(0))
        for number in [self.warnings.pop(0) for _ in list(self.warnings)]:
            handlers = signal_handlers(script, number)
            for pid in handlers:
                _kill(pid, number)
            (self.signals if handlers else self.warnings).append(number)

    def _script(self) -> int | None:
        """The process of the script while it runs."""
        if self.child is None or self.child.returncode is not None:
            return None
        if os.environ.get("SHOAL_PROFILE") != "nsys":
            return self.child.pid
        # nsys keeps signals to itself, and starts the script in a session of its own.
        try:
            with open(self.name + ".pid") as file:
                return int(file.read())
        except (OSError, ValueError):
            return None  # until there is one

    def _record_end(self, start: float, status: int, out_of_memory: bool) -> None:
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


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


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
        pid_writer = ["sh", "-c", 'echo $$ > "$0.new" && mv "$0.new" "$0" && exec "$@"', pid]
        return ["nsys", "profile", *options, "--output=" + output, *pid_writer, *command]
    python, script = command[0], command[1:]
    if kind == "line":
        # Every function of the script, not only those that are marked for it.
        options = ["--line-by-line", "--prof-mod", script[0], "--outfile", traces + ".lprof"]
        return [python, "-m", "kernprof", *options, *script]
    return [python, "-m", "shoal.train.profile", *script]
