"""The settings, the runs and the result of a proof."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal import contract
from shoal.errors import ShoalError
from shoal.plan.progress import Phase
from shoal.proof.compare import Comparison

TOLERANCES = {"float64": 1e-12, "float32": 1e-6}
"""How far two runs may be apart by rounding alone, in each precision."""
PARALLELS = ("ddp", "fsdp")


@dataclass(frozen=True)
class ProofSettings:
    """What `shoal prove` runs and compares, from its command line."""

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
class ProofRun:
    """One run of the script."""

    launcher: str
    parallel: str
    processes: int

    @property
    def title(self) -> str:
        return f"{self.launcher} {self.parallel}" if self.processes > 1 else "one process"

    def variables(self, settings: ProofSettings, directory: str) -> dict[str, str]:
        """The environment of the run. One thread: sums over several may change their order."""
        return {
            contract.SHOAL_PROOF_DIR: directory,
            contract.SHOAL_PROOF_DTYPE: settings.dtype,
            contract.SHOAL_PROOF_PARALLEL: self.parallel,
            contract.SHOAL_PROOF_STEPS: str(settings.steps),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it, sums of cuBLAS differ from run to run
        }


class Runner(Protocol):
    """Runs a script for a proof: on this machine, or as jobs of a cluster."""

    @property
    def where(self) -> str: ...

    async def run(self, run: ProofRun, directory: Path, phase: Phase) -> None:
        """Leave the records of one run in `directory`, an empty one. Raises ScriptFailed when the script failed."""


class ScriptFailed(ShoalError):
    """The script failed, or did not end."""


@dataclass(frozen=True)
class ProofRow:
    """One launcher and parallelism, compared with one process."""

    launcher: str
    parallel: str
    passed: bool
    found: Comparison | None = None
    """None if there is nothing to compare: the script failed, or recorded nothing."""
    cause: str = ""
    """Why it did not pass."""


@dataclass(frozen=True)
class ProofResult:
    """The outcome of a proof. Its fields are keys of `shoal prove --json`."""

    script: str
    processes: int
    dtype: str
    tolerance: float
    steps: int
    losses: tuple[float, ...]
    """Those of one process."""
    rows: tuple[ProofRow, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)
