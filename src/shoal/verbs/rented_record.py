"""Where the rented hosts of a cluster are, as this machine saw them last: a cache beside the cluster's host keys.

An order is written here before it is sent, with the host key that the machine must show. Without the file nothing is
lost: the provider lists the machines by their marks, and their keys are then trusted on first use.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.hosts.api import Target
from shoal.hosts.provider import Instance
from shoal.local_files import state_directory, write_atomic
from shoal.spec.member import Placement

FILE = "rented-hosts.json"


@dataclass(frozen=True)
class RentedHostRecord:
    """One rented host, from its order on."""

    account: str = ""
    """The provider account."""
    token: str = ""
    """The token of its order."""
    ordered_at: float = 0.0
    id: str = ""
    """The machine's id at the provider; empty until it was listed."""
    address: str = ""
    port: int = 22
    user: str = ""
    identity: str = ""
    host_key: str = ""
    """The public key that it must show; empty: trusted on first use."""
    next_key: str = ""
    """The key that replaces it, from before the replacement until it is proved."""
    ready: bool = False
    """It has its address and a host key of its own: a run of `up` that ordered it came to its end."""

    def target(self, name: str, key: str | None = None) -> Target:
        identity = Path(self.identity) if self.identity else None
        return Target(name, self.address, self.port, self.user, identity, (key or self.host_key) or None)


@dataclass
class RentedHostRecords:
    """The records of one cluster."""

    cluster: str
    hosts: dict[str, RentedHostRecord] = field(default_factory=dict)

    @classmethod
    def read(cls, cluster: str) -> RentedHostRecords:
        try:
            data = json.loads(_place(cluster).read_text(encoding="utf-8"))
            hosts = {name: RentedHostRecord(**_known(values)) for name, values in data.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            hosts = {}  # none yet, or not one of ours
        return cls(cluster, hosts)

    def update(self, name: str, **fields: Any) -> RentedHostRecord:
        """Change the record of a host, on disk too."""
        record = replace(self.hosts.get(name, RentedHostRecord()), **fields)
        if record != self.hosts.get(name):
            self.hosts[name] = record
            self._write()
        return record

    def remove(self, name: str) -> None:
        if self.hosts.pop(name, None) is not None:
            self._write()

    def _write(self) -> None:
        place = _place(self.cluster)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(place, json.dumps({name: asdict(record) for name, record in self.hosts.items()}, indent=1), 0o600)


def placements(cluster: str) -> Mapping[str, Placement]:
    """The places of the rented hosts that are known."""
    return {
        name: Placement(record.address, record.user, record.port, Path(record.identity) if record.identity else None)
        for name, record in RentedHostRecords.read(cluster).hosts.items()
        if record.id and record.address
    }


def recorded_instances(cluster: str, names: Iterable[str]) -> dict[str, Instance]:
    """These rented hosts as instances, where they are known."""
    hosts = RentedHostRecords.read(cluster).hosts
    known = {name: hosts[name] for name in names if name in hosts and hosts[name].id and hosts[name].address}
    return {name: Instance(name, "running", record.target(name)) for name, record in known.items()}


def recorded_accounts(cluster: str) -> set[str]:
    """The provider accounts that have, or had, a host of the cluster."""
    return {record.account for record in RentedHostRecords.read(cluster).hosts.values()}


def _place(cluster: str) -> Path:
    return state_directory(cluster) / FILE


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in RentedHostRecord.__dataclass_fields__}
