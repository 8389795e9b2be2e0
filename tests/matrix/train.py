"""The script of the matrix: a small network with dropout, slow until the job is stopped.

Prints a line of JSON for each step, and a hash of the parameters at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator

import torch
from torch import nn

from shoal.train import Run, TrainState, init, parallelize, shutdown
from shoal.train.data import Loader


class Points:
    """Made of their own numbers."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, id: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(id))
        return x, x.sum(dim=0, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds of a step, in the job's first turn")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    turn = int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    dist = init(timeout=900)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
    model = parallelize(net, "ddp")
    torch.manual_seed(1 + dist.env.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = Loader(Points(), global_batch=8, seed=1, workers=options.workers)
    state = TrainState(model, optimizer, data=loader)
    batches = _endless(loader)
    for step in Run(state, save_every=options.save_every).steps(options.steps):
        x, y = next(batches)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(json.dumps({"turn": turn, "step": step, "loss": loss.item().hex()}), flush=True)
        time.sleep(0 if turn else options.pause)
    print(json.dumps({"turn": turn, "digest": _digest(net, optimizer)}), flush=True)
    loader.close()
    shutdown()


def _endless(loader: Loader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield from loader


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        held = optimizer.state[parameter]
        for tensor in (parameter, *(held[key] for key in sorted(held))):
            sha.update(tensor.detach().numpy().tobytes())
    return sha.hexdigest()


if __name__ == "__main__":
    main()
