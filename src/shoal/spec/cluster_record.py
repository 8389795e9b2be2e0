"""What users' commands need to know of a cluster: a file on its controller and login hosts, without secrets.

`shoal up` writes it, `shoal join` fetches it, and on those hosts themselves commands read it where it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from shoal.errors import UsageError

RECORD_PATH = "/etc/shoal/cluster.json"
FORMAT = 1


@dataclass(frozen=True)
class RecordMember:
    """A host that users log in to."""

    name: str
    address: str
    roles: tuple[str, ...]


@dataclass(frozen=True)
class RecordShare:
    """A directory that the hosts share."""

    kind: str
    writable: bool = True
    private: bool = True
    """It keeps owners and modes on all hosts, so that a user's directory there is the user's alone."""


@dataclass(frozen=True)
class RecordNodeset:
    """Nodes that the operator's file describes together."""

    nodes: str
    """A hostlist; of a rented nodeset, all nodes that it can have."""
    price: float | None = None
    """Of a GPU hour, in the currency of the file."""
    rented: bool = False


@dataclass(frozen=True)
class ClusterRecord:
    """A cluster as its users see it."""

    cluster: str
    version: str
    """The Shoal that built it."""
    controller: str
    members: tuple[RecordMember, ...] = ()
    """The hosts that users log in to. Slurm tells of the nodes, which come and go."""
    host_keys: Mapping[str, str] = field(default_factory=dict)
    """Their public host keys, by name."""
    shares: Mapping[str, RecordShare] = field(default_factory=dict)
    """By path."""
    jobs: str = ""
    """A directory with one for each user's jobs, on a share or on each host; empty where homes are shared."""
    environments: Mapping[str, str] = field(default_factory=dict)
    """The directory that has each Python environment, by its name."""
    accounting: bool = False
    tracking: str = ""
    """The kind of tracking server; empty without one."""
    containers: tuple[str, ...] = ()
    """Nodes that are rented containers."""
    nodesets: Mapping[str, RecordNodeset] = field(default_factory=dict)
    """By name."""
    proxy: Mapping[str, str] = field(default_factory=dict)
    """The variables of the proxies through which hosts get packages."""

    @property
    def revision(self) -> str:
        """Changes with every value."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def without_nodes(self) -> ClusterRecord:
        """What a user notices of a change: not that a nodeset has other nodes now."""
        nodesets = {name: replace(nodeset, nodes="") for name, nodeset in self.nodesets.items()}
        return replace(self, nodesets=nodesets, containers=())

    def as_json(self) -> str:
        values = {"format": FORMAT, "revision": self.revision, **asdict(self)}
        return json.dumps(values, indent=1, sort_keys=True) + "\n"


def parse_record(text: str, place: str) -> ClusterRecord:
    """The record of a file's text, without keys of a later release. Raises UsageError."""
    try:
        data = json.loads(text)
        if data["format"] > FORMAT:
            raise _version_error(str(data["cluster"]), str(data["version"]))
        values = {entry.name: data[entry.name] for entry in fields(ClusterRecord) if entry.name in data}
        return ClusterRecord(
            **{
                **values,
                "members": tuple(RecordMember(**_tuples(member)) for member in data.get("members", ())),
                "shares": {path: RecordShare(**share) for path, share in data.get("shares", {}).items()},
                "containers": tuple(data.get("containers", ())),
                "nodesets": {name: RecordNodeset(**nodeset) for name, nodeset in data.get("nodesets", {}).items()},
            }
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{place} is not a description of a cluster: {error}", hint="ask the operator to run `shoal up`"
        ) from None


def check_version(record: ClusterRecord, version: str) -> None:
    """Raise UsageError where a cluster needs another release of Shoal than this one."""
    if record.version.split(".")[:2] != version.split(".")[:2]:
        raise _version_error(record.cluster, record.version, version)


def _version_error(cluster: str, needed: str, version: str = "") -> UsageError:
    has = f", and this is Shoal {version}" if version else ", which is newer than this one"
    fix = f"install shoal {needed} here, or ask the operator to run `shoal up` with your version"
    return UsageError(f"cluster {cluster} was built by Shoal {needed}{has}", hint=fix)


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
