"""Nodes that were away for long and are back: on the controller, a small program has Slurm ask them again.

Slurm gives a node up that it has not heard from for SlurmdTimeout: a laptop that slept, a site that was cut off. From
then on it leaves the node alone but for one question in twenty rounds, half an hour later; and a slurmd that went on
running all the while knows nothing of this and tells nobody that it is back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.agent.document import Directory, Document, File, Service
from shoal.roles.part import How, Part
from shoal.roles.stage import Stage
from shoal.slurm.conf import SLURMD_PORT
from shoal.slurm.state import SILENT_REASON
from shoal.spec.member import Member

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

DIRECTORY = "/usr/local/lib/shoal"
PROGRAM = f"{DIRECTORY}/returning-nodes"
SERVICE = "shoal-returning-nodes"
UNIT = f"/etc/systemd/system/{SERVICE}.service"
LOOK_SECONDS = 20
_HEAD = "# Written by shoal; changes here are lost.\n"


class ReturningNodes(Part):
    """Asks nodes again that Slurm has given up, once they answer."""

    files: Mapping[str, How] = {UNIT: "there"}
    services = (SERVICE,)

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if "controller" not in member.roles:
            was = cluster.facts[member.name].files.get(UNIT)
            return {Stage.SERVICES: self.farewell()} if was and was.there else {}
        return {
            Stage.NODES: (
                Directory(DIRECTORY),
                File(PROGRAM, program(), mode=0o755, restarts=(SERVICE,)),
                File(UNIT, unit(), restarts=(SERVICE,)),
                Service(SERVICE, command=(PROGRAM,)),
            )
        }

    def farewell(self) -> Document:
        return (Service(SERVICE, enabled=False, running=False), File(UNIT), File(PROGRAM))


def program() -> str:
    """Looks again and again."""
    return f"#!/bin/bash\n{_HEAD}{ASK}while sleep {LOOK_SECONDS}; do\n    {LOOK}done\n"


ASK = rf"""
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
"""Resumes a node, given by its line of `scontrol -o show nodes`, if its slurmd answers: Slurm then asks it at once."""

LOOK = rf"""timeout 60 scontrol -o show nodes 2> /dev/null |
        grep ' State=DOWN+NOT_RESPONDING .* Reason={SILENT_REASON}' |
        {{ while read -r line; do ask "$line" & done; wait; }}
"""
"""Asks all nodes that Slurm gave up. Drained and rented ones have further words in their state, and are left alone."""


def unit() -> str:
    return (
        f"{_HEAD}[Unit]\n"
        "Description=Has Slurm ask nodes again that it has given up, once they are back\n"
        "After=slurmctld.service\n"
        "StartLimitIntervalSec=0\n"
        "\n"
        "[Service]\n"
        f"ExecStart={PROGRAM}\n"
        "Restart=always\n"
        "RestartSec=5\n"
        "\n"
        "[Install]\n"
        "WantedBy=multi-user.target\n"
    )
