"""Compute nodes: slurmd, which fetches its configuration, and NCCL's settings. Login hosts: clients, slurm.conf."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from shoal.agent.document import HEADER, DeviceRule, Directory, Document, File, Item, render_unit
from shoal.network.links import LINKS, NCCL, nccl_settings, sockets
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.roles.controller import slurm_conf_file
from shoal.roles.current_conf import CONF_FILES
from shoal.roles.host_address import address_wait_file
from shoal.roles.slurm_tree import daemon
from shoal.slurm.conf import SLURMCTLD_PORT, SPOOL_DIRECTORY, cgroup_conf, oci_conf, slurm_settings
from shoal.slurm.model import ClusterConf
from shoal.spec.member import Member

DEFAULTS = "/etc/default/slurmd"
DROP_IN = "/etc/systemd/system/slurmd.service.d/shoal.conf"
TMPFILES = "/etc/tmpfiles.d/shoal-slurmd.conf"
DEVICE_RULE = "90-shoal-nvidia"


def compute(cluster: Cluster, member: Member) -> Document:
    """slurmd, which fetches its configuration from the controller when it starts."""
    return (
        *_configless(cluster, member),
        Directory("/var/log/slurm", owner="slurm", group="slurm"),
        Directory(SPOOL_DIRECTORY),
        Directory("/etc/tmpfiles.d"),
        File(TMPFILES, tmpfiles_conf()),
        DeviceRule(DEVICE_RULE, device_rules() if cluster.facts_of(member.name).gpus else ""),
        *daemon(cluster, "slurmd", *slurmd_options(cluster, member), drop_ins=_drop_ins(cluster, member)),
    )


def login(cluster: Cluster) -> Document:
    """Slurm's clients with the cluster's slurm.conf: they talk to slurmctld and need no local daemon."""
    return (Directory("/etc/slurm"), slurm_conf_file(cluster))


def slurmd_options(cluster: Cluster, member: Member) -> tuple[str, ...]:
    if "controller" in member.roles:
        return ()
    name = cluster.controller.name
    # Slurm rejects a rented node that booted before the request; a container reports the uptime of its machine.
    rented = ("-b", "-N", member.name) if member.rented else ()
    return ("--conf-server", f"{cluster.addresses.get(name, name)}:{SLURMCTLD_PORT}", *rented)


def device_rules() -> str:
    """Every user may open the GPUs; Slurm's cgroups decide which of them a job sees."""
    kernels = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm*", "nvidia-modeset")
    return HEADER + "".join(f'KERNEL=="{name}", MODE="0666"\n' for name in kernels)


def slurmd_defaults(options: str, conf: ClusterConf) -> str:
    """slurmd's options, and a mark that changes with the settings that slurmd reads only when it starts."""
    settings = slurm_settings(conf) + cgroup_conf(conf) + (oci_conf() if conf.oci else "") + conf.spank
    mark = hashlib.sha256(settings.encode()).hexdigest()[:16]
    return f'{HEADER}# Settings that slurmd reads when it starts: {mark}\nSLURMD_OPTIONS="{options}"\n'


def slurmd_drop_in() -> str:
    """Debian's unit requires a local slurm.conf; a configless node starts without one, and retries."""
    return render_unit(
        Unit={"ConditionPathExists": "", "StartLimitIntervalSec": 0},
        # slurmd can miss the signal to end while it reads a new configuration; jobs survive its death.
        Service={"Restart": "on-failure", "RestartSec": 3, "TimeoutStopSec": 10},
    )


def tmpfiles_conf() -> str:
    """Files of steps that a node removes when it boots after a power loss.

    Slurm's PMIx plugin does not start a step whose socket or directory exists: a requeued job keeps its number, and
    would never start here again.
    """
    return f"{HEADER}r! {SPOOL_DIRECTORY}/stepd.slurm.pmix.*\nR! {SPOOL_DIRECTORY}/pmix.*\nR! /tmp/spmix_appdir_*\n"


def _configless(cluster: Cluster, member: Member) -> list[Item]:
    options = " ".join(slurmd_options(cluster, member))
    items: list[Item] = [File(DEFAULTS, slurmd_defaults(options, cluster.conf), restarts=("slurmd",))]
    if "controller" not in member.roles:
        # srun would read a file here instead of the one that slurmd fetched.
        items += [File(path, keep=True) for path in CONF_FILES]
    return items


def _drop_ins(cluster: Cluster, member: Member) -> tuple[File, ...]:
    own = File(DROP_IN, slurmd_drop_in(), restarts=("slurmd",))
    return own, address_wait_file(cluster, member, "slurmd")


class LinksComponent(Component):
    """NCCL's settings on nodes whose links `shoal bench links` measured."""

    files: Mapping[str, FileQuery] = {LINKS: "text", NCCL: "there"}

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if "compute" not in member.roles:
            return {}
        nodes = [other.name for other in cluster.members if "compute" in other.roles and other.site == member.site]
        settings = sockets(cluster.controller_facts.text(LINKS), member.name, nodes)
        if settings is None:
            return {Stage.NODES: (File(NCCL),)} if cluster.facts[member.name].has_file(NCCL) else {}
        return {Stage.NODES: (Directory("/etc/shoal"), File(NCCL, nccl_settings(settings)))}

    def removal(self) -> Document:
        return (File(LINKS), File(NCCL))
