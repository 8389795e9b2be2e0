"""The controller: slurmctld, the configuration that nodes fetch, and the service that resumes nodes which return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal.agent.document import Command, Directory, Document, File, Service, daemon_unit
from shoal.remote import program_text, shell_command
from shoal.roles.component import PACKAGES_PREFIX, Cluster, Component, FileQuery, Stage
from shoal.roles.current_conf import CGROUP_CONF, GRES_CONF, JOB_SUBMIT, MPI_CONF, OCI_CONF, SLURM_CONF, TOPOLOGY_CONF
from shoal.roles.host_address import address_wait_file
from shoal.roles.host_record import state_of_other_cluster
from shoal.roles.slurm_source import release_mark, unreadable
from shoal.roles.slurm_tree import daemon
from shoal.slurm.accounting import jobcomp_rotation
from shoal.slurm.conf import (
    SLURMD_PORT,
    STATE_DIRECTORY,
    cgroup_conf,
    gres_conf,
    job_submit_lua,
    mpi_conf,
    oci_conf,
    slurm_conf,
    topology_conf,
)
from shoal.slurm.parsed_conf import change_cost, is_written_by_shoal
from shoal.slurm.state import NOT_RESPONDING_REASON
from shoal.spec.member import Member

RECONFIGURE = "reconfigure"
ROTATION = "/etc/logrotate.d/shoal-jobcomp"

READ_CONF = ("env", "SLURM_CONF=/dev/stdin", "scontrol", "show", "hostnames", "x")
"""Parses a whole slurm.conf without a connection. slurmctld itself has no dry run."""


def controller(cluster: Cluster) -> Document:
    """slurmctld with its configuration. A change that slurmctld can apply while it runs needs no restart."""
    current = cluster.controller_facts.text(SLURM_CONF)
    restart = not current or change_cost(current, slurm_conf(cluster.conf)) == "restart"
    restarts = ("slurmctld",) if restart else ()
    reloads = (f"command {RECONFIGURE}",)
    topology = topology_conf(cluster.conf) if cluster.conf.switches else None
    return (
        Directory("/etc/slurm"),
        Directory("/var/log/slurm", owner="slurm", group="slurm"),
        *_old_state(cluster),
        *release_mark(cluster, cluster.controller.name, "slurmctld"),
        Directory(STATE_DIRECTORY, owner="slurm", group="slurm", mode=0o700, writable=True),
        File(ROTATION, jobcomp_rotation()),
        File(CGROUP_CONF, cgroup_conf(cluster.conf), restarts=restarts, reloads=reloads, keep=True),
        File(GRES_CONF, gres_conf(cluster.conf), restarts=restarts, reloads=reloads, keep=True),
        File(TOPOLOGY_CONF, topology, restarts=restarts, reloads=reloads, keep=True),
        *_oci_file(cluster),
        *_mpi_file(cluster, reloads),
        *([File(JOB_SUBMIT, job_submit_lua(cluster.conf), keep=True)] if topology and cluster.conf.spanning else ()),
        replace(slurm_conf_file(cluster), restarts=restarts, reloads=reloads),
        address_wait_file(cluster, cluster.controller, "slurmctld"),
        *daemon(cluster, "slurmctld"),
        # Pushes a new configuration to the nodes that already run.
        Command(RECONFIGURE, ("scontrol", "reconfigure"), on_change=True, retries=15),
    )


def _oci_file(cluster: Cluster) -> Document:
    """oci.conf where the spec asks for containers, and its removal. One of the operator's own, in `files`, stays."""
    if OCI_CONF in cluster.spec.files:
        return ()
    if cluster.conf.oci:
        return (File(OCI_CONF, oci_conf(), restarts=("slurmctld",), keep=True),)
    is_ours = is_written_by_shoal(cluster.controller_facts.text(OCI_CONF))
    return (File(OCI_CONF, restarts=("slurmctld",)),) if is_ours else ()


