"""Clocks that agree: munge refuses what comes from a host whose clock is minutes off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.agent.document import Directory, Document, File, Item, Packages, Service
from shoal.agent.facts import Facts
from shoal.network.clocks import chrony_drop_in, following_conf, serving_conf
from shoal.roles.part import How, Part
from shoal.roles.stage import Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

CONF = "/etc/chrony/conf.d/shoal.conf"
DROP_IN = "/etc/systemd/system/chrony.service.d/shoal.conf"
CONTAINER_MARKS = ("/run/systemd/container", "/.dockerenv", "/run/.containerenv")
OTHERS = ("ntpsec", "ntp", "openntpd")
"""Time daemons that somebody chose. systemd-timesyncd is not among them: apt takes chrony in its place."""


class Time(Part):
    """chrony on every host that has a clock of its own."""

    files: Mapping[str, How] = {CONF: "hash", **dict.fromkeys(CONTAINER_MARKS, "there")}
    services = ("chrony", *OTHERS)

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        facts = cluster.facts[member.name]
        if not is_kept(cluster.spec, facts):
            return {Stage.BASE: without_ours()} if CONF in facts.files and facts.files[CONF].sha256 else {}
        controller = cluster.addresses.get(cluster.controller.name, cluster.controller.name)
        if "controller" in member.roles:
            text = serving_conf(controller, cluster.addresses.values())
        else:
            text = following_conf(controller)
        return {
            Stage.BASE: (
                Packages(("chrony",)),
                Directory("/etc/chrony/conf.d"),
                File(CONF, text, restarts=("chrony",)),
                Directory("/etc/systemd/system/chrony.service.d"),
                File(DROP_IN, chrony_drop_in(), restarts=("chrony",)),
                Service("chrony", command=("/usr/sbin/chronyd", "-d")),
            )
        }

    def farewell(self) -> Document:
        return without_ours()

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        """Time daemons that somebody chose. Clocks that differ are found for every cluster, by `plan/diff.py`."""
        found: list[Finding] = []
        for name, facts in cluster.facts.items():
            other = other_daemon(facts)
            if other and cluster.spec.time == "chrony" and not is_container(facts):
                what = f"{other} keeps the clock and is left alone"
                found.append(Finding("info", what, fix=f"remove {other} if chrony is to do it", host=name))
        return tuple(found)


def without_ours() -> tuple[Item, ...]:
    """Our part of chrony's configuration taken away; chrony itself stays, as packages do."""
    return (File(CONF, restarts=("chrony",)), File(DROP_IN, restarts=("chrony",)))


def is_kept(spec: Spec, facts: Facts) -> bool:
    """Whether chrony keeps this host's clock."""
    return spec.time == "chrony" and not is_container(facts) and not other_daemon(facts)


def is_container(facts: Facts) -> bool:
    """Whether its clock is that of the machine it runs on. A host without systemd is a container of some kind, too."""
    return facts.init == "none" or any(mark in facts.files and facts.files[mark].there for mark in CONTAINER_MARKS)


def other_daemon(facts: Facts) -> str:
    return next((name for name in OTHERS if facts.services.get(name) == "active"), "")
