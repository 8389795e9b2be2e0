"""The training library: what a PyTorch script imports to run on a cluster. Only torch and the standard library.

    from shoal.train import init, shutdown
    dist = init()            # whatever launched it: srun, torchrun, mpirun, spawn, plain python

Names are imported when they are first used, so that reading the environment does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.train.binding import Binding, Seat, prove_binding
    from shoal.train.checkpoint import Checkpointer, SaveResult, TrainState
    from shoal.train.dist import Dist, init, shutdown
    from shoal.train.env import Env, read_env
    from shoal.train.errors import (
        BindingError,
        CheckpointError,
        EnvError,
        ParallelError,
        RendezvousError,
        TrainError,
    )
    from shoal.train.multiprocess import spawn
    from shoal.train.parallel import parallelize
    from shoal.train.run import Run
    from shoal.train.stop import Stop, Stopper, starting_workers, worker_signals

__all__ = [
    "Binding",
    "BindingError",
    "CheckpointError",
    "Checkpointer",
    "Dist",
    "Env",
    "EnvError",
    "ParallelError",
    "RendezvousError",
    "Run",
    "SaveResult",
    "Seat",
    "Stop",
    "Stopper",
    "TrainError",
    "TrainState",
    "init",
    "parallelize",
    "prove_binding",
    "read_env",
    "shutdown",
    "spawn",
    "starting_workers",
    "worker_signals",
]

_HOMES = {
    "binding": ("Binding", "Seat", "prove_binding"),
    "checkpoint": ("Checkpointer", "SaveResult", "TrainState"),
    "dist": ("Dist", "init", "shutdown"),
    "env": ("Env", "read_env"),
    "errors": ("BindingError", "CheckpointError", "EnvError", "ParallelError", "RendezvousError", "TrainError"),
    "multiprocess": ("spawn",),
    "parallel": ("parallelize",),
    "run": ("Run",),
    "stop": ("Stop", "Stopper", "starting_workers", "worker_signals"),
}
"""The module each name lives in."""


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
