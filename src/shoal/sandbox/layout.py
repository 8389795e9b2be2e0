"""Every name and path of the sandbox, and the records that say which hosts a cluster has.

    <cache>/images/<image>/<recipe>/       a root file system, shared by all hosts, never written to
    <cache>/vm/<image>/<recipe>/           what virtual machines boot from, and snapshots of booted ones
    <cache>/sandbox/<cluster>/cluster.json the cluster's sites and their subnets
                             /id_ed25519   the key that logs in to its hosts
                             /shared/      a directory that all its hosts see as /shared
                             /hosts/<name>/host.json, seed/, upper/, work/, root/, log
                                          (a virtual machine: disk.qcow2, initrd, in place of upper/, work/, root/;
                                          a container of podman or docker: host.json and seed.tar alone)

Names of links, namespaces and groups follow from the cache and the cluster alone, so that what a killed process
left can be found without any record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import ProviderError
from shoal.local_files import locked, write_atomic
from shoal.spec.member import Shape

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
NAME_RULE = "use lower-case letters, digits and hyphens, at most 40 of them"
OPEN_SITE = "a"
"""The site that others can reach. Every other site is behind NAT."""
CONTAINERS = "containers"
"""The site of containers: only one forwarded port of each is reachable."""
FIRST_OUTER_PORT = 22000


def site_of(shape: Shape) -> str:
    """The site whose bridge such a host is on."""
    return CONTAINERS if shape.container else shape.site


@dataclass(frozen=True)
class Site:
    """One subnet of a cluster, on one bridge."""

    name: str
    index: int
    subnet: str

    @property
    def behind_nat(self) -> bool:
        return self.name != OPEN_SITE


@dataclass(frozen=True)
class HostRecord:
    """A host that has been laid out on disk."""

    name: str
    index: int
    """Unique in the cluster; its link is named by it."""
    address: str
    image: str
    """The directory of its image."""
    host_key: str
    shape: Shape = field(default_factory=Shape)
    renter: str = ""
    """The simulated cloud whose machine it is; empty for a host of the cluster's own."""
    port: int = 0
    """The machine's port, on its loopback, behind which the SSH server of a host under a container engine answers."""

    @property
    def site(self) -> str:
        """The site whose bridge it is on."""
        return site_of(self.shape)

    @property
    def outer_port(self) -> int:
        """The machine's port behind which a container's SSH server answers."""
        return FIRST_OUTER_PORT + self.index


@dataclass(frozen=True)
class Layout:
    """The names and paths of one cluster."""

    cache: Path
    cluster: str

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.cluster):
            raise ProviderError(f"the sandbox cannot name a cluster {self.cluster!r}", hint=NAME_RULE)

    @property
    def id(self) -> str:
        """Six letters that tell this cluster's links and groups from those of any other."""
        return hashlib.sha256(f"{self.cache}\0{self.cluster}".encode()).hexdigest()[:6]

    @property
    def dir(self) -> Path:
        return self.cache / "sandbox" / self.cluster

    @property
    def shared(self) -> Path:
        """What the hosts see as /shared."""
        return self.dir / "shared"

    @property
    def identity(self) -> Path:
        return self.dir / "id_ed25519"

    @property
    def table(self) -> str:
        """The nftables table of the cluster."""
        return f"shoal_{self.cluster.replace('-', '_')}_{self.id}"

    @property
    def bridge_prefix(self) -> str:
        return f"shoal{self.id}"

    @property
    def link_prefix(self) -> str:
        return f"sh{self.id}v"

    @property
    def prefix(self) -> str:
        """How the names of the cluster's network namespaces and cgroups begin."""
        return f"shoal-{self.id}-"

    def bridge(self, site: Site) -> str:
        return f"{self.bridge_prefix}{site.index}"

    def link(self, host: HostRecord) -> str:
        """The machine's end of the host's network cable. The kernel allows 15 characters."""
        return f"{self.link_prefix}{host.index}"

    def namespace(self, host: str) -> str:
        """The name of the host's network namespace and of its cgroups."""
        return f"{self.prefix}{host}"

    def host_dir(self, host: str) -> Path:
        if not NAME.fullmatch(host):
            raise ProviderError(f"not a name of a sandbox host: {host!r}", hint=NAME_RULE)
        return self.dir / "hosts" / host

    def sites(self) -> dict[str, Site]:
        data = _read_json(self.dir / "cluster.json")
        return {name: Site(name, site["index"], site["subnet"]) for name, site in data.get("sites", {}).items()}

    def save_sites(self, sites: dict[str, Site]) -> None:
        stored = {site.name: {"index": site.index, "subnet": site.subnet} for site in sites.values()}
        write_atomic(self.dir / "cluster.json", json.dumps({"cluster": self.cluster, "sites": stored}, indent=1))

    def hosts(self) -> dict[str, HostRecord]:
        """The hosts on disk, in the order they were asked for."""
        records_data = (_read_json(path) for path in self.dir.glob("hosts/*/host.json"))
        records = sorted((_host_record(data) for data in records_data if data), key=lambda host: host.index)
        return {host.name: host for host in records}

    def save_host(self, host: HostRecord) -> None:
        write_atomic(self.host_dir(host.name) / "host.json", json.dumps(asdict(host), indent=1))

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Only one process at a time changes a cluster. The lock is the directory itself, so nothing is left behind."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # the directory above went with another cluster: try again
                self.dir.mkdir(parents=True, exist_ok=True)
            async with locked(self.dir) as still_there:
                if still_there:
                    yield
                    return


def other_subnets(cache: Path) -> list[str]:
    """The subnets of every cluster in the cache, running or not."""
    records = (_read_json(path) for path in cache.glob("sandbox/*/cluster.json"))
    return [site["subnet"] for data in records for site in data.get("sites", {}).values()]


def _read_json(path: Path) -> dict[str, Any]:
    """A record, or nothing where a killed process left none."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}
    return data


def _host_record(data: dict[str, Any]) -> HostRecord:
    shape = {name: value for name, value in data["shape"].items() if name in Shape.__dataclass_fields__}
    plain = {name: data[name] for name in ("name", "index", "address", "image", "host_key")}
    return HostRecord(**plain, shape=Shape(**shape), renter=data.get("renter", ""), port=data.get("port", 0))
