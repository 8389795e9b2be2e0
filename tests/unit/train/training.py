"""A small training run that uses everything a checkpoint must hold: dropout, numpy, data order, a scheduler."""

import hashlib
import random
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from shoal.train.checkpoint import TrainState
from shoal.train.parallel import parallelize


class Net(nn.Module):
    """Blocks with dropout and batch norm, so that generators and buffers matter."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(4, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)
        )
        self.leave = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


class Position:
    """Data in its own order, for the position of a loader."""

    def __init__(self) -> None:
        self.at = 0

    def next(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.at + rank)
        self.at += 1
        x = torch.randn(6, 4, generator=generator)
        return x, x.sum(dim=1, keepdim=True)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def build(kind: str, seed: int = 0, optimizer: str = "adamw", width: int = 8, **options: Any) -> TrainState:
    """The state of a fresh run. Ranks draw differently, as dropout does in a real one."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(seed)
    model: nn.Module = Net(width)
    if dist.is_initialized():
        model = parallelize(model, kind, **options)  # type: ignore[arg-type]
    torch.manual_seed(seed + 100 + rank)
    random.seed(seed + rank)
    numpy.random.seed(seed + rank)
    made: torch.optim.Optimizer
    if optimizer == "adamw":
        made = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        made = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(made, step_size=2, gamma=0.7)
    return TrainState(model, made, scheduler, Position(), run_id="run-1")


def train_step(state: TrainState) -> str:
    """One step; the loss, exactly."""
    assert isinstance(state.data, Position) and state.optimizer is not None and state.scheduler is not None
    x, y = state.data.next(dist.get_rank() if dist.is_initialized() else 0)
    x = x + 0.01 * random.random() + 0.01 * float(numpy.random.rand())
    loss = nn.functional.mse_loss(state.model(x), y)
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    state.scheduler.step()  # type: ignore[attr-defined]
    return loss.item().hex()


def digest(state: TrainState) -> str:
    """A hash of all parameters, buffers and optimizer tensors as this rank holds them."""
    sha = hashlib.sha256()
    assert state.optimizer is not None
    tensors = [*state.model.state_dict().values()]
    held = [state.optimizer.state.get(parameter, {}) for parameter in state.model.parameters()]
    tensors += [values[key] for values in held for key in sorted(values)]
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if isinstance(local, torch.Tensor):
            sha.update(local.detach().numpy().tobytes())
    return sha.hexdigest()


def full_parameters(state: TrainState) -> dict[str, torch.Tensor]:
    """All parameters, whole, under the names of the plain model."""
    found = {}
    for name, parameter in state.model.named_parameters():
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name.removeprefix("module.")] = value.detach().clone()
    return found
