"""`shoal run --profile torch`: Chrome traces of every rank, from torch.profiler, without a change to the script.

    profile/rank-R.N.start.json.gz    from the start of the script to the end of its first step
    profile/rank-R.N.steps.json.gz    a few steps after it has warmed up

in the job's directory, where N counts its restarts. Steps are those of the training library (`Run.steps`,
`Progress.step`), otherwise the steps of the optimizer. A script without steps is traced from its start, for a minute of
CPU time at most, so that the trace stays readable.

`python -m shoal.train.profile SCRIPT ARGUMENTS` runs a script this way. Processes that the script starts itself are
traced from their first step on, if they use the library.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from shoal.contract import PROFILE_DIRECTORY, SHOAL_JOB_DIR, SHOAL_PROFILE

WAIT_STEPS, WARMUP_STEPS, ACTIVE_STEPS = 2, 1, 5
"""Steps after the first: skipped, warming up the profiler, recorded."""
START_TRACE_S = 60.0

Source = Literal["optimizer", "progress", "run"]
_PRIORITY: dict[Source, int] = {"optimizer": 0, "progress": 1, "run": 2}
"""Which source knows best where a step ends."""

_recorder: TraceRecorder | None = None


def step(source: Source, environ: Mapping[str, str] = os.environ) -> None:
    """A step is over. Without --profile this only reads a variable."""
    global _recorder
    if environ.get(SHOAL_PROFILE) != "torch":
        return
    if _recorder is None or _recorder.pid != os.getpid():
        _recorder = TraceRecorder(trace_prefix(environ))
    _recorder.step(source)


def main(argv: list[str]) -> None:
    """Run a script as python would, and trace it from its start."""
    global _recorder
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    try:
        import torch.optim.optimizer as optimizers
    except ImportError:
        print("shoal: --profile torch: this Python has no torch; the script runs without it", file=sys.stderr)
    else:
        _recorder = TraceRecorder(trace_prefix(os.environ))
        _recorder.begin()
        optimizers.register_optimizer_step_post_hook(lambda *ignored: step("optimizer"))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        if _recorder is not None:
            _recorder.close()


def trace_prefix(environ: Mapping[str, str]) -> Path:
    """The prefix of this process's trace files."""
    name = f"rank-{environ.get('RANK', '0')}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    return Path(environ.get(SHOAL_JOB_DIR, "."), PROFILE_DIRECTORY, name)


class TraceRecorder:
    """The traces of one process: its start, if `begin` was called, and then a few steps."""

    def __init__(self, traces: Path) -> None:
        self.pid = os.getpid()
        self._traces = traces
        self._thread = threading.get_ident()
        self._source: Source = "optimizer"
        self._steps = 0
        self._start: Any = None
        self._window: Any = None
        atexit.register(self.close)

    def begin(self) -> None:
        """Record from here to the end of the first step."""
        import torch.profiler

        # GPUs are traced with the steps only: the rank has not chosen its own yet.
        self._start = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
        self._start.start()
        # This timer interrupts the thread that must stop the profiler, and scripts rarely use it.
        signal.signal(signal.SIGVTALRM, self._on_timer)
        signal.setitimer(signal.ITIMER_VIRTUAL, START_TRACE_S)

    def step(self, source: Source) -> None:
        """A step is over. Of several sources, the one with the highest priority counts."""
        if threading.get_ident() != self._thread or _PRIORITY[source] < _PRIORITY[self._source]:
            return
        if source != self._source:
            self._source = source
            if self._steps:
                return  # the other source has counted this step
        self._steps += 1
        if self._steps == 1:
            self._end_start()
            self._open_window()
        elif self._window is not None:
            self._window.step()
            if self._steps > WAIT_STEPS + WARMUP_STEPS + ACTIVE_STEPS:
                self._close_window()

    def close(self) -> None:
        """Write what has been traced. For the end of the process."""
        if os.getpid() == self.pid:
            atexit.unregister(self.close)
            self._end_start()
            self._close_window()

    def _end_start(self) -> None:
        trace, self._start = self._start, None
        if trace is not None:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            trace.stop()
            self._export(trace, "start")

    def _on_timer(self, number: int, frame: FrameType | None) -> None:
        self._end_start()

    def _open_window(self) -> None:
        import torch.profiler as profiler

        self._window = profiler.profile(
            schedule=profiler.schedule(wait=WAIT_STEPS, warmup=WARMUP_STEPS, active=ACTIVE_STEPS, repeat=1),
            acc_events=True,  # avoids a warning of some releases about lost cycles; there is one only
            on_trace_ready=lambda trace: self._export(trace, "steps"),
        )
        self._window.start()

    def _close_window(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.stop()

    def _export(self, trace: Any, what: str) -> None:
        """Write a trace. A full disk does not stop training."""
        try:
            self._traces.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(f"{self._traces}.{what}.json.gz")
        except (OSError, RuntimeError) as error:
            print(f"shoal: --profile torch: {error}", file=sys.stderr)


if __name__ == "__main__":
    # Imported by its full name, so that the library uses the same recorder.
    from shoal.train import profile

    profile.main(sys.argv[1:])
