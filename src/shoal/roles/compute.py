"""A compute node: slurmd without a configuration of its own. A login host: the clients and a copy of slurm.conf."""

from __future__ import annotations

import hashlib

from shoal.agent.document import DeviceRule, Directory, Document, File, Item, Service
from shoal.roles.cluster import Cluster
from shoal.roles.controller import READ_CONF, advice
from shoal.roles.in_force import CONF_FILES, SLURM_CONF
from shoal.roles.own_address import awaits_address
from shoal.slurm.conf import SLURMCTLD_PORT, SPOOL_DIRECTORY, cgroup_conf, slurm_conf, slurm_settings
from shoal.slurm.model import ClusterConf
from shoal.spec.member import Member

DEFAULTS = "/etc/default/slurmd"
DROP_IN = "/etc/systemd/system/slurmd.service.d/shoal.conf"
LEFTOVERS = "/etc/tmpfiles.d/shoal-slurmd.conf"
DEVICE_RULE = "90-shoal-nvidia"


def compute(cluster: Cluster, member: Member) -> Document:
    """slurmd, which fetches its configuration from the controller when it starts."""
    return (
        *_configless(cluster, member),
        Directory("/var/log/slurm", owner="slurm", group="slurm"),
        Directory(SPOOL_DIRECTORY),
        Directory("/etc/tmpfiles.d"),
        File(LEFTOVERS, leftovers()),
        DeviceRule(DEVICE_RULE, device_rules() if _has_nvidia(cluster, member) else ""),
        Service("slurmd", command=("/usr/sbin/slurmd", "-D", *slurmd_options(cluster, member))),
    )


def login(cluster: Cluster) -> Document:
    """Slurm's clients with the cluster's slurm.conf: they talk to slurmctld, no daemon of their own is needed."""
    text = slurm_conf(cluster.conf)
    return (
        Directory("/etc/slurm"),
        File(SLURM_CONF, text, keep=True, accepted_by=READ_CONF, advice=advice(cluster)),
    )


def slurmd_options(cluster: Cluster, member: Member) -> tuple[str, ...]:
    if "controller" in member.roles:
        return ()
    name = cluster.controller.name
    # Slurm asked for the node before its kernel started, or so it must seem: containers tell their host's uptime.
    rented = ("-b", "-N", member.name) if member.rented else ()
    return ("--conf-server", f"{cluster.addresses.get(name, name)}:{SLURMCTLD_PORT}", *rented)


def device_rules() -> str:
    """Every user may open the cards; Slurm's cgroups decide which of them a job sees."""
    return (
        "# Written by shoal; changes here are lost.\n"
        'KERNEL=="nvidia[0-9]*", MODE="0666"\n'
        'KERNEL=="nvidiactl", MODE="0666"\n'
        'KERNEL=="nvidia-uvm*", MODE="0666"\n'
        'KERNEL=="nvidia-modeset", MODE="0666"\n'
    )


def slurmd_defaults(options: str, conf: ClusterConf) -> str:
    """slurmd's options, and a mark that changes with those settings that slurmd reads only when it starts."""
    mark = hashlib.sha256((slurm_settings(conf) + cgroup_conf(conf)).encode()).hexdigest()[:16]
    return (
        "# Written by shoal; changes here are lost.\n"
        f"# Settings that slurmd reads when it starts: {mark}\n"
        f'SLURMD_OPTIONS="{options}"\n'
    )


def slurmd_drop_in() -> str:
    """Debian's unit wants a local slurm.conf; a node without one starts all the same, and tries until answered."""
    return (
        "# Written by shoal; changes here are lost.\n"
        "[Unit]\n"
        "ConditionPathExists=\n"
        "StartLimitIntervalSec=0\n"
        "\n"
        "[Service]\n"
        "Restart=on-failure\n"
        "RestartSec=3\n"
        # A slurmd that is told to end while it reads a new configuration can miss it; jobs do not mind its death.
        "TimeoutStopSec=10\n"
    )


def leftovers() -> str:
    """What a node that lost its power forgets when it boots.

    Slurm's PMIx plugin does not start a step whose socket or directory is there already: a job that was running would
    never start here again, as it comes back under its own number.
    """
    return (
        "# Written by shoal; changes here are lost.\n"
        f"r! {SPOOL_DIRECTORY}/stepd.slurm.pmix.*\n"
        f"R! {SPOOL_DIRECTORY}/pmix.*\n"
        "R! /tmp/spmix_appdir_*\n"
    )


def _configless(cluster: Cluster, member: Member) -> list[Item]:
    options = " ".join(slurmd_options(cluster, member))
    items: list[Item] = [
        File(DEFAULTS, slurmd_defaults(options, cluster.conf), restarts=("slurmd",)),
        Directory("/etc/systemd/system/slurmd.service.d"),
        File(DROP_IN, slurmd_drop_in(), restarts=("slurmd",)),
        awaits_address(cluster, member, "slurmd"),
    ]
    if "controller" not in member.roles:
        # A file left here would be read by srun in place of the one slurmd fetched.
        items += [File(path, keep=True) for path in CONF_FILES]
    return items


def _has_nvidia(cluster: Cluster, member: Member) -> bool:
    fact = cluster.facts.get(member.name)
    return bool(fact and fact.gpus)
