"""NVIDIA's driver, where the file says `driver: nvidia`: its packages. The health program plans the reboot."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import Command, Document, Packages
from shoal.agent.facts import Facts
from shoal.remote import python_command
from shoal.remote.driver_sources import COMPONENTS
from shoal.remote.node_health.gpu_driver import driver_packages
from shoal.roles.component import Cluster, Component, Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member


class GpuDriverComponent(Component):
    """The driver's packages on hosts with an NVIDIA GPU that no driver drives."""

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        facts = cluster.facts[member.name]
        names = packages_for(facts)
        if member.driver != "nvidia" or not facts.pci_gpus or facts.gpus or not names:
            return {}
        fix = f"enable {COMPONENTS} in its package sources, or install the driver by hand"
        known = ("sh", "-c", 'apt-cache show "$@" > /dev/null 2>&1', "sh", *names)
        sources = Command("add NVIDIA's package sources", python_command("driver_sources"), unless=known, fix=fix)
        return {Stage.BASE: (*((sources,) if facts.os_id == "debian" else ()), Packages(names, fix=fix))}

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        """Devices without a driver: what `up` does about them, or what to write in the file."""
        if "gpu-driver" in cluster.spec.health.skip:
            return ()
        nodes = (member for member in cluster.members if "compute" in member.roles)
        # A sandbox host shows the devices of its machine.
        own = ((member, cluster.facts_of(member.name)) for member in nodes if member.driver or not member.provider)
        return tuple(_finding(member, facts, cluster.spec.health.mode) for member, facts in own if facts.pci_gpus)


def packages_for(facts: Facts) -> tuple[str, ...]:
    if facts.package_manager != "apt" or facts.init != "systemd":
        return ()
    return tuple(driver_packages(facts.os_id, facts.os_version, facts.arch))


def driver_keys(facts: Facts) -> tuple[str, ...]:
    """The items whose change ends in a reboot of the node."""
    names = packages_for(facts)
    return (Packages(names).key,) if names else ()


def _finding(member: Member, facts: Facts, mode: str) -> Finding:
    what, names = "an NVIDIA GPU without a driver that works: Slurm does not count it", packages_for(facts)
    found = ", ".join(facts.pci_gpus)
    if not names:
        fix = f"install the driver by hand: its packages on {facts.os_id} {facts.os_version} are not known to Shoal"
        return Finding("warning", what, found, fix, host=member.name)
    if member.driver != "nvidia":
        place = "the controller" if member.nodeset == "controller" else f"nodeset {member.nodeset}"
        fix = f"write `driver: nvidia` in {place}: `shoal up` then installs {' '.join(names)}"
        return Finding("warning", what, found, fix, host=member.name)
    then = "reboot it when its jobs have ended" if mode == "off" else "the node is drained, and reboots when it is idle"
    fix = f"`shoal up` installs the driver; then {then}; after that, `shoal up` adds its GPUs"
    return Finding("info", what, found, fix, host=member.name)
