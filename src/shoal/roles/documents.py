"""From roles to documents: what one host is asked to be, in the order in which the cluster comes up."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Literal

from shoal.agent.document import Block, Document, File, Service
from shoal.roles.base import HOSTS_BLOCK, MUNGE_KEY, base, without_firewall
from shoal.roles.cluster import Cluster
from shoal.roles.compute import DEFAULTS, DROP_IN, compute, login
from shoal.roles.controller import CONF_FILES, controller
from shoal.spec.member import Member

FACT_SERVICES = ("munge", "slurmctld", "slurmd")
FACT_FILES: Mapping[str, Literal["hash", "text"]] = {MUNGE_KEY: "hash", **dict.fromkeys(CONF_FILES, "text")}


class Stage(IntEnum):
    """All hosts finish a stage before any begins the next: nodes take their configuration from a running controller."""

    BASE = 1
    CONTROLLER = 2
    NODES = 3


def documents(cluster: Cluster, member: Member) -> dict[Stage, Document]:
    """What the member should be, stage by stage."""
    stages: dict[Stage, Document] = {Stage.BASE: base(cluster, member)}
    if "controller" in member.roles:
        stages[Stage.CONTROLLER] = controller(cluster)
    if "compute" in member.roles:
        stages[Stage.NODES] = compute(cluster, member)
    if "login" in member.roles:
        stages[Stage.NODES] = login(cluster)
    return stages


def farewell() -> Document:
    """What a host is brought to when it leaves: nothing of ours runs or is configured; packages stay."""
    return (
        Service("slurmd", enabled=False, running=False),
        Service("slurmctld", enabled=False, running=False),
        *[File(path) for path in (*CONF_FILES, DEFAULTS, DROP_IN)],
        *without_firewall(),
        Service("munge", enabled=False, running=False),
        File(MUNGE_KEY),
        Block("/etc/hosts", HOSTS_BLOCK, ""),
    )
