"""Shoal turns the machines you have into one Slurm cluster and trains on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.contract import VERSION as __version__

if TYPE_CHECKING:
    from shoal.verbs.job import Job

__all__ = ["Job", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: training scripts import this package on hosts that have only the standard library.
    if name == "Job":
        from shoal.verbs.job import Job

        return Job
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