def _mpi_file(cluster: Cluster, reloads: tuple[str, ...]) -> Document:
    """mpi.conf for Shoal's own Slurm. One of the operator's own, in `files`, stays."""
    if MPI_CONF in cluster.spec.files or cluster.slurm_prefix == PACKAGES_PREFIX:
        return ()
    return (File(MPI_CONF, mpi_conf(), reloads=reloads, keep=True),)


def _old_state(cluster: Cluster) -> Document:
    """Puts aside what another cluster left: slurmctld does not start with the state of another name."""
    if old := unreadable(cluster, cluster.controller.name, "slurmctld"):
        backup = f"{STATE_DIRECTORY}.slurm-{old.release}"
        move = 'systemctl stop slurmctld; [ ! -e "$1" ] || mv -T --backup=numbered "$1" "$2"'
        return (Command(f"keep the state of Slurm {old} as {backup}", shell_command(move, STATE_DIRECTORY, backup)),)
    name = state_of_other_cluster(cluster)
    if not name:
        return ()
    backup = f"{STATE_DIRECTORY}.{''.join(c if c.isalnum() else '-' for c in name)}"
    command = ("mv", "-T", "--backup=numbered", STATE_DIRECTORY, backup)
    return (Command(f"keep the state of cluster {name} as {backup}", command),)


def slurm_conf_file(cluster: Cluster) -> File:
    """slurm.conf of the controller and of login hosts, checked by Slurm before it is in place."""
    return File(SLURM_CONF, slurm_conf(cluster.conf), keep=True, accepted_by=READ_CONF, advice=advice(cluster))


def advice(cluster: Cluster) -> tuple[tuple[str, str], ...]:
    """The fix in the spec when Slurm rejects a setting, by the setting's name and the plugin in its value."""
    options = [(key, value, f"slurm.options.{key}") for key, value in cluster.conf.options.items()]
    options += [
        (key, value, f"partitions.{partition.name}.options.{key}")
        for partition in cluster.conf.partitions
        for key, value in partition.options.items()
    ]
    words = [(key, place) for key, _, place in options] + [
        (value, place) for _, value, place in options if "/" in value
    ]
    return tuple((text, f"correct or delete {place} in the cluster's file") for text, place in words)


DIRECTORY = "/usr/local/lib/shoal"
PROGRAM = f"{DIRECTORY}/returning-nodes"
SERVICE = "shoal-returning-nodes"
UNIT = f"/etc/systemd/system/{SERVICE}.service"
CHECK_INTERVAL_S = 20


class ReturnToServiceComponent(Component):
    """Resumes nodes that Slurm marked DOWN for silence, once they answer."""

    files: Mapping[str, FileQuery] = {UNIT: "there"}
    services = (SERVICE,)

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if "controller" not in member.roles:
            return {Stage.SERVICES: self.removal()} if cluster.facts[member.name].has_file(UNIT) else {}
        return {
            Stage.NODES: (
                Directory(DIRECTORY),
                File(PROGRAM, program(), mode=0o755, restarts=(SERVICE,)),
                File(UNIT, unit(), restarts=(SERVICE,)),
                Service(SERVICE, command=(PROGRAM,)),
            )
        }

    def removal(self) -> Document:
        return (Service(SERVICE, enabled=False, running=False), File(UNIT), File(PROGRAM))


def program() -> str:
    """The program: it checks the nodes periodically.

    Drained and rented nodes have more flags in their state, and are left alone.
    """
    words = {"PORT": SLURMD_PORT, "INTERVAL_S": CHECK_INTERVAL_S, "REASON": NOT_RESPONDING_REASON}
    return program_text("returning_nodes.sh", **words)


def unit() -> str:
    what = "Has Slurm ask nodes again that it has given up, once they are back"
    return daemon_unit(what, PROGRAM, 5, {"After": "slurmctld.service"})
