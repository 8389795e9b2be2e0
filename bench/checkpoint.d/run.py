"""Times how long a training step is held up by a save, for six ways of saving the same model and optimizer.

Two ranks on one machine, Gloo, a thread each. A round saves once in each way, in turn, so that a noisy machine is noisy
for all of them; medians are compared. "stall" is what the step with the save takes longer than one without;
"dip" is what the steps after it take longer, until the checkpoint is there; "durable" is when it is. Every way brings
its files to disk (fsync), except where the name says otherwise. Only Shoal's are hashed and committed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from shoal.train.checkpoint import Checkpointer, TrainState
from shoal.train.parallel import parallelize

RANKS = 2
RESULT = Path(__file__).resolve().parents[1] / "results" / "checkpoint.txt"


@dataclass
class Timing:
    """What one way of saving cost, a value a round, in seconds."""

    stall: list[float] = field(default_factory=list)
    dip: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)


def main() -> None:
    """Run both ways of spreading the model, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="of model and optimizer together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where to write checkpoints")
    asked = parser.parse_args()
    lines = [
        f"{RANKS} ranks, gloo, {os.cpu_count()} CPUs, torch {torch.__version__}, about {asked.megabytes} MB of "
        f"model and AdamW state, median of {asked.rounds} rounds",
    ]
    for kind in ("ddp", "fsdp"):
        with tempfile.TemporaryDirectory(dir=asked.directory) as directory:
            multiprocessing.spawn(_rank, (kind, directory, asked.megabytes, asked.rounds), nprocs=RANKS)
            lines += ["", Path(directory, "table").read_text()]
    text = "\n".join(lines).rstrip() + "\n"
    RESULT.write_text(text)
    sys.stdout.write(text)


def _rank(rank: int, kind: str, directory: str, megabytes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory, "store")), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    state, step = _training(kind, megabytes)
    for _ in range(3):
        step()
    plain: list[float] = []
    ways = _ways(state, Path(directory))
    timings = {name: Timing() for name in ways}
    for number in range(rounds + 1):
        for name, save in ways.items():
            alone = _timed(step)
            timing = _once(step, save, number, alone)
            if number:  # the first round warms up files, memory and processes
                plain.append(alone)
                for values, value in zip(vars(timings[name]).values(), timing, strict=True):
                    values.append(value)
    if rank == 0:
        Path(directory, "table").write_text(_table(kind, statistics.median(plain), timings))
    dist.destroy_process_group()


def _training(kind: str, megabytes: int) -> tuple[TrainState, Callable[[], None]]:
    """A model of the size asked for, its optimizer (twice as large), and one step of training."""
    width = 1024
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * width * width)))
    model = parallelize(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))), kind)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(16, width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return TrainState(model, optimizer), step


def _timed(action: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def _once(step: Callable[[], None], save: Any, number: int, alone: float) -> tuple[float, float, float]:
    began = time.perf_counter()
    finished: list[Callable[[], bool]] = []

    def step_and_save() -> None:
        step()
        finished.append(save(number))

    stall = _timed(step_and_save) - alone
    dip = 0.0
    while not _on_all_ranks(finished[0]()):
        dip += _timed(step) - alone
    return stall, dip, time.perf_counter() - began - alone


def _on_all_ranks(mine: bool) -> bool:
    verdict = torch.tensor(int(mine))
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict.item())


def _ways(state: TrainState, directory: Path) -> dict[str, Callable[[int], Callable[[], bool]]]:
    """Each way: called with a number it saves, and returns what tells whether the checkpoint is there."""
    shoal = Checkpointer(directory / "shoal", keep_last=1)
    background = Checkpointer(directory / "shoal-async", keep_last=1, asynchronous=True)
    own_group = dist.new_group(backend="gloo")

    def torch_save(sync: bool) -> Callable[[int], Callable[[], bool]]:
        def save(number: int) -> Callable[[], bool]:
            # What a plain script does: rank 0 writes everything, the others wait. FSDP must gather it all first.
            whole = StateDictOptions(full_state_dict=True)
            assert state.optimizer is not None
            content = get_state_dict(state.model, state.optimizer, options=whole)
            if dist.get_rank() == 0:
                with (directory / "plain.pt").open("wb") as stream:
                    torch.save(content, stream)
                    stream.flush()
                    if sync:
                        os.fsync(stream.fileno())
            return lambda: True

        return save

    def sharded() -> dict[str, Any]:
        assert state.optimizer is not None
        model, optimizer = get_state_dict(state.model, state.optimizer)
        return {"model": model, "optimizer": optimizer}

    def fresh(name: str) -> Path:
        if dist.get_rank() == 0:
            shutil.rmtree(directory / name, ignore_errors=True)
        dist.barrier()
        return directory / name

    def dcp_save(number: int) -> Callable[[], bool]:
        dcp.save(sharded(), storage_writer=dcp.FileSystemWriter(fresh("dcp")), process_group=own_group)
        return lambda: True

    def dcp_async(number: int) -> Callable[[], bool]:
        writer = dcp.FileSystemWriter(fresh("dcp-async"))
        future: Any = dcp.async_save(sharded(), storage_writer=writer, process_group=own_group)
        return lambda: future.done() and future.result() is not None

    def shoal_save(number: int) -> Callable[[], bool]:
        assert shoal.save(number, state).committed
        return lambda: True

    def shoal_async(number: int) -> Callable[[], bool]:
        background.save(number, state)

        def there() -> bool:
            if not background.done():
                return False
            result = background.wait()
            assert result is not None and result.committed, result
            return True

        return there

    return {
        "torch.save, no fsync": torch_save(False),
        "torch.save": torch_save(True),
        "dcp.save": dcp_save,
        "dcp.async_save": dcp_async,
        "shoal": shoal_save,
        "shoal, asynchronous": shoal_async,
    }


def _table(kind: str, plain: float, timings: dict[str, Timing]) -> str:
    base = statistics.median(timings["torch.save"].stall)
    lines = [
        f"{kind}: a step without a save takes {plain * 1000:.0f} ms",
        f"{'':24}{'stall ms':>10}{'of torch.save':>15}{'dip ms':>10}{'durable ms':>12}",
    ]
    for name, timing in timings.items():
        stall, dip, durable = (statistics.median(values) * 1000 for values in vars(timing).values())
        lines.append(f"{name:24}{stall:10.0f}{stall / 1000 / base:15.2f}{dip:10.0f}{durable:12.0f}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
