"""Slurm's daemons listen at one address of their host, and wait for it: on a network of our own it comes late.

A daemon whose address is not there does not start (`Cannot assign requested address`). One that listens goes on when
the address goes and comes back; where the host gets another one, its unit names that, and so it is started again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.agent.document import File
from shoal.spec.member import Member

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

WAIT_SECONDS = 60
"""Less than systemd gives a service to start. Then it is tried again, for as long as it takes."""
DROP_INS = {name: f"/etc/systemd/system/{name}.service.d/shoal-address.conf" for name in ("slurmctld", "slurmd")}


def awaits_address(cluster: Cluster, member: Member, daemon: str) -> File:
    """What the unit of a daemon says of the address; nothing where it listens at all that its host has."""
    address = cluster.addresses.get(member.name) if cluster.conf.one_address else None
    return File(DROP_INS[daemon], drop_in(address) if address else None, restarts=(daemon,))


def drop_in(address: str) -> str:
    # The units that make such an address say that they come before Slurm's.
    there = f"ip -o address show to {address} | grep -q ."
    wait = f'timeout {WAIT_SECONDS} sh -c "until {there}; do sleep 0.2; done"'
    say = f'echo "{address}, where this daemon listens, is not an address of this host yet" >&2'
    return (
        "# Written by shoal; changes here are lost.\n"
        "[Unit]\n"
        "StartLimitIntervalSec=0\n"
        "\n"
        "[Service]\n"
        f"ExecStartPre=/bin/sh -c '{wait} || {{ {say}; exit 1; }}'\n"
        "Restart=on-failure\n"
        "RestartSec=3\n"
    )
