"""The text of Slurm's configuration files, from pure functions: the same cluster always gives the same bytes.

Every value is checked before it is written. Slurm's files have no safe quoting, so text that could end a line, start a
comment or smuggle in another key is refused, wherever it came from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from shoal.hostlist import compress, expand, fold
from shoal.slurm.accounting import JOBCOMP, accounting_settings
from shoal.slurm.auth import auth_settings
from shoal.slurm.model import ClusterConf, GpuLine, Node, Partition, PowerSaving
from shoal.slurm.preemption import preemption_settings, slurmctld_words
from shoal.slurm.read import HEADER, is_ours, read
from shoal.slurm.spanning import ABOVE, FOREVER
from shoal.slurm.versions import known_to_all

SLURMCTLD_PORT = 6817
SLURMD_PORT = 6818
SRUN_PORTS = "60001-63000"
PORTS = (str(SLURMCTLD_PORT), str(SLURMD_PORT), SRUN_PORTS)
"""What members must reach on each other."""

STATE_DIRECTORY = "/var/lib/slurm/slurmctld"
SPOOL_DIRECTORY = "/var/lib/slurm/slurmd"
LOG_DIRECTORY = "/var/log/slurm"

ChangeCost = Literal["none", "reconfigure", "restart"]

_WORD = re.compile(r"[!$-<>-\[\]-~]+")  # printable ASCII without blank, quote, `#`, `=` and `\`
_VALUE = re.compile(r"[!$-\[\]-~]+")
_KEY = re.compile(r"[A-Za-z]+")
_ENTRIES = frozenset({"nodename", "nodeset", "partitionname", "downnodes", "frontendname", "include"})
"""Keys that may stand many times in a slurm.conf; all others are settings, of which there is one each."""
_WORD_LISTS = frozenset({"slurmctldparameters", "communicationparameters", "preemptparameters"})


def slurm_conf(c: ClusterConf) -> str:
    """slurm.conf. All members read it, so it says only what the oldest of them knows."""
    lines = [HEADER.rstrip(), slurm_settings(c)]
    lines += _node_lines(c.nodes)
    lines.append("")
    memory = {node.name: _memory(node) // max(1, node.cpus) for node in c.nodes}
    lines += (_partition_line(partition, memory) for partition in c.partitions)
    return "\n".join(lines) + "\n"


def slurm_settings(c: ClusterConf) -> str:
    """The part of slurm.conf that names no node and no partition: what daemons read when they start."""
    settings = _with_options(_settings(c), c.options)
    if c.switches and c.spanning:
        key = next(key for key in settings if key.lower() == "schedulerparameters")
        if "max_switch_wait" not in settings[key]:
            settings[key] += f",max_switch_wait={FOREVER}"
    return "".join(f"{key}={_value(key, value)}\n" for key, value in settings.items())


def gres_conf(c: ClusterConf) -> str:
    """gres.conf: the device file of every GPU. Nodes with the same GPUs share a line."""
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for node in c.nodes:
        for kind in dict.fromkeys(gpu.type for gpu in node.gpus):
            devices = tuple(gpu.device for gpu in node.gpus if gpu.type == kind)
            alike.setdefault((kind, devices), []).append(node.name)
    lines = [HEADER.rstrip(), "AutoDetect=off"]
    for (kind, devices), names in sorted(alike.items()):
        files = fold(_word("the device of a GPU", device) for device in devices)
        typed = f" Type={_word('the type of a GPU', kind)}" if kind else ""
        lines.append(f"NodeName={_names(names)} Name=gpu{typed} File={files}")
    return "\n".join(lines) + "\n"


def cgroup_conf(c: ClusterConf) -> str:
    """cgroup.conf: what a job may use of a node is held by the kernel, where the nodes' kernels can."""
    plugin = c.cgroup_plugin
    if plugin == "disabled" and not known_to_all("cgroup_disabled", c.versions):
        plugin = "cgroup/v1"  # named, an older slurmd does not look for cgroups that are not there

    def held(wanted: bool) -> str:
        return "yes" if wanted and c.proctrack_cgroup else "no"

    return (
        HEADER + f"CgroupPlugin={plugin}\n"
        f"ConstrainCores={held(c.constrain_cores)}\n"
        f"ConstrainRAMSpace={held(c.constrain_memory)}\n"
        f"ConstrainDevices={held(c.constrain_devices)}\n"
    )


