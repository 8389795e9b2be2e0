"""Clocks that agree: munge rejects messages from a host whose clock is minutes off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.agent.document import HEADER, Directory, Document, File, Packages, Service, render_unit
from shoal.agent.facts import Facts
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member

CONF = "/etc/chrony/conf.d/shoal.conf"
DROP_IN = "/etc/systemd/system/chrony.service.d/shoal.conf"
CONTAINER_MARKS = ("/run/systemd/container", "/.dockerenv", "/run/.containerenv")
OTHER_DAEMONS = ("ntpsec", "ntp", "openntpd")
"""Time daemons that an administrator chose. systemd-timesyncd is not one of them: chrony's package replaces it."""


class ClockComponent(Component):
    """chrony on every host with its own clock."""

    files: Mapping[str, FileQuery] = {CONF: "hash", **dict.fromkeys(CONTAINER_MARKS, "there")}
    services = ("chrony", *OTHER_DAEMONS)

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        facts = cluster.facts[member.name]
        # A system with dnf runs chrony by itself, and has its files elsewhere.
        own = facts.package_manager == "dnf"
        if cluster.spec.time != "chrony" or own or is_container(facts) or other_daemon(facts):
            return {Stage.BASE: self.removal()} if facts.digest(CONF) else {}
        controller = cluster.addresses.get(cluster.controller.name, cluster.controller.name)
        serves = "controller" in member.roles
        text = serving_conf(controller, cluster.addresses.values()) if serves else following_conf(controller)
        # A container shares its machine's clock, and must not set it.
        drop_in = render_unit(Unit={"ConditionVirtualization": "!container"})
        return {
            Stage.BASE: (
                Packages(("chrony",)),
                Directory("/etc/chrony/conf.d"),
                File(CONF, text, restarts=("chrony",)),
                Directory("/etc/systemd/system/chrony.service.d"),
                File(DROP_IN, drop_in, restarts=("chrony",)),
                Service("chrony", command=("/usr/sbin/chronyd", "-d")),
            )
        }

    def removal(self) -> Document:
        """Removes our part of chrony's configuration; the package stays."""
        return (File(CONF, restarts=("chrony",)), File(DROP_IN, restarts=("chrony",)))

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        """Other time daemons. `plan/diff.py` checks the clocks themselves."""
        findings: list[Finding] = []
        for name, facts in cluster.facts.items():
            other = other_daemon(facts)
            if other and cluster.spec.time == "chrony" and not is_container(facts):
                what = f"{other} sets the clock; Shoal leaves it alone"
                findings.append(Finding("info", what, fix=f"remove {other} to use chrony", host=name))
        return tuple(findings)


def is_container(facts: Facts) -> bool:
    """Whether it shares the clock of its machine. A host without systemd counts as a container."""
    return facts.init == "none" or any(map(facts.has_file, CONTAINER_MARKS))


def other_daemon(facts: Facts) -> str:
    return next(filter(facts.is_active, OTHER_DAEMONS), "")


def serving_conf(address: str, members: Iterable[str]) -> str:
    """chrony's configuration on the controller: it serves members only, also without a time source of its own."""
    allow_lines = "".join(f"allow {member}\n" for member in sorted(set(members)) if member != address)
    return (
        f"{HEADER}"
        "# The cluster's clocks agree with each other even when nothing outside can be asked.\n"
        "local stratum 10\n"
        f"bindaddress {address}\n"
        f"{allow_lines}"
    )


def following_conf(controller: str) -> str:
    """chrony's configuration on another member: the controller, beside the sources the host has already."""
    return f"{HEADER}server {controller} iburst\n"
