"""The training library: what a PyTorch script imports to run on a cluster, under any launcher.

    from shoal.train import Loader, Progress, Run, TrainState, init, parallelize, tracker

Example: `examples/toy/train.py`; guide: docs/training.md. Further names are one level down: `shoal.train.checkpoint`,
`.data`, `.env`, `.errors`, `.stop`, `.tracking`. May import torch, the standard library, shoal.contract and
shoal.hostlist. Names are imported on first use, so that reading the environment does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.train.checkpoint import TrainState
    from shoal.train.data import LmdbDataset, Loader, ShardDataset
    from shoal.train.dist import init, shutdown
    from shoal.train.errors import TrainError
    from shoal.train.multiprocess import spawn
    from shoal.train.parallel import parallelize
    from shoal.train.progress import Progress
    from shoal.train.run import Run
    from shoal.train.stop import worker_signals
    from shoal.train.tracking import tracker

__all__ = [
    "LmdbDataset",
    "Loader",
    "Progress",
    "Run",
    "ShardDataset",
    "TrainError",
    "TrainState",
    "init",
    "parallelize",
    "shutdown",
    "spawn",
    "tracker",
    "worker_signals",
]

_MODULES = {
    "checkpoint": ("TrainState",),
    "data": ("LmdbDataset", "Loader", "ShardDataset"),
    "dist": ("init", "shutdown"),
    "errors": ("TrainError",),
    "multiprocess": ("spawn",),
    "parallel": ("parallelize",),
    "progress": ("Progress",),
    "run": ("Run",),
    "stop": ("worker_signals",),
    "tracking": ("tracker",),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
