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
    from shoal.train.dist import Dist, init, shutdown
    from shoal.train.env import Env, read_env
    from shoal.train.errors import BindingError, EnvError, RendezvousError, TrainError
    from shoal.train.multiprocess import spawn

__all__ = [
    "Binding",
    "BindingError",
    "Dist",
    "Env",
    "EnvError",
    "RendezvousError",
    "Seat",
    "TrainError",
    "init",
    "prove_binding",
    "read_env",
    "shutdown",
    "spawn",
]

_HOMES = {
    "binding": ("Binding", "Seat", "prove_binding"),
    "dist": ("Dist", "init", "shutdown"),
    "env": ("Env", "read_env"),
    "errors": ("BindingError", "EnvError", "RendezvousError", "TrainError"),
    "multiprocess": ("spawn",),
}
"""The module each name lives in."""


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
