"""The data from which Slurm's configuration files are rendered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shoal.contract import GRACE_S
from shoal.slurm.versions import Version

CgroupPlugin = Literal["autodetect", "cgroup/v1", "cgroup/v2", "disabled"]


@dataclass(frozen=True)
class NodeGpu:
    """One GPU of a node."""

    type: str
    """Slurm's type, `h100`; made from the GPU's name by `conf.gpu_type`. Empty where it is unknown."""
    device: str
    """Its device file, `/dev/nvidia0`."""


@dataclass(frozen=True)
class Node:
    """A node of slurm.conf."""

    name: str
    hostname: str
    """The output of `hostname -s` on it."""
    address: str
    """Where the other members reach it: an IP address or a name."""
    cpus: int = 1
    sockets: int = 1
    cores_per_socket: int = 1
    threads_per_core: int = 1
    memory_mb: int = 1024
    """The memory of the host; RealMemory is a little less."""
    gpus: tuple[NodeGpu, ...] = ()
    features: tuple[str, ...] = ()
    weight: int = 1
    port: int | None = None
    """The port of its slurmd where it is not the default: a container behind a tunnel."""
    real_memory: int | None = None
    """RealMemory of a node that was read back from a slurm.conf."""
    cloud: bool = False
    """Rented when a job needs it: Slurm learns its address when it registers."""
    shards: int = 0
    """How many jobs may share its GPUs (gres/shard); 0 where none may."""
    mps: int = 0
    """The parts of its GPUs that jobs may share through CUDA's MPS (gres/mps)."""


@dataclass(frozen=True)
class PartitionConf:
    """A queue and the nodes it may use."""

    name: str
    nodes: tuple[str, ...]
    default: bool = False
    max_time: str | None = None
    """In Slurm's format: `1-00:00:00`, minutes, or `UNLIMITED`."""
    default_time: str | None = None
    max_nodes: int | None = None
    priority: int | None = None
    """PriorityTier: a higher tier is scheduled first, and preempts jobs of a lower one."""
    grace: int = GRACE_S
    """GraceTime: seconds from the warning of a preempted job to its end."""
    preemptable: bool = True
    suspend_time: int | None = None
    """SuspendTime: seconds after which an idle rented node is released."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The user's further keys."""


@dataclass(frozen=True)
class Switch:
    """Nodes that are close to each other. A job spans several switches only with `spanning`, and if it asks for it."""

    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class AccountingConf:
    """The settings of slurm.conf for slurmdbd."""

    host: str
    """The address at which all members reach it."""
    enforce: str = ""
    """AccountingStorageEnforce; empty where the spec has no accounts."""


@dataclass(frozen=True)
class Confinement:
    """How far the cgroups of all nodes let Slurm confine a job."""

    tracked: bool = False
    """Slurm can track a job's processes in a cgroup."""
    devices: bool = False
    """Jobs may open only their own GPUs. This and the next two need `tracked`, and the cgroup controllers."""
    cores: bool = False
    memory: bool = False
    plugin: CgroupPlugin = "autodetect"
    """`disabled` where some node has no cgroups at all."""


@dataclass(frozen=True)
class PowerSaving:
    """Slurm's power saving, by which nodes are rented and released."""

    programs: str
    """The directory of the programs `resume`, `suspend`, `resume-fail` and `start`."""
    resume_timeout: int
    """Seconds from the request for a node to its registration."""
    suspend_timeout: int = 60
    """Seconds from the release of a node until it may be requested again."""


@dataclass(frozen=True)
class ClusterConf:
    """All contents of a cluster's configuration files."""

    name: str
    controller: str
    controller_address: str | None
    """None or empty: each member resolves the controller's name."""
    versions: tuple[Version, ...]
    """The Slurm version of every member. The controller's is the newest. All members read the same text."""
    nodes: tuple[Node, ...]
    partitions: tuple[PartitionConf, ...]
    switches: tuple[Switch, ...] = ()
    confinement: Confinement = Confinement()
    options: Mapping[str, str] = field(default_factory=dict)
    """The user's settings of slurm.conf; they replace ours."""
    slurm_user: str = "slurm"
    pmix: bool = False
    """Every node has Slurm's PMIx plugin."""
    spanning: bool = False
    """Jobs may span switches if they ask for it; else never. Needs slurmctld's Lua plugin."""
    one_address: bool = False
    """Daemons listen only at the address that their host's own name resolves to."""
    controller_hostname: str | None = None
    """The output of `hostname -s` on the controller where it differs from its name: slurmctld compares them."""
    accounting: AccountingConf | None = None
    """None without a database."""
    auth: Literal["munge", "slurm"] = "munge"
    """What signs messages: munged, or Slurm itself."""
    munge: bool = True
    """Whether the hosts have munge. Without it, Slurm accepts only its own signatures."""
    power: PowerSaving | None = None
    """None without rented nodes."""
    spank: str = ""
    """The digest of a plugin that slurmd loads when it starts."""
    job_engines: bool = False
    """Jobs may use Docker or podman, and slurmd runs the programs for that."""
    health: bool = False
    """Nodes have the health program, and slurmd runs its hook."""
    oci: bool = False
    """Nodes fetch an oci.conf of ours, which slurmd reads when it starts."""
