"""One GPU: its binding, step times beside the bare loop, a resume that is equal bit for bit, and the stall of a save.

One rank shows that the code paths work on CUDA, and nothing about several GPUs. Without a GPU, --small runs the same
checks on the CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness import BenchError, bench_parser, report, run_bench, show_progress


@dataclass(frozen=True)
class Size:
    """The model, and when it is saved and killed."""

    width: int
    layers: int
    batch: int
    length: int
    steps: int
    save_at: int
    kill_at: int
    stall_width: int
    """Of the five linear layers whose save is timed."""


SIZES = {
    "full": Size(1024, 8, 32, 256, steps=40, save_at=20, kill_at=27, stall_width=4096),
    "small": Size(32, 2, 2, 8, steps=6, save_at=3, kill_at=4, stall_width=32),
}
KINDS = {"ddp": True, "fsdp": False}
"""Whether its saves are asynchronous."""


def main() -> None:
    options = bench_parser("gpu", __doc__).parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS is not deterministic
    import torch

    if not torch.cuda.is_available() and not options.small:
        raise BenchError("this machine has no NVIDIA GPU; --small runs the checks on the CPU")
    size = "small" if options.small else "full"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [f"{time.strftime('%Y-%m-%d')}: {device}, torch {torch.__version__}, one rank, bf16 mixed precision"]
    bare = _run_child("bare", "", size)
    lines.append(f"{'bare loop':<28} {1e3 * bare['step']:7.2f} ms a step")
    with tempfile.TemporaryDirectory() as directory:
        for kind, asynchronous in KINDS.items():
            lines += _check_resume(kind, asynchronous, directory, size, bare["step"])
            show_progress("\n".join(lines))
        lines += _run_child("stall", f"{directory}/stall", size)["lines"]
    report("gpu", options, "\n".join(lines) + "\n")


def _check_resume(kind: str, asynchronous: bool, directory: str, size: str, bare_step: float) -> list[str]:
    """A run that is killed and resumed has the losses and parameters of one that was not, bit for bit."""
    save_at, kill_at = SIZES[size].save_at, SIZES[size].kill_at
    whole = _run_child(kind, f"{directory}/{kind}-whole", size)
    killed = _run_child(kind, f"{directory}/{kind}-killed", size, kill=True)
    resumed = _run_child(kind, f"{directory}/{kind}-killed", size)
    if not killed["killed"] or resumed["first"] != save_at:
        raise BenchError(f"{kind} resumed at step {resumed['first']}, not at {save_at}")
    if resumed["losses"] != whole["losses"][save_at:] or resumed["parameters"] != whole["parameters"]:
        raise BenchError(f"{kind}: the resumed run differs from the whole run")
    title = f"{kind}, {whole['backend']}"
    ratio = whole["step"] / bare_step
    mode = "asynchronous" if asynchronous else "synchronous"
    return [
        f"{title:<28} {1e3 * whole['step']:7.2f} ms a step, {ratio:.2f} of bare",
        f"  {mode} save, killed at step {kill_at}, resumed at {save_at}: equal bit for bit",
        f"  save {1e3 * whole['save']:.0f} ms; loss {whole['losses'][0]:.4f} -> {whole['losses'][-1]:.4f}",
        *(f"  {line}" for line in whole["binding"].splitlines()),
    ]


def _run_child(kind: str, directory: str, size: str, kill: bool = False) -> dict[str, Any]:
    """Train or measure in a process of its own. A fork server imports torch once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint", "shoal.train.checkpoint"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, kind, directory, size, kill))
    process.start()
    sender.close()
    result: dict[str, Any] = {"killed": True}
    with contextlib.suppress(EOFError):
        result = receiver.recv()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise BenchError(f"{kind} failed with status {process.exitcode}")
    return result


def _child(sender: Connection, kind: str, directory: str, size: str, kill: bool) -> None:
    warnings.simplefilter("ignore")
    if kind == "stall":
        sender.send(measure_stall(Path(directory), SIZES[size]))
    else:
        sender.send(train(kind, directory, SIZES[size], kill))


def train(kind: str, directory: str, size: Size, kill: bool) -> dict[str, Any]:
    """Train in this process: the losses, a hash of the parameters, and the median time of a step."""
    import torch
    from torch import nn

    from shoal.train import Run, TrainState, init, parallelize, shutdown

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    width = size.width
    layers = [
        nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, dropout=0.1) for _ in range(size.layers)
    ]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(width, width))
    result: dict[str, Any] = {"backend": "", "save": 0.0, "first": None}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "bare":
        model = model.to(device)
    else:
        dist = init()
        device = dist.device
        model = parallelize(model, kind, mixed_precision="bf16")
        result |= {"backend": dist.backend, "binding": str(dist.binding)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses, times = [], []

    def step() -> None:
        x = torch.randn(size.batch, size.length, width, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=kind != "fsdp"):
            loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    if kind == "bare":
        times = [_seconds(step) for _ in range(size.steps)]
    else:
        run = Run(TrainState(model, optimizer), directory, save_every=size.save_at, asynchronous=KINDS[kind])
        for number in run.steps(size.steps):
            if result["first"] is None:
                result["first"] = number
            if kill and number == size.kill_at:
                run.checkpointer.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            times.append(_seconds(step))
        result["save"] = run.checkpointer.save_seconds
    result |= {"losses": losses, "parameters": _hash_parameters(model), "step": statistics.median(times)}
    if kind != "bare":
        shutdown()
    return result


def _hash_parameters(model: Any) -> str:
    import torch

    sha = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        sha.update(local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def measure_stall(directory: Path, size: Size) -> dict[str, Any]:
    """How much longer a step takes with a save of its model and optimizer (1 GB at full size)."""
    import torch
    from torch import nn

    from shoal.train import TrainState, init, parallelize, shutdown
    from shoal.train.checkpoint import Checkpointer

    device, width = init().device, size.stall_width
    directory.mkdir()
    model = parallelize(nn.Sequential(*(nn.Linear(width, width) for _ in range(5))), "ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state, batch = TrainState(model, optimizer), torch.randn(512, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def save_plain(number: int) -> None:
        with (directory / "plain.pt").open("wb") as stream:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
            stream.flush()
            os.fsync(stream.fileno())

    synchronous = Checkpointer(directory / "synchronous", keep_last=1)
    background = Checkpointer(directory / "asynchronous", keep_last=1, asynchronous=True)
    methods: dict[str, Callable[[int], Any]] = {
        "torch.save": save_plain,
        "shoal": lambda number: synchronous.save(number, state),
        "shoal, asynchronous": lambda number: background.save(number, state),
    }
    stalls: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(4):
        for name, save in methods.items():
            alone = _seconds(step)
            stall = _seconds(lambda save=save, number=number: (step(), save(number))) - alone  # type: ignore[misc]
            background.wait()
            if number:  # the first round is a warm-up
                stalls[name].append(stall)
    seconds = background.save_seconds
    background.close()
    shutdown()
    base = statistics.median(stalls["torch.save"])
    megabytes = 3 * 4 * 5 * width * (width + 1) / 1e6
    rows = [f"{f'stall of a step, {megabytes:.0f} MB':24}{'ms':>8}{'of torch.save':>15}"]
    for name, values in stalls.items():
        rows.append(f"{name:24}{statistics.median(values) * 1000:8.0f}{statistics.median(values) / base:15.2f}")
    return {"lines": [*rows, f"asynchronous: on disk and committed after {seconds:.1f} s"]}


def _seconds(action: Callable[[], Any]) -> float:
    import torch

    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    run_bench("gpu", main)
