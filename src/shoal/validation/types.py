"""What crosses the walls of a validation: the jobs to run, what came of them, and the rows of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from shoal.spec.finding import Finding

Status = Literal["passed", "failed", "not run"]
"""A test whose tool is missing was not run. It has not passed."""


@dataclass(frozen=True)
class ValidationJob:
    """One job of a validation: some tests under one launcher on some nodes."""

    title: str
    """The launcher as the table names it."""
    launcher: str
    """The launcher as `shoal run` names it."""
    tests: tuple[str, ...]
    nodes: tuple[str, ...]
    gpus: int = 0
    """GPUs of each node, each with a rank; 0 for one rank a node."""
    cpus: int = 1
    """CPUs that each rank must have at least."""
    image: str = ""
    memory_mb: int = 0
    """What Slurm gives on the node with the least; 0 for what the node shows."""

    @property
    def ranks_per_node(self) -> int:
        return self.gpus or 1

    @property
    def world_size(self) -> int:
        return self.ranks_per_node * len(self.nodes)


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended, and what its ranks and its batch script printed."""

    job: ValidationJob
    id: str
    failed: bool = False
    reason: str = ""
    fix: str = ""
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class SizeSpeed:
    """A line of the table that nccl-tests prints."""

    size: int
    """Bytes."""
    count: int
    us: float
    algbw: float
    busbw: float
    wrong: int


@dataclass(frozen=True)
class PairSpeed:
    """What two nodes reach together."""

    first: str
    second: str
    speed: float
    """GB/s."""
    latency_us: float | None = None


@dataclass(frozen=True)
class ValidationRow:
    """A test under a launcher on some nodes."""

    launcher: str
    test: str
    nodes: str
    """A hostlist."""
    status: Status
    value: float | None = None
    """The result that is compared: larger is better."""
    unit: str = ""
    detail: str = ""
    """What else there is to say: more results, or why it failed or was not run."""
    fix: str = ""
    package: str = ""
    """What is missing, where it was not run for that."""
    job: str = ""
    version: str = ""
    """Of the tool, or of the library."""
    gpu: str = ""
    """The model of the GPUs."""
    vendor: str = ""
    """Who made the machine, as its firmware says."""
    ranks: int = 0
    sizes: tuple[SizeSpeed, ...] = ()
    by_node: Mapping[str, float] = field(default_factory=dict)
    """The value of each node, where each has one."""
    pairs: tuple[PairSpeed, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """Names the same row in another run."""
        return self.launcher, self.test


@dataclass(frozen=True)
class MpirunProgram:
    """The mpirun that jobs on a node find."""

    node: str
    path: str
    version: str
    pmix: str = ""
    """How it speaks PMIx; empty where it does not."""
    others: tuple[str, ...] = ()
    """Others behind it in the search path."""


@dataclass(frozen=True)
class StepEnvironment:
    """What the first rank under a launcher really gets."""

    launcher: str
    node: str
    cpus: int
    python: str
    memlock: str
    variables: Mapping[str, str]


@dataclass(frozen=True)
class ValidationResult:
    """The outcome of `shoal validate`."""

    cluster: str
    time: float
    """When it began, in seconds since 1970."""
    quick: bool
    nodes: tuple[str, ...]
    rows: tuple[ValidationRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    mpiruns: tuple[MpirunProgram, ...] = ()
    environments: tuple[StepEnvironment, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every test that was run has passed, and nothing else is wrong."""
        return not any(row.status == "failed" for row in self.rows) and not any(
            finding.level != "info" for finding in self.findings
        )

    @property
    def complete(self) -> bool:
        """Whether every test was run."""
        return all(row.status != "not run" for row in self.rows)


def read_result(values: Mapping[str, Any]) -> ValidationResult:
    """A result that was kept, without fields of a later release. Raises ValueError."""
    try:
        rows = [
            {
                **row,
                "sizes": tuple(_make(SizeSpeed, size) for size in row.get("sizes", ())),
                "pairs": tuple(_make(PairSpeed, pair) for pair in row.get("pairs", ())),
            }
            for row in values["rows"]
        ]
        result: ValidationResult = _make(
            ValidationResult,
            {
                **values,
                "nodes": tuple(values["nodes"]),
                "rows": tuple(_make(ValidationRow, row) for row in rows),
                "findings": tuple(_make(Finding, finding) for finding in values.get("findings", ())),
                "mpiruns": tuple(_make(MpirunProgram, program) for program in values.get("mpiruns", ())),
                "environments": tuple(_make(StepEnvironment, entry) for entry in values.get("environments", ())),
            },
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a result of a validation: {error}") from None
    return result


def _make(kind: Any, values: Mapping[str, Any]) -> Any:
    names = {entry.name for entry in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})
