"""The controller: slurmctld and the one copy of the configuration that all nodes fetch."""

from __future__ import annotations

from shoal.agent.document import Command, Directory, Document, File, Service
from shoal.roles.cluster import Cluster
from shoal.roles.in_force import CGROUP_CONF, GRES_CONF, JOB_SUBMIT, SLURM_CONF, TOPOLOGY_CONF
from shoal.roles.own_address import awaits_address
from shoal.slurm.accounting import jobcomp_rotation
from shoal.slurm.change_cost import change_cost
from shoal.slurm.conf import STATE_DIRECTORY, cgroup_conf, gres_conf, slurm_conf, topology_conf
from shoal.slurm.spanning import job_submit_lua

RECONFIGURE = "reconfigure"
ROTATION = "/etc/logrotate.d/shoal-jobcomp"

READ_CONF = ("env", "SLURM_CONF=/dev/stdin", "scontrol", "show", "hostnames", "x")
"""Reads the whole of a slurm.conf and talks to nobody. slurmctld itself has no such trial."""


def controller(cluster: Cluster) -> Document:
    """slurmctld with its configuration. A change that slurmctld can take while it runs costs no restart."""
    text = slurm_conf(cluster.conf)
    in_force = _slurm_conf_of(cluster)
    restart = in_force is None or change_cost(in_force, text) == "restart"
    restarts = ("slurmctld",) if restart else ()
    reloads = (f"command {RECONFIGURE}",)
    topology = topology_conf(cluster.conf) if cluster.conf.switches else None
    return (
        Directory("/etc/slurm"),
        Directory("/var/log/slurm", owner="slurm", group="slurm"),
        Directory(STATE_DIRECTORY, owner="slurm", group="slurm", mode=0o700),
        File(ROTATION, jobcomp_rotation()),
        File(CGROUP_CONF, cgroup_conf(cluster.conf), restarts=restarts, reloads=reloads, keep=True),
        File(GRES_CONF, gres_conf(cluster.conf), restarts=restarts, reloads=reloads, keep=True),
        File(TOPOLOGY_CONF, topology, restarts=restarts, reloads=reloads, keep=True),
        *([File(JOB_SUBMIT, job_submit_lua(cluster.conf), keep=True)] if topology and cluster.conf.spanning else ()),
        File(
            SLURM_CONF,
            text,
            restarts=restarts,
            reloads=reloads,
            keep=True,
            accepted_by=READ_CONF,
            advice=advice(cluster),
        ),
        awaits_address(cluster, cluster.controller, "slurmctld"),
        Service("slurmctld", command=("/usr/sbin/slurmctld", "-D")),
        # Nodes take the configuration from the controller; this pushes a new one to those that already run.
        Command(RECONFIGURE, ("scontrol", "reconfigure"), on_change=True, retries=15),
    )


def advice(cluster: Cluster) -> tuple[tuple[str, str], ...]:
    """What to correct in the spec when Slurm complains of a setting, by the setting's name and the plugin it names."""
    options = cluster.conf.options.items()
    words = [(key, key) for key, _ in options] + [(value, key) for key, value in options if "/" in value]
    return tuple((word, f"correct or delete slurm.options.{key} in the cluster's file") for word, key in words)


def _slurm_conf_of(cluster: Cluster) -> str | None:
    """The slurm.conf that the running slurmctld has read."""
    fact = cluster.facts.get(cluster.controller.name)
    return fact.files[SLURM_CONF].text if fact and SLURM_CONF in fact.files else None
