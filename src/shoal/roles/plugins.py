"""Optional plugins of Slurm: PMIx for MPI programs, and Lua for jobs that may span sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.agent.document import Item, Link
from shoal.agent.facts import Facts
from shoal.slurm.conf import LUA_PLUGIN
from shoal.slurm.versions import Version, packaged_version
from shoal.spec.model import Spec

LUA_DISTRIBUTIONS = (("debian", "12"), ("debian", "13"), ("debian", ""))
"""Distributions whose slurmctld includes the plugin. Debian's sid has no version number."""


@dataclass(frozen=True)
class PmixPackage:
    """How a distribution packages the library that Slurm's plugin loads."""

    library: str
    """The file name that the plugin loads."""
    package: str = ""
    """The package to install beside Slurm; empty where Slurm's packages depend on it."""


# Debian 12's plugin loads a file name that only the development package has.
PMIX_DISTRIBUTIONS = {
    ("debian", "12"): PmixPackage("libpmix.so", package="libpmix2"),
    ("debian", "13"): PmixPackage("libpmix.so.2"),
}
ARCHITECTURES = ("x86_64", "aarch64")
INSTALLED_AS = "libpmix.so.2"


def pmix_files() -> tuple[str, ...]:
    """The files that a host with PMIx has."""
    names = {how.library for how in PMIX_DISTRIBUTIONS.values()}
    return tuple(
        path
        for arch in ARCHITECTURES
        for path in (_pmix_plugin(arch), *(_library(arch, name) for name in sorted(names)))
    )


def pmix_packages(facts: Facts) -> tuple[str, ...]:
    how = _pmix_package(facts)
    return (how.package,) if how and how.package else ()


def pmix_items(facts: Facts) -> list[Item]:
    """The library under the name that the plugin loads."""
    how = _pmix_package(facts)
    if how is None or how.library == INSTALLED_AS:
        return []
    return [Link(_library(facts.arch, how.library), INSTALLED_AS)]


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
    how = _pmix_package(facts)
    paths = [_pmix_plugin(facts.arch), _library(facts.arch, how.library)] if how else []
    return bool(paths) and all(map(facts.has_file, paths))


def _will_have_pmix(facts: Facts, version: Version | None) -> bool:
    ships = packaged_version(facts.os_id, facts.os_version)
    return (
        _pmix_package(facts) is not None
        and version is not None
        and ships is not None
        and version.release == ships.release
    )


def _pmix_package(facts: Facts) -> PmixPackage | None:
    return PMIX_DISTRIBUTIONS.get((facts.os_id, facts.os_version)) if facts.arch in ARCHITECTURES else None


def _pmix_plugin(arch: str) -> str:
    return f"/usr/lib/{arch}-linux-gnu/slurm-wlm/mpi_pmix.so"


def _library(arch: str, name: str) -> str:
    return f"/usr/lib/{arch}-linux-gnu/pmix2/lib/{name}"


def spanning_files() -> tuple[str, ...]:
    """The files that a host with the Lua plugin has."""
    return tuple(_lua_plugin(arch) for arch in ARCHITECTURES)


def supports_spanning(spec: Spec, facts: Facts | None, version: Version | None) -> bool:
    """Whether slurmctld has the Lua plugin, or will have it, and the user does not use it otherwise."""
    if facts is None or version is None or any(key.lower() == "jobsubmitplugins" for key in spec.slurm.options):
        return False
    if facts.has_file(_lua_plugin(facts.arch)):
        return True
    package = facts.packages.get("slurmctld")
    ships = packaged_version(facts.os_id, facts.os_version)
    is_new = package is None or package.installed is None
    includes_it = (facts.os_id, facts.os_version) in LUA_DISTRIBUTIONS
    return is_new and includes_it and ships is not None and ships.release == version.release


def _lua_plugin(arch: str) -> str:
    return f"/usr/lib/{arch}-linux-gnu/slurm-wlm/{LUA_PLUGIN}"
