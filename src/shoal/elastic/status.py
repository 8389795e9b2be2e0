"""What the service says of itself, in a file beside the ledger: for `shoal status`, and for whoever looks.

    {"at": 1763200000.0, "problem": "", "accounts": {"lambda": ""}, "jobs": {"7": "trying lambda us-west-1"},
     "machines": {"5f0c…": {"node": "burst1", "state": "joined", "account": "lambda", "type": "gpu_1x_a10",
                            "place": "us-west-1", "market": "on-demand", "id": "i-1", "usd_hour": 1.29,
                            "since": 1763199000.0}}}

Machines are named by the token of their rental, for a node may have two: one that goes, and the one in its place. Of
those of a node at most one is not `releasing`, as soon as a step has ended; it is the one that counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.roles.forgotten import STATUS as PLACE

STATUS = Path(PLACE)


@dataclass(frozen=True)
class Status:
    """How things stood at the end of a step."""

    at: float
    """When, in seconds since 1970. A time long past says that the service does not run."""
    problem: str = ""
    """Why the service can decide nothing: slurmctld does not answer."""
    accounts: Mapping[str, str] = field(default_factory=dict)
    """What is wrong with each account; empty for one that answers."""
    jobs: Mapping[str, str] = field(default_factory=dict)
    """Why jobs wait."""
    machines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Every machine that is there or may be, by its token: its node, its state in the ledger, where, for how much."""


def write(path: Path, status: Status) -> None:
    """Replace the file. No secret is in it; only root and Slurm's user reach its directory."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(status)))
    temporary.replace(path)


def read(text: str) -> Status:
    """The file's text as data; what a later Shoal added is left out. ValueError where it is none."""
    told = json.loads(text)
    if not isinstance(told, dict) or not isinstance(told.get("at"), int | float):
        raise ValueError("this is not a status of shoal-elastic.service")
    known = Status.__dataclass_fields__
    return Status(**{name: value for name, value in told.items() if name in known})
