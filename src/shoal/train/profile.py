"""`shoal run --profile torch`: Chrome traces of every rank, from torch.profiler, without a change to the script.

    profile/rank-R.N.start.json.gz    from the start of the script to the end of its first step
    profile/rank-R.N.steps.json.gz    a few steps after it has warmed up

in the job's directory, where N counts its restarts. Steps are what the training library says they are (`Run.steps`,
`Progress.step`), and for other scripts what their optimizers do. A script without steps is traced from its start to
its end, for a minute of CPU time at most: a trace is of use while a person can still look through it.

`python -m shoal.train.profile SCRIPT ARGUMENTS` runs a script this way. Processes that the script starts by itself are
traced from their first step on, where they use the library.
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

from shoal.train.contract import PROFILE_DIRECTORY, SHOAL_JOB_DIR, SHOAL_PROFILE

WAIT, WARMUP, ACTIVE = 2, 1, 5
"""Steps after the first one: left alone, watched so that the profiler is warm, recorded."""
START_SECONDS = 60.0

Source = Literal["optimizer", "progress", "run"]
_TRUST: dict[Source, int] = {"optimizer": 0, "progress": 1, "run": 2}
"""Who knows better where a step ends."""

_recorder: Recorder | None = None


def step(source: Source, environ: Mapping[str, str] = os.environ) -> None:
    """A step is over. Where nobody profiles, this is one look at the environment."""
    global _recorder
    if environ.get(SHOAL_PROFILE) != "torch":
        return
    if _recorder is None or _recorder.pid != os.getpid():
        _recorder = Recorder(traces_of(environ))
    _recorder.step(source)


def main(argv: list[str]) -> None:
    """Run a script as python would, and record it from its start."""
    global _recorder
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    try:
        import torch.optim.optimizer as optimizers
    except ImportError:
        print("shoal: --profile torch: this Python has no torch; the script runs without it", file=sys.stderr)
    else:
        _recorder = Recorder(traces_of(os.environ))
        _recorder.begin()
        optimizers.register_optimizer_step_post_hook(lambda *ignored: step("optimizer"))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        if _recorder is not None:
            _recorder.close()


def traces_of(environ: Mapping[str, str]) -> Path:
    """What the names of this process's traces begin with."""
    name = f"rank-{environ.get('RANK', '0')}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    return Path(environ.get(SHOAL_JOB_DIR, "."), PROFILE_DIRECTORY, name)


class Recorder:
    """The traces of one process: its start, where `begin` was called, and then a few steps."""

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

        # The GPUs come in with the steps: a rank has not chosen its own yet.
        self._start = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
        self._start.start()
        # The one clock that interrupts the thread that has to stop the profiler, and that scripts hardly ever use.
        signal.signal(signal.SIGVTALRM, self._long_enough)
        signal.setitimer(signal.ITIMER_VIRTUAL, START_SECONDS)

    def step(self, source: Source) -> None:
        """A step is over. Of several that say so, the one that knows best counts."""
        if threading.get_ident() != self._thread or _TRUST[source] < _TRUST[self._source]:
            return
        if source != self._source:
            self._source = source
            if self._steps:
                return  # the other one has counted this step
        self._steps += 1
        if self._steps == 1:
            self._end_start()
            self._open_window()
        elif self._window is not None:
            self._window.step()
            if self._steps > WAIT + WARMUP + ACTIVE:
                self._close_window()

    def close(self) -> None:
        """The process ends: keep what there is."""
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

    def _long_enough(self, number: int, frame: FrameType | None) -> None:
        self._end_start()

    def _open_window(self) -> None:
        import torch.profiler as profiler

        self._window = profiler.profile(
            schedule=profiler.schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
            acc_events=True,  # there is one cycle only; without it some releases warn that others are lost
            on_trace_ready=lambda trace: self._export(trace, "steps"),
        )
        self._window.start()

    def _close_window(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.stop()

    def _export(self, trace: Any, what: str) -> None:
        """A full disk does not stop training."""
        try:
            self._traces.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(f"{self._traces}.{what}.json.gz")
        except (OSError, RuntimeError) as error:
            print(f"shoal: --profile torch: {error}", file=sys.stderr)


if __name__ == "__main__":
    # Under the name by which the library knows it, so that both mean the same recorder.
    from shoal.train import profile

    profile.main(sys.argv[1:])
