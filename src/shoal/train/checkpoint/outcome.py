"""How a save ended, and what went wrong, in one line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch.distributed.checkpoint.api import CheckpointException

PROBLEMS = (Exception, CheckpointException)
"""torch's CheckpointException, which carries the errors of all ranks, is no Exception."""


@dataclass(frozen=True)
class SaveResult:
    """How a save ended. All ranks get the same outcome."""

    step: int
    outcome: Literal["committed", "failed", "pending"]
    reason: str = ""
    path: Path | None = None
    error: str = ""
    stall_seconds: float = 0.0
    """How long training stood still."""
    seconds: float = 0.0
    """From the call to the commit."""

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is on disk, whole."""
        return self.outcome == "committed"


def cause(problem: BaseException) -> str:
    """Which rank could not do what, without the tracebacks torch adds for each of them."""
    if not isinstance(problem, CheckpointException):
        return first_line(problem)
    ranks = sorted(problem.failures)
    causes = [f"rank {rank}: {first_line(problem.failures[rank][0])}" for rank in ranks[:3]]
    return "; ".join(causes) + (f"; and {len(ranks) - 3} more ranks" if len(ranks) > 3 else "")


def first_line(problem: BaseException) -> str:
    """The error's kind, and what it says first."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0]
