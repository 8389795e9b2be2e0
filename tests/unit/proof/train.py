"""A training script as a user writes it, and every way to get the parallel part of it wrong.

python train.py [FAULT]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from shoal.train import init, parallelize, shutdown
from shoal.train.data import Loader
from shoal.train.progress import Progress
from shoal.train.tracking import tracker

SAMPLES, BATCH, TOTAL = 96, 16, 8


class Data:
    """Numbers of single precision, as most data is, and what to learn of them."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float32)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[at], self.x[at].sum().tanh()


def net(fault: str) -> nn.Module:
    norm: nn.Module = nn.BatchNorm1d(8) if fault == "batch norm" else nn.LayerNorm(8)
    drop = nn.Dropout(0.5 if fault in ("dropout", "equal seeds") else 0.0)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), drop, nn.Linear(8, 1))


def loader_of(fault: str, rank: int, world: int) -> Loader:
    if fault == "same samples":  # every rank acts as rank 0
        return Loader(Data(), global_batch=BATCH, seed=3, rank=0, world_size=world)
    if fault == "whole batch":
        return Loader(Data(), global_batch=BATCH, seed=3, rank=0, world_size=1)
    if fault == "batch a rank":
        return Loader(Data(), global_batch=BATCH * world, seed=3)
    return Loader(Data(), global_batch=BATCH, seed=3 + (rank if fault == "own shuffle" else 0))


def sampled_batches(fault: str, rank: int, world: int, epoch: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of an epoch, for the rank."""
    sampler = SAMPLERS.setdefault(fault, DistributedSampler(Data(), num_replicas=world, rank=rank, seed=3))  # type: ignore[arg-type]
    if fault == "sampler":
        sampler.set_epoch(epoch)
    return DataLoader(sampler.dataset, batch_size=BATCH // world, sampler=sampler)


SAMPLERS: dict[str, DistributedSampler[Data]] = {}


def train(fault: str = "", parallel: str = "ddp", **options: bool | str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if fault != "no seed":
        torch.manual_seed(11 + (0 if fault == "equal seeds" else rank))
    model = net(fault)
    if fault != "no model":
        model = parallelize(model, parallel, **options)  # type: ignore[arg-type]
    lr = 0.05 * (world if fault == "scaled rate" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loader = loader_of(fault, rank, world)
    SAMPLERS.clear()
    progress = Progress(TOTAL, write=lambda line: None)
    with tracker() as track:
        step = epoch = 0
        while step < TOTAL:
            for x, y in sampled_batches(fault, rank, world, epoch) if "sampler" in fault else loader:
                if fault == "drops samples" and rank == world - 1 > 0:
                    x, y = x[:-1], y[:-1]
                called = model.module if fault == "not wrapped" else model
                with torch.set_grad_enabled(fault != "accumulates"):
                    loss = nn.functional.mse_loss(called(x).flatten(), y.to(torch.get_default_dtype()))
                optimizer.zero_grad()
                scale = {"sums": float(world), "divides twice": 1.0 / world}.get(fault, 1.0)
                if fault == "accumulates":
                    for part, target in zip(x.split(4), y.split(4), strict=True):
                        nn.functional.mse_loss(called(part).flatten(), target.to(torch.get_default_dtype())).backward()
                else:
                    (loss * scale).backward()
                optimizer.step()
                step += 1
                if fault == "tracker":
                    track.log({"loss": loss}, step)
                elif fault == "rank 0 tells":
                    _ = rank == 0 and progress.step(step, loss)
                elif fault != "no loss":
                    progress.step(step, loss)
                if step == TOTAL:
                    break
            epoch += 1


if __name__ == "__main__":
    if sys.argv[1:] != ["no init"]:
        init()
        train(*sys.argv[1:])
        shutdown()
