"""What the agent found out about a host, as typed data. Unknown keys are tolerated: an agent may know more."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Cpu:
    """CPU topology as Slurm counts it, limited to the CPUs this host may use."""

    cpus: int = 1
    sockets: int = 1
    cores_per_socket: int = 1
    threads_per_core: int = 1


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    name: str
    memory_mb: int
    device: str
    """Its device file, `/dev/nvidia0`."""
    driver: str = ""
    """The version of NVIDIA's driver: "580.95.05"."""


@dataclass(frozen=True)
class Cgroup:
    version: int = 0
    """0 (none), 1 or 2."""
    writable: tuple[str, ...] = ()
    """The controllers in which root can make groups; in version 2, which has none for them, also `devices`."""


@dataclass(frozen=True)
class Package:
    installed: str | None = None
    candidate: str | None = None


@dataclass(frozen=True)
class UnixIds:
    id: int
    gid: int | None = None


@dataclass(frozen=True)
class Address:
    interface: str
    address: str
    prefix: int
    mtu: int = 1500
    """The largest packet that its interface sends."""


@dataclass(frozen=True)
class Neighbour:
    """A machine on a segment of the host, no router, that has answered it there."""

    interface: str
    address: str


@dataclass(frozen=True)
class ConnectedAddress:
    """Where our own connection to the host went. A router may stand there and pass it on."""

    address: str
    port: int = 22


@dataclass(frozen=True)
class Disk:
    mount: str
    total_mb: int
    free_mb: int


@dataclass(frozen=True)
class Space:
    """The file system of a directory that we asked about."""

    mount: str
    free_mb: int
    problem: str = ""
    """Why daemons cannot write there; empty where they can."""


@dataclass(frozen=True)
class FileFact:
    """A file we asked about. `text` only where we asked for it, never for a secret."""

    sha256: str | None = None
    text: str | None = None
    there: bool = False
    """Whether there is one, where we asked for nothing more."""


@dataclass(frozen=True)
class Facts:
    hostname: str = ""
    os_id: str = ""
    os_version: str = ""
    os_codename: str = ""
    arch: str = ""
    kernel: str = ""
    python: str = ""
    package_manager: str = ""
    """`apt`, `dnf`, or the name of another one that Shoal does not drive."""
    init: str = "systemd"
    """`systemd` or `none`."""
    cpu: Cpu = field(default_factory=Cpu)
    memory_mb: int = 0
    gpus: tuple[Gpu, ...] = ()
    pci_gpus: tuple[str, ...] = ()
    """NVIDIA's devices on the PCI bus, where no GPU works."""
    disks: tuple[Disk, ...] = ()
    spaces: Mapping[str, Space] = field(default_factory=dict)
    """By directory."""
    tun: bool = False
    fuse: bool = False
    filesystems: tuple[str, ...] = ()
    """Those of the file systems we asked about that the host can mount."""
    cgroup: Cgroup = field(default_factory=Cgroup)
    clock: float = 0.0
    """Seconds since the epoch on the host, when it answered."""
    clock_offset: float = 0.0
    """How far the host's clock is ahead of the operator's, in seconds; filled in by the client."""
    boot_id: str = ""
    packages: Mapping[str, Package] = field(default_factory=dict)
    users: Mapping[str, UnixIds] = field(default_factory=dict)
    groups: Mapping[str, UnixIds] = field(default_factory=dict)
    addresses: tuple[Address, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    modules: tuple[str, ...] = ()
    """Those of the kernel modules we asked about that the kernel has, or can load."""
    reaches: Mapping[str, str] = field(default_factory=dict)
    """Where other members answered this one, by name; filled in where the network has to know."""
    connected_at: ConnectedAddress | None = None
    """Where we reached it; filled in by who asked, where that is an address."""
    firewall: str = ""
    """A firewall beside ours that drops by default: `ufw` or `nft inet filter input`."""
    files: Mapping[str, FileFact] = field(default_factory=dict)
    services: Mapping[str, str] = field(default_factory=dict)
    """State of the services we asked about: active, inactive, failed, missing."""
    tailscale: Mapping[str, Any] = field(default_factory=dict)
    """Part of `tailscale status --json`, where we asked; `network/tailscale.py` reads it."""

    def text(self, path: str) -> str:
        """The text of a file; empty where there is none, or nobody asked for it."""
        return self.files.get(path, _NO_FILE).text or ""

    def digest(self, path: str) -> str | None:
        """The SHA-256 of a file; None where there is none, or nobody asked for it."""
        return self.files.get(path, _NO_FILE).sha256

    def has_file(self, path: str) -> bool:
        """Whether there is a file, where we asked for nothing more."""
        return self.files.get(path, _NO_FILE).there

    def is_active(self, service: str) -> bool:
        """Whether a service runs."""
        return self.services.get(service) == "active"


_NO_FILE = FileFact()
NO_FACTS = Facts()
"""Of a host that does not answer."""


_LISTS: dict[str, Any] = {"gpus": Gpu, "disks": Disk, "addresses": Address, "neighbours": Neighbour}
_TABLES: dict[str, Any] = {"packages": Package, "users": UnixIds, "groups": UnixIds, "files": FileFact, "spaces": Space}


def from_wire(data: Mapping[str, Any]) -> Facts:
    """Facts from the agent's JSON. Raises ValueError, TypeError, KeyError or AttributeError for what is none."""
    fields = dict(data)
    for name in ("filesystems", "modules"):
        fields[name] = tuple(data.get(name, ()))
    for name, kind in _LISTS.items():
        fields[name] = tuple(_build(kind, value) for value in data.get(name, ()))
    for name, kind in _TABLES.items():
        fields[name] = {key: _build(kind, value) for key, value in data.get(name, {}).items()}
    cgroup = data.get("cgroup", {})
    fields["cgroup"] = Cgroup(cgroup.get("version", 0), tuple(cgroup.get("writable", ())))
    fields["cpu"] = _build(Cpu, data.get("cpu", {}))
    for one in fields["addresses"]:
        ipaddress.ip_interface(f"{one.address}/{one.prefix}")
    for neighbour in fields["neighbours"]:
        ipaddress.ip_address(neighbour.address)
    return _build(Facts, fields)


def _build(kind: type[T], data: Mapping[str, Any]) -> T:
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{name: value for name, value in data.items() if name in names})
