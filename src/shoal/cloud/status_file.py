"""The status file that shoal-elastic.service writes after every step, for `shoal status` and for `shoal up`.

    {"at": 1763200000.0, "problem": "", "accounts": {"lambda": ""}, "jobs": {"7": "trying lambda us-west-1"},
     "machines": {"5f0c…": {"node": "burst1", "state": "joined", "account": "lambda", "type": "gpu_1x_a10",
                            "place": "us-west-1", "market": "on-demand", "id": "i-1", "usd_hour": 1.29,
                            "since": 1763199000.0, "problem": ""}}}

Machines are keyed by the token of their rental, as a node may have two: one that is being released and its successor.
After each step at most one of them is not `releasing`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.cloud.providers.api import Offer
from shoal.cloud.rental import Rental, known_fields
from shoal.local_files import write_atomic

STATUS = Path("/var/lib/shoal/elastic/status.json")
PUBLIC_REPORT = Path("/var/lib/shoal/rentals.json")
"""Offers and costs, which every user may read: `cloud/service/public_report.py`."""


@dataclass(frozen=True)
class ServiceStatus:
    """The state of the service at the end of a step."""

    at: float
    """When, in seconds since 1970. A time long past shows that the service does not run."""
    problem: str = ""
    """Why the service can decide nothing, for example because slurmctld does not answer."""
    accounts: Mapping[str, str] = field(default_factory=dict)
    """What is wrong with each provider account; empty for one that answers."""
    jobs: Mapping[str, str] = field(default_factory=dict)
    """Why jobs wait."""
    machines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Every machine that exists or may exist, by the token of its rental."""
    hosts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The rented hosts that run now, likewise."""

    @property
    def rentals(self) -> tuple[Rental, ...]:
        """The machines as rentals. What the file does not have of them stays at its default."""
        entries = self.machines.items() if isinstance(self.machines, dict) else ()
        return tuple(_rental(token, entry) for token, entry in entries if isinstance(entry, dict))


def write_status(path: Path, status: ServiceStatus) -> None:
    """Replace the file. It has no secrets, and the service's umask leaves it to root alone."""
    write_atomic(path, json.dumps(asdict(status)))


def read_status(text: str) -> ServiceStatus:
    """Parse the file. Raises ValueError."""
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(content.get("at"), int | float):
        raise ValueError("this is not a status of shoal-elastic.service")
    return ServiceStatus(**known_fields(ServiceStatus, content))


def machine_entry(rental: Rental, problem: str = "") -> dict[str, Any]:
    """A rental as the status file has it, with the reason why its machine has not joined yet."""
    return {
        **{name: getattr(rental, name) for name in ("node", "state", "account")},
        **{name: getattr(rental.offer, name) for name in ("type", "place", "market")},
        **{"id": rental.id, "usd_hour": rental.usd_hour, "since": rental.intended_at, "problem": problem},
    }


def _rental(token: str, entry: Mapping[str, Any]) -> Rental:
    values = {name: str(entry.get(name) or "") for name in ("node", "account", "state", "id")}
    offer = Offer(values["account"], str(entry.get("type") or ""), str(entry.get("place") or ""))
    return Rental(token=token, offer=offer, **values)  # type: ignore[arg-type]
