"""Proves on one NVIDIA GPU that a resumed run equals one never interrupted, bit for bit, and times what a save costs.

Run by hand on a machine with a GPU: `python bench/checkpoint.d/gpu.py`. NCCL, one rank, bf16, dropout. Writes
bench/results/checkpoint-gpu.txt, and exits with 1 where a bit differs.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from shoal.train.checkpoint import Checkpointer, TrainState
from shoal.train.parallel import parallelize

RESULT = Path(__file__).resolve().parents[1] / "results" / "checkpoint-gpu.txt"
STEPS, SAVE_AT = 8, 4


def main() -> None:
    """Run each case in processes of its own, print and write what was found."""
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, one rank, NCCL, bf16 mixed precision"]
    exact = True
    for kind, asynchronous in (("ddp", True), ("fsdp", False)):
        with tempfile.TemporaryDirectory() as directory:
            for part in ("whole", "saved", "resumed"):
                multiprocessing.spawn(_train, (directory, kind, part, asynchronous), nprocs=1)
            whole, saved, resumed = (Path(directory, p).read_text() for p in ("whole", "saved", "resumed"))
        same = whole == saved and whole.splitlines()[SAVE_AT:] == resumed.splitlines()
        exact &= same
        how = "asynchronous" if asynchronous else "synchronous"
        lines.append(f"{kind}, {how}: resumed run {'equal bit for bit' if same else 'DIFFERS'}")
        RESULT.write_text("\n".join(lines) + "\n")
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(_stall, (directory,), nprocs=1)
        lines += ["", Path(directory, "table").read_text().rstrip()]
    text = "\n".join(lines) + "\n"
    RESULT.write_text(text)
    sys.stdout.write(text)
    raise SystemExit(0 if exact else 1)


def _meet(directory: str) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.cuda.set_device(0)
    store = dist.FileStore(str(Path(directory, f"store-{time.time_ns()}")), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))


def _train(rank: int, directory: str, kind: str, part: str, asynchronous: bool) -> None:
    """Losses of each step and a hash of the final parameters, one a line."""
    _meet(directory)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7 if part == "resumed" else 0)
    layers = [nn.TransformerEncoderLayer(128, 4, 256, dropout=0.2, batch_first=True) for _ in range(3)]
    model = parallelize(nn.Sequential(*layers), kind, mixed_precision="bf16")  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = TrainState(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))
    checkpointer = Checkpointer(Path(directory, "checkpoints"), asynchronous=asynchronous)
    first = (checkpointer.restore(state) or 0) if part == "resumed" else 0
    losses = []
    for step in range(first, STEPS):
        if step == SAVE_AT and part == "saved":
            checkpointer.save(step, state)
        batch = torch.randn(8, 16, 128, generator=torch.Generator().manual_seed(step)).cuda()
        optimizer.zero_grad()
        loss = (model(batch).float() - batch).square().mean()
        loss.backward()
        optimizer.step()
        state.scheduler.step()  # type: ignore[union-attr]
        losses.append(loss.item().hex())
    checkpointer.close()
    assert checkpointer.failures == 0, checkpointer.last
    sha = hashlib.sha256()
    for parameter in model.parameters():
        whole: Any = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        sha.update(whole.detach().cpu().numpy().tobytes())
    Path(directory, part).write_text("\n".join([*losses, sha.hexdigest()]))
    dist.destroy_process_group()


def _stall(rank: int, directory: str) -> None:
    """What a save of 1 GB of state holds a step up by."""
    _meet(directory)
    model = parallelize(nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(5))), "ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state, batch = TrainState(model, optimizer), torch.randn(512, 4096, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def plain(number: int) -> None:
        with Path(directory, "plain.pt").open("wb") as stream:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
            stream.flush()
            os.fsync(stream.fileno())

    shoal = Checkpointer(Path(directory, "a"), keep_last=1)
    background = Checkpointer(Path(directory, "b"), keep_last=1, asynchronous=True)
    ways: dict[str, Any] = {
        "torch.save": plain,
        "shoal": lambda number: shoal.save(number, state),
        "shoal, asynchronous": lambda number: background.save(number, state),
    }
    stalls: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(4):
        for name, save in ways.items():
            alone = _seconds(step)
            stall = _seconds(lambda save=save, number=number: (step(), save(number))) - alone
            background.wait()
            if number:
                stalls[name].append(stall)
    base = statistics.median(stalls["torch.save"])
    rows = [f"{'stall of a step, 1 GB':24}{'ms':>8}{'of torch.save':>15}"]
    for name, values in stalls.items():
        rows.append(f"{name:24}{statistics.median(values) * 1000:8.0f}{statistics.median(values) / base:15.2f}")
    rows.append(f"asynchronous: on disk and committed after {background.save_seconds:.1f} s")
    Path(directory, "table").write_text("\n".join(rows))
    background.close()
    dist.destroy_process_group()


def _seconds(action: Any) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
