"""Reports the progress of training: a line in rank 0's log, and `progress.json` for `shoal jobs`.

The file is one JSON object on one line in the job's directory, replaced as a whole. Its fields:

    step, total_steps     the current and the last step (null: unknown)
    loss                  the last one; null before the first, and if it is not finite
    diverged              whether the last loss is not finite
    samples_per_second    over all ranks, in the last minute; null before the second report
    steps_per_second      likewise
    eta_seconds           until `total_steps` at this speed
    mfu                   model FLOPs utilization, 0 to 1, if the model's FLOPs and the GPU's peak are known
    state                 running, done, or stopped (until it is requeued)
    restarts              the number of requeues
    started, updated      Unix times of this start and of this file
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from shoal.contract import PROGRESS_FILE, SHOAL_JOB_DIR
from shoal.train import profile
from shoal.train.env import Env, read_env
from shoal.train.errors import StopExit
from shoal.train.file_io import replace_file
from shoal.train.proof_record import detach, proof_recorder
from shoal.train.rank_record import end_record, open_record, record_step

SPEED_WINDOW_S = 60.0
FILE_PERIOD_S = 2.0

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "V100": 125e12,
}
"""Peak FLOP/s for dense bf16 (V100: fp16), by data sheet. The first name that is part of the GPU's counts."""

State = Literal["running", "done", "stopped"]


class Progress:
    """Call `step` after each step. On ranks other than 0 it returns at once."""

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        samples_per_step: int | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        env: Env | None = None,
        environ: Mapping[str, str] = os.environ,
        directory: str | os.PathLike[str] | None = None,
        write: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`samples_per_step` counts all ranks; `flops_per_sample` a forward and a backward pass (about 6 times the
        parameters for each token). `peak_flops` is that of one GPU; the default is known for common ones."""
        env = env if env is not None else read_env(environ)
        self._total = total_steps
        self._samples_per_step = samples_per_step
        self._flops = flops_per_sample
        self._peak = (peak_flops or peak_of_this_gpu() or 0.0) * env.world_size
        self._restarts = env.restart_count
        self._environ = environ
        self._active = env.rank == 0
        self._proof = proof_recorder(environ)
        open_record(environ)
        location = directory or environ.get(SHOAL_JOB_DIR)
        self._file = Path(location, PROGRESS_FILE) if location else None
        self._write = write or (lambda line: print(line, flush=True))
        self._clock = clock
        self._began = clock()
        self._started = time.time()
        self._seen: deque[tuple[float, int, float]] = deque()
        self._samples = 0.0
        self._step: int | None = None
        self._loss: Any = None
        self._next_file = self._next_line = -math.inf

    def step(self, step: int, loss: Any = None, samples: float | None = None) -> None:
        """Report one step. `loss` may be a tensor: it is read only when shown, since reading waits for the GPU.

        `samples` is the number of samples over all ranks, if it differs from `samples_per_step`.
        """
        if self._proof is not None:
            self._proof.loss("progress", step, loss)
        profile.step("progress", self._environ)
        record_step("progress", step, self._environ)
        if not self._active:
            return
        self._samples += samples if samples is not None else self._samples_per_step or 0
        self._step = step
        if loss is not None:
            self._loss = detach(loss)
        now = self._clock()
        last = self._total is not None and step >= self._total
        if now >= self._next_file or last:
            self._next_file = now + FILE_PERIOD_S
            self._report(now, "running", with_line=last or now >= self._next_line)

    def close(self, state: State = "done") -> None:
        """End the reports; `stopped` if the job continues after a requeue."""
        end_record()
        if self._active and self._step is not None:
            self._active = False
            self._report(self._clock(), state, with_line=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, StopExit):
            self.close("done" if error is None else "stopped")

    def _report(self, now: float, state: State, *, with_line: bool) -> None:
        if not self._seen or self._step != self._seen[-1][1]:
            self._seen.append((now, self._step or 0, self._samples))
        while len(self._seen) > 2 and now - self._seen[1][0] > SPEED_WINDOW_S:
            self._seen.popleft()
        numbers = self._numbers(state)
        if self._file:
            with contextlib.suppress(OSError):  # a full disk does not stop training
                replace_file(self._file, json.dumps(numbers).encode() + b"\n")
        if with_line:
            # Every 10 s in the first minute, then once a minute.
            self._next_line = now + (10 if now - self._began < SPEED_WINDOW_S else SPEED_WINDOW_S)
            self._write(format_line(numbers))

    def _numbers(self, state: State) -> dict[str, Any]:
        steps, samples = self._speed()
        steps_left = max(0, self._total - (self._step or 0)) if self._total is not None else None
        loss: float | None = None
        with contextlib.suppress(TypeError, ValueError):
            loss = float(self._loss)
        return {
            "step": self._step,
            "total_steps": self._total,
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "diverged": loss is not None and not math.isfinite(loss),
            "samples_per_second": samples,
            "steps_per_second": steps,
            "eta_seconds": steps_left / steps if steps_left is not None and steps else None,
            "mfu": samples * self._flops / self._peak if samples and self._flops and self._peak else None,
            "state": state,
            "restarts": self._restarts,
            "started": self._started,
            "updated": time.time(),
        }

    def _speed(self) -> tuple[float | None, float | None]:
        """Steps and samples per second, without the time before the first step (compiling, first batch)."""
        if len(self._seen) < 2:
            return None, None
        (start, first, before), (end, last, after) = self._seen[0], self._seen[-1]
        if end <= start or last <= first:
            return None, None
        return (last - first) / (end - start), (after - before) / (end - start) or None


def format_line(numbers: Mapping[str, Any]) -> str:
    """A progress file as one line of text, without unknown values."""
    total = f"/{numbers['total_steps']}" if numbers.get("total_steps") is not None else ""
    pieces = [f"step {numbers['step']}{total}"]
    if numbers.get("loss") is not None:
        pieces.append(f"loss {numbers['loss']:.4g}")
    elif numbers.get("diverged"):
        pieces.append("loss is not finite")
    if numbers.get("samples_per_second"):
        pieces.append(f"{_short(numbers['samples_per_second'])} samples/s")
    elif numbers.get("steps_per_second"):
        pieces.append(f"{_short(numbers['steps_per_second'])} steps/s")
    if numbers.get("mfu") is not None:
        pieces.append(f"MFU {numbers['mfu']:.1%}")
    if numbers.get("state", "running") != "running":
        pieces.append(str(numbers["state"]))
    elif numbers.get("eta_seconds"):
        pieces.append(f"ETA {_duration(numbers['eta_seconds'])}")
    return "  ".join(pieces)


def peak_of_this_gpu() -> float | None:
    """Peak FLOP/s of this process's GPU, if it is in the table. Does not import torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def _short(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def _duration(seconds: float) -> str:
    """In Slurm's format: 1-02:03:04."""
    days, rest = divmod(round(seconds), 86400)
    text = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else text