def topology_conf(c: ClusterConf) -> str:
    """topology.conf: one switch a site. Where nothing connects them no job spans two."""
    lines = [
        f"SwitchName={_word('the name of a switch', switch.name)} Nodes={_names(switch.nodes)}"
        for switch in c.switches
        if switch.nodes
    ]
    if c.spanning and lines:
        lines.append(f"SwitchName={ABOVE} Switches={','.join(switch.name for switch in c.switches if switch.nodes)}")
    return "\n".join([HEADER.rstrip(), *lines]) + "\n"


def real_memory(memory_mb: int) -> int:
    """The RealMemory to configure: 95 % of what the host has, less a reserve for the system of up to 512 MB.

    slurmd reports the machine's physical memory; a node that reports less than RealMemory is drained. The physical
    memory varies by a little from boot to boot (kernel, firmware, crash kernel), so the configured value stays below.
    """
    return max(1, memory_mb * 95 // 100 - min(512, memory_mb // 32))


def gpu_type(name: str) -> str:
    """The Slurm type of a GPU by its name: `NVIDIA H100 80GB HBM3` is h100, `NVIDIA GeForce RTX 4090` is rtx_4090."""
    words = [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word and not _NOT_A_MODEL.fullmatch(word)]
    kind = re.sub(r"[^a-z0-9]+", "_", "_".join(words).replace("simulated", "sim")).strip("_")[:32]
    if not kind:
        return "unknown"
    return kind if kind[0].isalpha() else f"gpu_{kind}"


_NOT_A_MODEL = re.compile(
    r"nvidia|geforce|tesla|amd|instinct|radeon|intel|graphics|generation|laptop|gpu|nvl|pcie|sxm\d*|hbm\w*|\d+gb?"
)


def change_cost(old: str, new: str) -> ChangeCost:
    """What slurmctld needs to take a new slurm.conf: "none", "reconfigure" or "restart". Jobs run on through either.

    Partitions change while slurmctld runs. All else takes a restart: 22.05 cannot add nodes without one, and later
    releases restart themselves on a reconfigure, so there is nothing to win.
    """
    if not is_ours(old):
        return "restart"
    before, after = read(old), read(new)
    if before.settings != after.settings or set(before.nodes) != set(after.nodes):
        return "restart"
    return "none" if set(before.partitions) == set(after.partitions) else "reconfigure"


def loses_jobs(old: str, new: str) -> bool:
    """Whether running jobs die of the change: their node leaves, or slurmctld cannot read its own state any more."""
    if not is_ours(old):
        return True
    before, after = read(old), read(new)
    if any(before.settings.get(key) != after.settings.get(key) for key in _STATE_KEYS):
        return True
    if before.settings.get("authtype") == "auth/slurm" != after.settings.get("authtype"):
        return True  # what they have to say is signed with a key that nobody takes any more
    return not before.node_names() <= after.node_names()


_STATE_KEYS = ("clustername", "statesavelocation", "selecttype", "slurmuser")


# ---- settings


def _settings(c: ClusterConf) -> dict[str, str]:
    everyone = c.versions
    controller = max(everyone)
    host = c.controller_hostname or c.controller
    parameters = ["enable_configless", "idle_on_node_suspend", *slurmctld_words(everyone)]
    if controller.knows("cloud_reg_addrs"):
        parameters.append("cloud_reg_addrs")
    # Keep-alives hold the connections open through NAT; a message without its hash is a forged one.
    communication = ["block_null_hash", "keepalivetime=60", "keepaliveinterval=15", "keepaliveprobes=4"]
    if any(":" in address for address in (c.controller_address or "", *(node.address for node in c.nodes))):
        communication.append("EnableIPv6")
    if c.one_address:
        communication += ["NoInAddrAny", "NoCtldInAddrAny"]
    settings = {
        "ClusterName": c.name,
        "SlurmctldHost": f"{host}({c.controller_address})" if c.controller_address else host,
        "SlurmUser": c.slurm_user,
        **auth_settings(c.auth),
        "SlurmctldPort": str(SLURMCTLD_PORT),
        "SlurmdPort": str(SLURMD_PORT),
        "SrunPortRange": SRUN_PORTS,
        "SlurmctldParameters": ",".join(parameters),
        "CommunicationParameters": ",".join(communication),
        "StateSaveLocation": STATE_DIRECTORY,
        "SlurmdSpoolDir": SPOOL_DIRECTORY,
        "SlurmctldLogFile": f"{LOG_DIRECTORY}/slurmctld.log",
        "SlurmdLogFile": f"{LOG_DIRECTORY}/slurmd.log",
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmdPidFile": "/run/slurmd.pid",
        "MessageTimeout": "60",
        "TCPTimeout": "10",
        "SlurmdTimeout": "300",
        "ReturnToService": "2",
        # Slurm starts a batch job at the next second of its own clock, and by default leaves three of them out.
        "SchedulerParameters": "batch_sched_delay=0",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "GresTypes": "gpu",
        **preemption_settings(everyone),
        **_tracking(c),
        # Whoever asks later which jobs there were finds them here, with a database and without one.
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": JOBCOMP,
        **accounting_settings(c.accounting),
    }
    # Nobody but the controller reaches a node at the end of a tunnel, so nobody else may pass messages on to it.
    if not known_to_all("fanout_to_any_node", everyone) or any(node.port for node in c.nodes):
        settings["TreeWidth"] = "65533"
    if not controller.knows("cloud_nodes_visible"):
        settings["PrivateData"] = "cloud"
    if c.switches:
        settings["TopologyPlugin"] = "topology/tree"
        if c.spanning:
            settings["JobSubmitPlugins"] = "lua"
    else:
        # Room for nodes that come later. Topology and nodes that are not in the file do not go together.
        settings["MaxNodeCount"] = str(max(1024, -(-len(c.nodes) // 1024) * 1024))
    if c.pmix:
        settings["MpiDefault"] = "pmix"
    if c.power:
        settings |= _power_saving(c, c.power)
    return settings


def _tracking(c: ClusterConf) -> dict[str, str]:
    """How the processes of a job are found and held together."""
    if not c.proctrack_cgroup:
        return {"ProctrackType": "proctrack/linuxproc"}
    return {
        "ProctrackType": "proctrack/cgroup",
        "TaskPlugin": "task/affinity,task/cgroup" if c.constrain_cores else "task/cgroup",
        "PrologFlags": "Contain",
    }


def _power_saving(c: ClusterConf, power: PowerSaving) -> dict[str, str]:
    """How nodes come and go. SuspendTime is each partition's own, and nodes that are always there are left alone."""
    settings = {
        "ResumeProgram": f"{power.programs}/resume",
        "SuspendProgram": f"{power.programs}/suspend",
        "ResumeFailProgram": f"{power.programs}/resume-fail",
        "PrologSlurmctld": f"{power.programs}/start",
        "ResumeTimeout": str(power.resume_timeout),
        "SuspendTimeout": str(power.suspend_timeout),
        # All nodes of a job in one request: they must come from one place.
        "ResumeRate": "0",
        "SuspendRate": "0",
    }
    staying = [node.name for node in c.nodes if not node.cloud]
    return settings | ({"SuspendExcNodes": _names(staying)} if staying else {})


def _with_options(settings: dict[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """Our settings with the user's over them. Lists of words are joined: the nodes stay configless, jobs warned."""
    spelt = {key.lower(): key for key in settings}
    for key, value in options.items():
        if not _KEY.fullmatch(key) or key.lower() in _ENTRIES:
            raise ValueError(f"{key!r} is not a setting of slurm.conf")
        ours = spelt.setdefault(key.lower(), key)
        if key.lower() in _WORD_LISTS and ours in settings:
            theirs = value.split(",")
            said = {word.partition("=")[0].lower() for word in theirs}
            kept = [word for word in settings[ours].split(",") if word.partition("=")[0].lower() not in said]
            value = ",".join([*kept, *theirs])
        settings[ours] = value
    return settings


# ---- nodes and partitions


def _node_lines(nodes: Iterable[Node]) -> Iterator[str]:
    """One line for each run of like nodes whose names, host names and addresses all count up together."""
    by_name = {node.name: node for node in nodes}
    run: list[Node] = []
    attributes = ""
    for name in expand(compress(by_name)):
        node = by_name[name]
        own = _attributes(node)
        if run and (own != attributes or not _follows(run[-1], node)):
            yield _node_line(run, attributes)
            run = []
        attributes = own
        run.append(node)
    if run:
        yield _node_line(run, attributes)


def _node_line(run: list[Node], attributes: str) -> str:
    names = [_word("the name of a node", node.name) for node in run]
    hostnames = [_word("the host name of a node", node.hostname or node.name) for node in run]
    addresses = [_word("the address of a node", node.address or node.name) for node in run]
    line = f"NodeName={fold(names)}"
    if hostnames != names:
        line += f" NodeHostname={fold(hostnames)}"
    if addresses != names:
        line += f" NodeAddr={fold(addresses)}"
    return f"{line} {attributes}"


def _attributes(node: Node) -> str:
    text = (
        f"CPUs={node.cpus:d} Sockets={node.sockets:d} CoresPerSocket={node.cores_per_socket:d}"
        f" ThreadsPerCore={node.threads_per_core:d} RealMemory={_memory(node):d}"
    )
    if node.gpus:
        text += f" Gres={_gres(node.gpus)}"
    if node.features:
        text += f" Feature={','.join(_word('a feature', feature) for feature in node.features)}"
    text += f" Port={node.port:d}" if node.port else ""
    text += f" Weight={node.weight:d}"
    return f"{text} State=CLOUD" if node.cloud else text


def _gres(gpus: Iterable[GpuLine]) -> str:
    counts = Counter(f"gpu:{_word('the type of a GPU', gpu.type)}" if gpu.type else "gpu" for gpu in gpus)
    return ",".join(f"{kind}:{count}" for kind, count in counts.items())


def _memory(node: Node) -> int:
    return real_memory(node.memory_mb) if node.real_memory is None else node.real_memory


def _follows(node: Node, following: Node) -> bool:
    return all(_next(getattr(node, key)) == getattr(following, key) for key in ("name", "hostname", "address"))


def _next(text: str) -> str | None:
    """The text that counts one further: gpu10 after gpu09."""
    prefix = text.rstrip("0123456789")
    digits = text[len(prefix) :]
    return f"{prefix}{int(digits) + 1:0{len(digits)}}" if digits else None


def _partition_line(partition: Partition, memory: Mapping[str, int]) -> str:
    parts = [f"PartitionName={_word('the name of a partition', partition.name)}"]
    unknown = [name for name in partition.nodes if name not in memory]
    if unknown:
        raise ValueError(f"partition {partition.name} names {compress(unknown)}, which the cluster does not have")
    if partition.nodes:
        parts.append(f"Nodes={_names(partition.nodes)}")
        # Without it a job that does not say takes all the memory of its nodes, and nothing runs beside it.
        parts.append(f"DefMemPerCPU={max(1, min(memory[name] for name in partition.nodes))}")
    if partition.default:
        parts.append("Default=YES")
    parts.append(f"MaxTime={_word('the MaxTime of a partition', partition.max_time or 'UNLIMITED')}")
    if partition.default_time is not None:
        parts.append(f"DefaultTime={_word('the DefaultTime of a partition', partition.default_time)}")
    if partition.max_nodes is not None:
        parts.append(f"MaxNodes={partition.max_nodes:d}")
    if partition.priority is not None:
        parts.append(f"PriorityTier={partition.priority:d}")
    parts.append(f"GraceTime={partition.grace:d}")
    if not partition.preemptable:
        parts.append("PreemptMode=OFF")
    if partition.suspend_time is not None:
        parts.append(f"SuspendTime={partition.suspend_time:d}")
    return " ".join([*parts, "State=UP"])


def _names(names: Iterable[str]) -> str:
    return compress(_word("the name of a node", name) for name in names)


def _word(what: str, text: str) -> str:
    """A part of a line, refused when it could be read as more than one."""
    if not _WORD.fullmatch(text):
        raise ValueError(f"{what} may not be {text!r}: Slurm's files take no blanks, quotes, `#`, `=` or `\\` there")
    return text


def _value(key: str, text: str) -> str:
    if not _VALUE.fullmatch(text):
        raise ValueError(f"{key} may not be {text!r}: slurm.conf takes no blanks, quotes, `#` or `\\` there")
    return text
