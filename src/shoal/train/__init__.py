"""The training library: what a PyTorch script imports to run on a cluster. Only torch and the standard library.

    from shoal.train import Loader, Progress, Run, TrainState, init, parallelize, tracker
    init()                   # whatever launched it: srun, torchrun, mpirun, spawn, plain python

`examples/toy/train.py` uses most of it; docs/training.md says how to bring your own script.
Names are imported when they are first used, so that reading the environment does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.train.binding import Binding, Seat, prove_binding
    from shoal.train.checkpoint import Checkpointer, SaveResult, TrainState
    from shoal.train.data import DataError, LmdbDataset, Loader, Order, ShardDataset, build_index, stage, write_shards
    from shoal.train.dist import Dist, init, shutdown
    from shoal.train.env import Env, read_env
    from shoal.train.errors import (
        BindingError,
        CheckpointError,
        EnvError,
        Leaving,
        ParallelError,
        RendezvousError,
        TrainError,
    )
    from shoal.train.multiprocess import spawn
    from shoal.train.parallel import parallelize
    from shoal.train.progress import Progress
    from shoal.train.run import Run
    from shoal.train.stop import Stop, Stopper, starting_workers, worker_signals
    from shoal.train.tracking import Tracker, tracker

__all__ = [
    "Binding",
    "BindingError",
    "CheckpointError",
    "Checkpointer",
    "DataError",
    "Dist",
    "Env",
    "EnvError",
    "Leaving",
    "LmdbDataset",
    "Loader",
    "Order",
    "ParallelError",
    "Progress",
    "RendezvousError",
    "Run",
    "SaveResult",
    "Seat",
    "ShardDataset",
    "Stop",
    "Stopper",
    "Tracker",
    "TrainError",
    "TrainState",
    "build_index",
    "init",
    "parallelize",
    "prove_binding",
    "read_env",
    "shutdown",
    "spawn",
    "stage",
    "starting_workers",
    "tracker",
    "worker_signals",
    "write_shards",
]

_HOMES = {
    "binding": ("Binding", "Seat", "prove_binding"),
    "checkpoint": ("Checkpointer", "SaveResult", "TrainState"),
    "data": ("DataError", "LmdbDataset", "Loader", "Order", "ShardDataset", "build_index", "stage", "write_shards"),
    "dist": ("Dist", "init", "shutdown"),
    "env": ("Env", "read_env"),
    "errors": (
        "BindingError",
        "CheckpointError",
        "EnvError",
        "Leaving",
        "ParallelError",
        "RendezvousError",
        "TrainError",
    ),
    "multiprocess": ("spawn",),
    "parallel": ("parallelize",),
    "progress": ("Progress",),
    "run": ("Run",),
    "stop": ("Stop", "Stopper", "starting_workers", "worker_signals"),
    "tracking": ("Tracker", "tracker"),
}
"""The module each name lives in."""


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
