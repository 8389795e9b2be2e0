"""What the service says of itself, in a file beside the ledger: for `shoal status`, and for whoever looks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STATUS = Path("/var/lib/shoal/elastic/status.json")


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
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The machine of each node: its state in the ledger, where it is, what it costs."""


def write(path: Path, status: Status) -> None:
    """Replace the file. No secret is in it; only root and Slurm's user reach its directory."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(asdict(status)))
    beside.replace(path)


def read(text: str) -> Status:
    """The file's text as data; what a later Shoal added is left out. ValueError where it is none."""
    told = json.loads(text)
    if not isinstance(told, dict) or not isinstance(told.get("at"), int | float):
        raise ValueError("this is no status of shoal-elastic.service")
    known = Status.__dataclass_fields__
    return Status(**{name: value for name, value in told.items() if name in known})
