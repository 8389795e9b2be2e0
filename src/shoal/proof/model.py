"""What a proof is asked to do, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.errors import ShoalError
from shoal.plan.progress import Phase
from shoal.proof.compare import Comparison
from shoal.train import contract

TOLERANCES = {"float64": 1e-12, "float32": 1e-6}
"""How far two runs may be apart by rounding alone, in each precision."""
PARALLELS = ("ddp", "fsdp")


@dataclass(frozen=True)
class Asked:
    """What to prove."""

    script: str
    args: tuple[str, ...] = ()
    processes: int = 2
    launchers: tuple[str, ...] = ()
    parallels: tuple[str, ...] = PARALLELS
    dtype: str = "float64"
    tolerance: float = TOLERANCES["float64"]
    steps: int = 10
    timeout: float = 600.0
    """Seconds for each run."""


@dataclass(frozen=True)
class Trial:
    """One run of the script."""

    launcher: str
    parallel: str
    processes: int

    @property
    def title(self) -> str:
        return f"{self.launcher} {self.parallel}" if self.processes > 1 else "one process"

    def variables(self, asked: Asked, directory: str) -> dict[str, str]:
        """What the run is told. One thread: a sum over several may be in another order each time."""
        return {
            contract.SHOAL_PROOF_DIR: directory,
            contract.SHOAL_PROOF_DTYPE: asked.dtype,
            contract.SHOAL_PROOF_PARALLEL: self.parallel,
            contract.SHOAL_PROOF_STEPS: str(asked.steps),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it, sums of cuBLAS differ from run to run
        }


class Runner(Protocol):
    """Runs a script for a proof: on this machine, or as jobs of a cluster."""

    @property
    def where(self) -> str: ...

    async def run(self, trial: Trial, directory: Path, phase: Phase) -> None:
        """Leave the records of one run in `directory`, an empty one. Raises RunFailed when the script failed."""


class RunFailed(ShoalError):
    """The script ended badly, or not at all."""


@dataclass(frozen=True)
class Row:
    """A way of running the script, compared with one process."""

    launcher: str
    parallel: str
    passed: bool
    found: Comparison | None = None
    """None where there is nothing to compare: the script failed, or recorded nothing."""
    cause: str = ""
    """Why it did not pass."""


@dataclass(frozen=True)
class ProofResult:
    """What a proof has found."""

    script: str
    processes: int
    dtype: str
    tolerance: float
    steps: int
    losses: tuple[float, ...]
    """Those of one process."""
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)
