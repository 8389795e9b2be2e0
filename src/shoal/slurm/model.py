"""What Slurm is told about a cluster: the data its configuration files are rendered from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shoal.slurm.versions import Version
from shoal.train.contract import GRACE_SECONDS

CgroupPlugin = Literal["autodetect", "cgroup/v1", "cgroup/v2", "disabled"]


@dataclass(frozen=True)
class GpuLine:
    """One GPU of a node."""

    type: str
    """Slurm's type, `h100`; made from the GPU's name by `conf.gpu_type`. Empty where it is not known beforehand."""
    device: str
    """Its device file, `/dev/nvidia0`."""


@dataclass(frozen=True)
class Node:
    """A host that runs jobs, as Slurm counts it."""

    name: str
    hostname: str
    """What `hostname -s` says on it."""
    address: str
    """Where the other members reach it: an IP address or a name."""
    cpus: int = 1
    sockets: int = 1
    cores_per_socket: int = 1
    threads_per_core: int = 1
    memory_mb: int = 1024
    """The memory found on the host; what Slurm is told is a little less."""
    gpus: tuple[GpuLine, ...] = ()
    features: tuple[str, ...] = ()
    weight: int = 1
    port: int | None = None
    """Of its slurmd, where that is not Slurm's own: a container, reached at the end of a tunnel."""
    real_memory: int | None = None
    """What Slurm is told, where that is known already: a node read back from a slurm.conf."""
    cloud: bool = False
    """It comes when a job needs it: Slurm learns its address when it registers."""


@dataclass(frozen=True)
class Partition:
    """A queue and the nodes it may use."""

    name: str
    nodes: tuple[str, ...]
    default: bool = False
    max_time: str | None = None
    """As Slurm writes times: `1-00:00:00`, minutes, or `UNLIMITED`."""
    default_time: str | None = None
    max_nodes: int | None = None
    priority: int | None = None
    """PriorityTier: a higher one is scheduled first, and preempts jobs of a lower one."""
    grace: int = GRACE_SECONDS
    """GraceTime: seconds from the warning of a preempted job to its end."""
    preemptable: bool = True
    suspend_time: int | None = None
    """SuspendTime: seconds after which a node that comes and goes is given back when it has nothing to do."""


@dataclass(frozen=True)
class Switch:
    """Nodes that are close to each other. A job spans several only where it says so, and `spanning` lets it."""

    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class AccountingConf:
    """Where slurmdbd is, and what it is for."""

    host: str
    """Its address, as all members reach it."""
    enforce: str = ""
    """AccountingStorageEnforce: what slurmctld refuses; empty where the spec does not say who may use the cluster."""


@dataclass(frozen=True)
class PowerSaving:
    """How Slurm has nodes made and given back."""

    programs: str
    """The directory of the programs `resume`, `suspend`, `resume-fail` and `start`."""
    resume_timeout: int
    """Seconds from asking for a node to its registration."""
    suspend_timeout: int = 60
    """Seconds from giving a node back until it may be asked for again."""


@dataclass(frozen=True)
class ClusterConf:
    """One cluster, all that its configuration files say."""

    name: str
    controller: str
    controller_address: str | None
    """None or empty leaves it to each member to resolve the controller's name."""
    versions: tuple[Version, ...]
    """The Slurm of every member, the controller's included, which is the newest. All of them read the same text."""
    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...]
    switches: tuple[Switch, ...] = ()
    proctrack_cgroup: bool = False
    """Every node has a cgroup tree in which Slurm can track a job's processes."""
    constrain_cores: bool = False
    constrain_memory: bool = False
    constrain_devices: bool = False
    """Jobs may open only the GPUs they were given. The three want `proctrack_cgroup`, and the controllers for it."""
    cgroup_plugin: CgroupPlugin = "autodetect"
    """`disabled` where some node has no cgroups at all."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Settings of slurm.conf that the user gives; they replace ours."""
    slurm_user: str = "slurm"
    pmix: bool = False
    """Every node has Slurm's PMIx plugin."""
    spanning: bool = False
    """Jobs may span switches when they say so; else never. Wants slurmctld's Lua plugin."""
    one_address: bool = False
    """Daemons listen at the address that their host's own name has, and nowhere else."""
    controller_hostname: str | None = None
    """What `hostname -s` says on the controller, where that is not its name: slurmctld compares."""
    accounting: AccountingConf | None = None
    """None without a database: ended jobs are in a file alone."""
    auth: Literal["munge", "slurm"] = "munge"
    """Who signs messages: munged, or Slurm itself."""
    power: PowerSaving | None = None
    """None where no node comes and goes."""
