"""Optional plugins of Slurm: PMIx for MPI programs, and Lua for jobs that may span sites; and the file's `mpi`."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import Item, Link
from shoal.agent.facts import Facts
from shoal.roles.component import Component
from shoal.roles.slurm_tree import uses_tree
from shoal.slurm.conf import LUA_PLUGIN
from shoal.slurm.versions import Version, packaged_version
from shoal.spec.member import Member
from shoal.spec.model import Spec

MPI_PACKAGES = ("openmpi-bin", "hpcc", "libopenblas0-pthread", "fio")
"""Open MPI, and what `shoal validate` measures with. With the BLAS that hpcc's package depends on, HPL takes hours."""

LUA_DISTRIBUTIONS = (("debian", "12"), ("debian", "13"), ("debian", ""))
"""Distributions whose slurmctld includes the plugin. Debian's sid has no version number."""


PMIX_DISTRIBUTIONS = {("debian", "12"): ("libpmix.so", "libpmix2"), ("debian", "13"): ("libpmix.so.2", "")}
"""The library that Slurm's plugin loads, and its package; empty where Slurm's packages depend on it.

Debian 12's plugin loads a file name that only the development package has.
"""
ARCHITECTURES = ("x86_64", "aarch64")
INSTALLED_AS = "libpmix.so.2"
PMIX = "mpi_pmix.so"


class MpiComponent(Component):
    """The file's `mpi`: packages alone. Slurm's own part of it is on every host."""

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        return MPI_PACKAGES if spec.mpi is not None and "compute" in member.roles else ()


def pmix_files() -> tuple[str, ...]:
    """The files that a host with PMIx has."""
    names = sorted({library for library, _ in PMIX_DISTRIBUTIONS.values()})
    return tuple(path for arch in ARCHITECTURES for path in (_plugin(arch, PMIX), *(_library(arch, n) for n in names)))


def pmix_packages(facts: Facts) -> tuple[str, ...]:
    _, package = _pmix(facts)
    return (package,) if package else ()


def pmix_items(facts: Facts) -> list[Item]:
    """The library under the name that the plugin loads."""
    library, _ = _pmix(facts)
    return [Link(_library(facts.arch, library), INSTALLED_AS)] if library not in ("", INSTALLED_AS) else []


def all_have_pmix(
    facts: Mapping[str, Facts], versions: Mapping[str, Version], known: Mapping[str, str], before: bool
) -> bool:
    """Whether every member that answered has PMIx, or will have it once it is set up.

    srun waits without end for a node without PMIx, so it is the default only where every member has it. A host that
    already runs Slurm without it (`known`) must have it first: the package may fail to install.
    """
    return all(
        _has_pmix(fact) or (_will_have_pmix(fact, versions.get(name)) and (before or name not in known))
        for name, fact in facts.items()
    )


def _has_pmix(facts: Facts) -> bool:
    library, _ = _pmix(facts)
    return bool(library) and all(map(facts.has_file, (_plugin(facts.arch, PMIX), _library(facts.arch, library))))


def _will_have_pmix(facts: Facts, version: Version | None) -> bool:
    return _pmix(facts)[0] != "" and _is_packaged(facts, version)


def _is_packaged(facts: Facts, version: Version | None) -> bool:
    """Whether it is the version of the host's distribution, in which we know the plugins."""
    packaged = packaged_version(facts.os_id, facts.os_version)
    return version is not None and packaged is not None and version.release == packaged.release


def _pmix(facts: Facts) -> tuple[str, str]:
    """The library and its package; empty where the distribution has none."""
    pmix = PMIX_DISTRIBUTIONS.get((facts.os_id, facts.os_version)) if facts.arch in ARCHITECTURES else None
    return pmix or ("", "")


def _plugin(arch: str, name: str) -> str:
    return f"/usr/lib/{arch}-linux-gnu/slurm-wlm/{name}"


def _library(arch: str, name: str) -> str:
    return f"/usr/lib/{arch}-linux-gnu/pmix2/lib/{name}"


def spanning_files() -> tuple[str, ...]:
    """The files that a host with the Lua plugin has."""
    return tuple(_plugin(arch, LUA_PLUGIN) for arch in ARCHITECTURES)


def supports_spanning(spec: Spec, facts: Facts | None, version: Version | None) -> bool:
    """Whether slurmctld has the Lua plugin, or will have it, and the user does not use it otherwise."""
    if facts is None or version is None or any(key.lower() == "jobsubmitplugins" for key in spec.slurm.options):
        return False
    if uses_tree(spec):
        return True
    package = facts.packages.get("slurmctld")
    is_new = package is None or package.installed is None
    includes_it = (facts.os_id, facts.os_version) in LUA_DISTRIBUTIONS
    will_have = is_new and includes_it and _is_packaged(facts, version)
    return facts.has_file(_plugin(facts.arch, LUA_PLUGIN)) or will_have
