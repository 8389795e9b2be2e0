"""How jobs are tracked and confined. The settings are the whole cluster's, so the weakest host decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.agent.facts import Facts
from shoal.slurm.model import CgroupPlugin
from shoal.slurm.versions import Version, known_to_all


@dataclass(frozen=True)
class Confinement:
    tracked: bool
    """Slurm can keep a job's processes in a cgroup of their own."""
    devices: bool
    cores: bool
    memory: bool
    plugin: CgroupPlugin


def confinement(computes: Sequence[Facts], versions: Iterable[Version]) -> Confinement:
    """What the cgroups of these hosts allow.

    Without the memory controller a job's memory is scheduled and not held. Slurm could watch and kill instead, but it
    counts what processes share once for each of them, and would kill healthy jobs with many of those.
    """
    same = len({fact.cgroup.version for fact in computes}) == 1
    version = computes[0].cgroup.version if same else 0
    shared = set.intersection(*(set(fact.cgroup.writable) for fact in computes)) if same else set()
    if version == 2 and "cpuset" in shared:
        return Confinement(True, "devices" in shared, True, "memory" in shared, "autodetect")
    if version == 1 and "freezer" in shared:
        return Confinement(True, "devices" in shared, "cpuset" in shared, "memory" in shared, "autodetect")
    if version == 1:
        return Confinement(False, False, False, False, "autodetect")
    # Naming the old plugin keeps a slurmd that cannot do without one from looking for a file system that is not there.
    plugin: CgroupPlugin = "disabled" if known_to_all("cgroup_disabled", versions) else "cgroup/v1"
    return Confinement(False, False, False, False, plugin)


def no_stronger(found: Confinement, before: Confinement) -> Confinement:
    """What is found, but nothing that was not in force: a host that does not answer may be the one without cgroups."""
    if not found.tracked:
        return before if not before.tracked else found
    return Confinement(
        tracked=before.tracked,
        devices=found.devices and before.devices,
        cores=found.cores and before.cores,
        memory=found.memory and before.memory,
        plugin=before.plugin,
    )
