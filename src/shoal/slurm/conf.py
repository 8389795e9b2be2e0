"""The text of Slurm's configuration files, from pure functions: the same cluster always gives the same bytes.

Every value is checked before it is written. Slurm's files have no safe quoting, so text that could end a line, start a
comment or smuggle in another key is refused, wherever it came from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal.hostlist import fold
from shoal.slurm.accounting import JOBCOMP, accounting_settings
from shoal.slurm.auth import auth_settings
from shoal.slurm.conf_lines import (
    checked_names,
    checked_value,
    checked_word,
    memory_of,
    node_lines,
    partition_line,
)
from shoal.slurm.model import ClusterConf, PowerSaving
from shoal.slurm.preemption import preemption_settings, slurmctld_words
from shoal.slurm.read import HEADER
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

_KEY = re.compile(r"[A-Za-z]+")
_ENTRIES = frozenset({"nodename", "nodeset", "partitionname", "downnodes", "frontendname", "include"})
"""Keys that may stand many times in a slurm.conf; all others are settings, of which there is one each."""
_WORD_LISTS = frozenset({"slurmctldparameters", "communicationparameters", "preemptparameters"})


def slurm_conf(c: ClusterConf) -> str:
    """slurm.conf. All members read it, so it says only what the oldest of them knows."""
    lines = [HEADER.rstrip(), slurm_settings(c)]
    lines += node_lines(c.nodes)
    lines.append("")
    memory = {node.name: memory_of(node) // max(1, node.cpus) for node in c.nodes}
    lines += (partition_line(partition, memory) for partition in c.partitions)
    return "\n".join(lines) + "\n"


def slurm_settings(c: ClusterConf) -> str:
    """The part of slurm.conf that names no node and no partition: what daemons read when they start."""
    settings = _with_options(_settings(c), c.options)
    if c.switches and c.spanning:
        key = next(key for key in settings if key.lower() == "schedulerparameters")
        if "max_switch_wait" not in settings[key]:
            settings[key] += f",max_switch_wait={FOREVER}"
    return "".join(f"{key}={checked_value(key, value)}\n" for key, value in settings.items())


def gres_conf(c: ClusterConf) -> str:
    """gres.conf: the device file of every GPU. Nodes with the same GPUs share a line."""
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for node in c.nodes:
        for kind in dict.fromkeys(gpu.type for gpu in node.gpus):
            devices = tuple(gpu.device for gpu in node.gpus if gpu.type == kind)
            alike.setdefault((kind, devices), []).append(node.name)
    lines = [HEADER.rstrip(), "AutoDetect=off"]
    for (kind, devices), names in sorted(alike.items()):
        files = fold(checked_word("the device of a GPU", device) for device in devices)
        typed = f" Type={checked_word('the type of a GPU', kind)}" if kind else ""
        lines.append(f"NodeName={checked_names(names)} Name=gpu{typed} File={files}")
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
        f"SwitchName={checked_word('the name of a switch', switch.name)} Nodes={checked_names(switch.nodes)}"
        for switch in c.switches
        if switch.nodes
    ]
    if c.spanning and lines:
        lines.append(f"SwitchName={ABOVE} Switches={','.join(switch.name for switch in c.switches if switch.nodes)}")
    return "\n".join([HEADER.rstrip(), *lines]) + "\n"


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
    return settings | ({"SuspendExcNodes": checked_names(staying)} if staying else {})


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
