"""Times how long a save delays a training step, for six ways of saving the same model and optimizer.

Two ranks on one machine, Gloo, a thread each. A round saves once in each way, in turn, so that noise affects all of
them; medians are compared. "stall": how much longer the step with the save takes. "dip": how much longer the next
steps take, until the checkpoint is complete. "durable": when it is. Every way syncs its files to disk (fsync), unless
its name says otherwise. Only Shoal hashes and commits its files.
"""

from __future__ import annotations

import os
import shutil
import statistics
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
from harness import bench_parser, describe_machine, report, run_bench
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from shoal.train.checkpoint import Checkpointer, TrainState
from shoal.train.parallel import parallelize

RANKS = 2


@dataclass
class Timing:
    """Seconds that one way of saving took, a value for each round."""

    stall: list[float] = field(default_factory=list)
    dip: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)


def main() -> None:
    parser = bench_parser("checkpoint", __doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="size of model and optimizer together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where to write checkpoints")
    options = parser.parse_args()
    if options.small:
        options.megabytes, options.rounds = 1, 1
    lines = [
        describe_machine(options, f"torch {torch.__version__}"),
        f"{RANKS} ranks, gloo, model and AdamW state of {options.megabytes} MB, medians of {options.rounds} rounds",
    ]
    # A server that has imported torch once forks the ranks: seconds less for each of them.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["shoal.train.checkpoint", "torch._dynamo"])
    for kind in ("ddp", "fsdp"):
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            arguments = (kind, directory, options.megabytes, options.rounds)
            multiprocessing.start_processes(_rank, arguments, nprocs=RANKS, start_method="forkserver")
            lines += ["", Path(directory, "table").read_text()]
    report("checkpoint", options, "\n".join(lines).rstrip() + "\n")


def _rank(rank: int, kind: str, directory: str, megabytes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory, "store")), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    state, step = _training(kind, megabytes)
    for _ in range(3):
        step()
    plain_steps: list[float] = []
    methods = _methods(state, Path(directory))
    timings = {name: Timing() for name in methods}
    for number in range(rounds + 1):
        for name, save in methods.items():
            alone = _timed(step)
            timing = _save_once(step, save, number, alone)
            if number:  # the first round is a warm-up
                plain_steps.append(alone)
                for values, value in zip(vars(timings[name]).values(), timing, strict=True):
                    values.append(value)
    if rank == 0:
        Path(directory, "table").write_text(_table(kind, statistics.median(plain_steps), timings))
    dist.destroy_process_group()


def _training(kind: str, megabytes: int) -> tuple[TrainState, Callable[[], None]]:
    """A model of that size with its optimizer (twice as large), and a function that does one training step."""
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
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def _save_once(step: Callable[[], None], save: Any, number: int, alone: float) -> tuple[float, float, float]:
    start = time.perf_counter()
    finished: list[Callable[[], bool]] = []

    def step_and_save() -> None:
        step()
        finished.append(save(number))

    stall = _timed(step_and_save) - alone
    dip = 0.0
    while not _on_all_ranks(finished[0]()):
        dip += _timed(step) - alone
    return stall, dip, time.perf_counter() - start - alone


def _on_all_ranks(value: bool) -> bool:
    result = torch.tensor(int(value))
    dist.all_reduce(result, op=dist.ReduceOp.MIN)
    return bool(result.item())


def _methods(state: TrainState, directory: Path) -> dict[str, Callable[[int], Callable[[], bool]]]:
    """Functions that save under a number, and return a function that says whether the checkpoint is complete."""
    shoal = Checkpointer(directory / "shoal", keep_last=1)
    background = Checkpointer(directory / "shoal-async", keep_last=1, asynchronous=True)
    own_group = dist.new_group(backend="gloo")

    def torch_save(sync: bool) -> Callable[[int], Callable[[], bool]]:
        def save(number: int) -> Callable[[], bool]:
            # As in a plain script: rank 0 writes everything, the others wait. FSDP gathers everything first.
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

        def is_complete() -> bool:
            if not background.done():
                return False
            result = background.wait()
            assert result is not None and result.committed, result
            return True

        return is_complete

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
    run_bench("checkpoint", main)
