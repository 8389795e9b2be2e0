"""The text of Slurm's configuration files, from pure functions: the same cluster always gives the same bytes.

Every value is checked before it is written. Slurm's files have no safe quoting, so text that could end a line, start a
comment or add another key is rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.agent.document import HEADER
from shoal.hostlist import fold
from shoal.remote import program_text
from shoal.remote.runner.unpacked_image import CRUN_STATE, IMAGES, PROGRAMS, STOPPED_STATE
from shoal.slurm.accounting import accounting_settings
from shoal.slurm.conf_lines import (
    KEY,
    SHARED_GRES,
    checked_names,
    checked_value,
    checked_word,
    memory_of,
    node_lines,
    partition_line,
    quoted,
    shared_count,
)
from shoal.slurm.model import ClusterConf, PowerSaving
from shoal.slurm.preemption import preemption_settings, slurmctld_parameters
from shoal.slurm.state import JOBCOMP
from shoal.slurm.versions import all_support

SLURMCTLD_PORT = 6817
SLURMD_PORT = 6818
SRUN_PORTS = "60001-63000"
PORTS = (str(SLURMCTLD_PORT), str(SLURMD_PORT), SRUN_PORTS)
"""Ports that members must reach on each other."""

STATE_DIRECTORY = "/var/lib/slurm/slurmctld"
SPOOL_DIRECTORY = "/var/lib/slurm/slurmd"
LOG_DIRECTORY = "/var/log/slurm"

_ENTRIES = frozenset({"nodename", "nodeset", "partitionname", "downnodes", "frontendname", "include"})
"""Keys that may occur many times in a slurm.conf; every other key is a setting."""
_PARAMETER_LISTS = frozenset(
    {
        *("slurmctldparameters", "communicationparameters", "preemptparameters", "schedulerparameters"),
        *("prologflags", "taskplugin", "accountingstoragetres"),
    }
)
MAX_ARRAY_SIZE = 10001
"""One more than the largest index: arrays of 10,000 from 1 on. Slurm's default is 1001."""
MAX_JOB_COUNT = 100_000
"""Each task of an array counts as a job. Slurm's default is 10,000."""
JWKS = "/etc/slurm/slurm.jwks"
"""Where daemons read keys. A slurmd that finds it uses auth/slurm from its first message on."""
HEALTH_HOOK = "/usr/local/lib/shoal/health-hook"
EPILOG, TASK_PROLOG = "/usr/local/lib/shoal/job-epilog", "/usr/local/lib/shoal/task-prolog"
"""What Slurm runs where jobs may use Docker or podman."""
HEALTH_INTERVAL_S = 300
"""How often slurmctld has the hook run. A node that it cannot reach then is not responding, so not more often."""
LUA_PLUGIN = "job_submit_lua.so"
LUA_SCRIPT = "job_submit.lua"
"""The file beside slurm.conf that slurmctld's plugin reads, and reads again after a change."""
TOP_SWITCH = "shoal-sites"
"""The switch above all sites. A site cannot have this name."""
SWITCH_WAIT_S = 365 * 24 * 3600
"""How long a job waits for nodes on as many sites as it asked for; Slurm's default is 300 s."""


