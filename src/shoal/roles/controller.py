"""The controller: slurmctld, the configuration that nodes fetch, and the service that resumes nodes which return."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import HEADER, Command, Directory, Document, File, Service, render_unit
from shoal.roles.cluster import Cluster
from shoal.roles.component import Component, FileQuery, Stage
from shoal.roles.current_conf import CGROUP_CONF, GRES_CONF, JOB_SUBMIT, SLURM_CONF, TOPOLOGY_CONF
from shoal.roles.host_address import address_wait_file
from shoal.slurm.accounting import jobcomp_rotation
from shoal.slurm.conf import (
    SLURMD_PORT,
    STATE_DIRECTORY,
    cgroup_conf,
    gres_conf,
    job_submit_lua,
    slurm_conf,
    topology_conf,
)
from shoal.slurm.parsed_conf import change_cost
from shoal.slurm.state import NOT_RESPONDING_REASON
from shoal.spec.member import Member

RECONFIGURE = "reconfigure"
ROTATION = "/etc/logrotate.d/shoal-jobcomp"

READ_CONF = ("env", "SLURM_CONF=/dev/stdin", "scontrol", "show", "hostnames", "x")
"""Parses a whole slurm.conf without a connection. slurmctld itself has no dry run."""


def controller(cluster: Cluster) -> Document:
    """slurmctld with its configuration. A change that slurmctld can apply while it runs needs no restart."""
    text = slurm_conf(cluster.conf)
    current = cluster.controller_facts.text(SLURM_CONF)
    restart = not current or change_cost(current, text) == "restart"
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
        address_wait_file(cluster, cluster.controller, "slurmctld"),
        Service("slurmctld", command=("/usr/sbin/slurmctld", "-D")),
        # Pushes a new configuration to the nodes that already run.
        Command(RECONFIGURE, ("scontrol", "reconfigure"), on_change=True, retries=15),
    )


def advice(cluster: Cluster) -> tuple[tuple[str, str], ...]:
    """The fix in the spec when Slurm rejects a setting, by the setting's name and the plugin in its value."""
    options = cluster.conf.options.items()
    words = [(key, key) for key, _ in options] + [(value, key) for key, value in options if "/" in value]
    return tuple((word, f"correct or delete slurm.options.{key} in the cluster's file") for word, key in words)


DIRECTORY = "/usr/local/lib/shoal"
PROGRAM = f"{DIRECTORY}/returning-nodes"
SERVICE = "shoal-returning-nodes"
UNIT = f"/etc/systemd/system/{SERVICE}.service"
CHECK_INTERVAL_S = 20


class NodeResumeComponent(Component):
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
    """The program: it checks the nodes periodically."""
    return f"#!/bin/bash\n{HEADER}{RESUME_FUNCTION}while sleep {CHECK_INTERVAL_S}; do\n    {RESUME_ALL}done\n"


RESUME_FUNCTION = rf"""
ask() {{
    [[ $1 =~ ^NodeName=([^ ]+).*\ NodeAddr=([^ ]+) ]] || return
    local node=${{BASH_REMATCH[1]}} address=${{BASH_REMATCH[2]}} port={SLURMD_PORT}
    [[ $1 =~ \ Port=([0-9]+) ]] && port=${{BASH_REMATCH[1]}}
    # slurmd hangs up on what is no message. For one that is stopped the kernel takes the call, and nobody hangs up.
    timeout 10 bash -c 'exec 3<> "/dev/tcp/$1/$2" && printf "\377\377\377\377" >&3 && {{ read -r -N 1 -u 3 || :; }}' \
        call "$address" "$port" 2> /dev/null || return
    echo "$node answers again"
    timeout 60 scontrol update nodename="$node" state=resume
}}
"""
"""Resumes a node, given by its line of `scontrol -o show nodes`, if its slurmd answers."""

RESUME_ALL = rf"""timeout 60 scontrol -o show nodes 2> /dev/null |
        grep ' State=DOWN+NOT_RESPONDING .* Reason={NOT_RESPONDING_REASON}' |
        {{ while read -r line; do ask "$line" & done; wait; }}
"""
"""Resumes all silent nodes that answer. Drained and rented nodes have more flags in their state, and are left alone."""


def unit() -> str:
    return render_unit(
        Unit={
            "Description": "Has Slurm ask nodes again that it has given up, once they are back",
            "After": "slurmctld.service",
            "StartLimitIntervalSec": 0,
        },
        Service={"ExecStart": PROGRAM, "Restart": "always", "RestartSec": 5},
        Install={"WantedBy": "multi-user.target"},
    )