def slurm_conf(c: ClusterConf) -> str:
    """slurm.conf. All members read it, so it has only settings that the oldest member supports."""
    lines = [HEADER.rstrip(), slurm_settings(c)]
    lines += node_lines(c.nodes)
    lines.append("")
    memory = {node.name: memory_of(node) // max(1, node.cpus) for node in c.nodes}
    lines += (partition_line(partition, memory) for partition in c.partitions)
    return "\n".join(lines) + "\n"


def slurm_settings(c: ClusterConf) -> str:
    """The part of slurm.conf that names no node and no partition: what daemons read when they start."""
    return "".join(f"{key}={value}\n" for key, value in _with_options(_settings(c), c.options).items())


def gres_conf(c: ClusterConf) -> str:
    """gres.conf: the device file of every GPU. Nodes with equal GPUs share a line."""
    nodes_by_gpus: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for node in c.nodes:
        for kind in dict.fromkeys(gpu.type for gpu in node.gpus):
            devices = tuple(gpu.device for gpu in node.gpus if gpu.type == kind)
            nodes_by_gpus.setdefault((kind, devices), []).append(node.name)
    lines = [HEADER.rstrip(), "AutoDetect=off"]
    for (kind, devices), names in sorted(nodes_by_gpus.items()):
        files = fold(checked_word("the device of a GPU", device) for device in devices)
        typed = f" Type={checked_word('the type of a GPU', kind)}" if kind else ""
        lines.append(f"NodeName={checked_names(names)} Name=gpu{typed} File={files}")
    for name in SHARED_GRES:
        counts = {node.name: count for node in c.nodes if (count := shared_count(node, name))}
        for count in sorted({*counts.values()}):
            names = [node for node, its_count in counts.items() if its_count == count]
            lines.append(f"NodeName={checked_names(names)} Name={name} Count={count}")
    return "\n".join(lines) + "\n"


def cgroup_conf(c: ClusterConf) -> str:
    """cgroup.conf: the kernel limits what a job may use of a node, where the nodes' kernels support it."""
    plugin = c.confinement.plugin
    if plugin == "disabled" and not all_support("cgroup_disabled", c.versions):
        plugin = "cgroup/v1"  # named, an older slurmd does not look for cgroups that are not there

    def yes_no(constrain: bool) -> str:
        return "yes" if constrain and c.confinement.tracked else "no"

    return (
        HEADER + f"CgroupPlugin={plugin}\n"
        f"ConstrainCores={yes_no(c.confinement.cores)}\n"
        f"ConstrainRAMSpace={yes_no(c.confinement.memory)}\n"
        f"ConstrainDevices={yes_no(c.confinement.devices)}\n"
    )


def oci_conf() -> str:
    """oci.conf: `srun --container` runs an OCI bundle as the user and inside the job's cgroup.

    Slurm 22.05 does not know `%U`, and asks as root before a step starts. crun is asked only about what it runs: Slurm
    logs an error, in a batch job's output too, where a query has no answer.
    """
    job, program = "%n.%u.%j.%s.%t", f"python3 -I -S {PROGRAMS}/start.py"
    is_known = f"test -d {IMAGES}/%u/{CRUN_STATE}/{job}"
    commands = {
        "Query": f"{is_known} && {program} crun state %u {job} -- 2> /dev/null || cat {PROGRAMS}/{STOPPED_STATE}",
        "Kill": f"{is_known} && {program} crun kill %u {job} -- || true",
        "Delete": f"{is_known} && {program} crun delete %u {job} -- || true",
        "Run": f"exec {program} bundle %b {job} --",
    }
    return HEADER + "".join(f'RunTime{name}="{command}"\n' for name, command in commands.items())


def mpi_conf() -> str:
    """mpi.conf: PMIx's fences go around the nodes in a ring.

    By default those without data go through a tree, which Slurm 24.11 does not build for fewer nodes than TreeWidth:
    each node then takes itself for the root, ranks pass a barrier before those of other nodes reach it, and programs of
    Open MPI 5 end in MPI_Init now and then.
    """
    return HEADER + "PMIxCollFence=ring\n"


def topology_conf(c: ClusterConf) -> str:
    """topology.conf: one switch for each site. Without a switch above them no job spans two sites."""
    lines = [
        f"SwitchName={checked_word('the name of a switch', switch.name)} Nodes={checked_names(switch.nodes)}"
        for switch in c.switches
        if switch.nodes
    ]
    if c.spanning and lines:
        names = ",".join(switch.name for switch in c.switches if switch.nodes)
        lines.append(f"SwitchName={TOP_SWITCH} Switches={names}")
    return "\n".join([HEADER.rstrip(), *lines]) + "\n"


def gpu_type(name: str) -> str:
    """The Slurm type of a GPU by its name: `NVIDIA H100 80GB HBM3` is h100, `NVIDIA GeForce RTX 4090` is rtx_4090."""
    name_words = [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word and not _NOT_A_MODEL.fullmatch(word)]
    kind = re.sub(r"[^a-z0-9]+", "_", "_".join(name_words).replace("simulated", "sim")).strip("_")[:32]
    if not kind:
        return "unknown"
    return kind if kind[0].isalpha() else f"gpu_{kind}"


_NOT_A_MODEL = re.compile(
    r"nvidia|geforce|tesla|amd|instinct|radeon|intel|graphics|generation|laptop|gpu|nvl|pcie|sxm\d*|hbm\w*|\d+gb?"
)


# ---- settings


def _settings(c: ClusterConf) -> dict[str, str]:
    controller = max(c.versions)
    host = c.controller_hostname or c.controller
    parameters = ["enable_configless", "idle_on_node_suspend", *slurmctld_parameters(c.versions)]
    if controller.supports("cloud_reg_addrs"):
        parameters.append("cloud_reg_addrs")
    settings = {
        "ClusterName": c.name,
        "SlurmctldHost": f"{host}({c.controller_address})" if c.controller_address else host,
        "SlurmUser": c.slurm_user,
        **auth_settings(c.auth, munge=c.munge),
        "SlurmctldPort": str(SLURMCTLD_PORT),
        "SlurmdPort": str(SLURMD_PORT),
        "SrunPortRange": SRUN_PORTS,
        "SlurmctldParameters": ",".join(parameters),
        "CommunicationParameters": ",".join(_communication(c)),
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
        # slurmctld starts batch jobs once a second, and by default skips three of these.
        "SchedulerParameters": "batch_sched_delay=0",
        # A job that none of its partitions can ever start is rejected when it is submitted.
        "EnforcePartLimits": "ANY",
        "MaxArraySize": str(MAX_ARRAY_SIZE),
        "MaxJobCount": str(MAX_JOB_COUNT),
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "GresTypes": ",".join(
            ["gpu", *(name for name in SHARED_GRES if any(shared_count(node, name) for node in c.nodes))]
        ),
        **preemption_settings(c.versions),
        **_tracking(c),
        # A record of ended jobs, with a database and without one.
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": JOBCOMP,
        **accounting_settings(c.accounting),
    }
    # Only the controller reaches a node behind a tunnel, so no other node may forward messages to it.
    if not all_support("fanout_to_any_node", c.versions) or any(node.port for node in c.nodes):
        settings["TreeWidth"] = "65533"
    if not controller.supports("cloud_nodes_visible"):
        settings["PrivateData"] = "cloud"
    if c.switches:
        settings["TopologyPlugin"] = "topology/tree"
        if c.spanning:
            settings["JobSubmitPlugins"] = "lua"
            settings["SchedulerParameters"] += f",max_switch_wait={SWITCH_WAIT_S}"
    else:
        # Room for nodes that are added later. Slurm does not support dynamic nodes with a topology.
        settings["MaxNodeCount"] = str(max(1024, -(-len(c.nodes) // 1024) * 1024))
    if c.pmix:
        settings["MpiDefault"] = "pmix"
    if c.power:
        settings |= _power_saving(c, c.power)
    if c.job_engines:
        settings |= {"Epilog": EPILOG, "TaskProlog": TASK_PROLOG}
    if c.health:
        settings |= {"HealthCheckProgram": HEALTH_HOOK, "HealthCheckInterval": str(HEALTH_INTERVAL_S)}
    return settings


def _communication(c: ClusterConf) -> list[str]:
    # Keep-alives hold the connections open through NAT; a message without a hash is forged.
    parameters = ["block_null_hash", "keepalivetime=60", "keepaliveinterval=15", "keepaliveprobes=4"]
    if any(":" in address for address in (c.controller_address or "", *(node.address for node in c.nodes))):
        parameters.append("EnableIPv6")
    if c.one_address:
        parameters += ["NoInAddrAny", "NoCtldInAddrAny"]
    return parameters


def _tracking(c: ClusterConf) -> dict[str, str]:
    """How Slurm tracks the processes of a job."""
    if not c.confinement.tracked:
        return {"ProctrackType": "proctrack/linuxproc"}
    return {
        "ProctrackType": "proctrack/cgroup",
        "TaskPlugin": "task/affinity,task/cgroup" if c.confinement.cores else "task/cgroup",
        "PrologFlags": "Contain",
    }


def _power_saving(c: ClusterConf, power: PowerSaving) -> dict[str, str]:
    """Power saving for rented nodes. SuspendTime is set per partition; permanent nodes are excluded."""
    settings = {
        "ResumeProgram": f"{power.programs}/resume",
        "SuspendProgram": f"{power.programs}/suspend",
        "ResumeFailProgram": f"{power.programs}/resume-fail",
        "PrologSlurmctld": f"{power.programs}/start",
        "ResumeTimeout": str(power.resume_timeout),
        "SuspendTimeout": str(power.suspend_timeout),
        # All nodes of a job in one request: they must be rented at one place.
        "ResumeRate": "0",
        "SuspendRate": "0",
    }
    permanent = [node.name for node in c.nodes if not node.cloud]
    return settings | ({"SuspendExcNodes": checked_names(permanent)} if permanent else {})


def _with_options(settings: dict[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """Our settings, overridden by the user's. Parameter lists are merged: nodes stay configless, jobs are warned."""
    settings = {key: checked_value(key, value) for key, value in settings.items()}
    spelling = {key.lower(): key for key in settings}
    for key, value in options.items():
        if not KEY.fullmatch(key) or key.lower() in _ENTRIES:
            raise ValueError(f"{key!r} is not a setting of slurm.conf")
        name = spelling.setdefault(key.lower(), key)
        if key.lower() in _PARAMETER_LISTS and name in settings:
            parameters = value.split(",")
            replaced = {word.partition("=")[0].lower() for word in parameters}
            defaults = [word for word in settings[name].split(",") if word.partition("=")[0].lower() not in replaced]
            value = ",".join([*defaults, *parameters])
        settings[name] = quoted(key, value)
    return settings


# ---- keys


@dataclass(frozen=True)
class SigningKey:
    """A key of auth/slurm. Its value is in a file on each host, and the host fills it in."""

    placeholder: str
    """The host replaces it with the value."""
    digest: str
    """The digest of the file with the value; the key's name is derived from it."""
    signs: bool = False


def jwks(*keys: SigningKey) -> str:
    """slurm.jwks. All keys verify; one signs. The hexadecimal digits are valid base64."""
    entries = []
    for key in keys:
        entry = {"alg": "HS256", "kty": "oct", "kid": f"shoal-{key.digest[:12]}", "k": key.placeholder}
        entries.append(entry | ({"use": "default"} if key.signs else {}))
    return json.dumps({"keys": entries}, indent=1) + "\n"


def auth_settings(auth: str, *, munge: bool = True) -> dict[str, str]:
    """The settings of slurm.conf for it. Where there is munge, slurmctld accepts it, for jobs that began with it."""
    if auth == "munge":
        return {"AuthType": "auth/munge"}
    return {"AuthType": "auth/slurm", **({"AuthAltTypes": "auth/munge"} if munge else {}), "CredType": "cred/slurm"}


def job_submit_lua(c: ClusterConf) -> str:
    """The script that keeps a job on one site unless it asks for more with `--switches`."""
    largest = max((len(switch.nodes) for switch in c.switches), default=0)
    return program_text("job_submit.lua", LARGEST=largest, SWITCH_WAIT_S=SWITCH_WAIT_S)
