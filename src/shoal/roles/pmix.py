"""PMIx, by which MPI programs find their peers under srun.

srun waits without end for a node that lacks it, so it is the default only where every member has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.agent.document import Item, Link
from shoal.agent.facts import Facts
from shoal.slurm.versions import Version, packaged


@dataclass(frozen=True)
class Packaged:
    """How a distribution brings the library that Slurm's plugin loads."""

    library: str
    """The name under which the plugin looks for it."""
    package: str = ""
    """What has to be installed beside Slurm; empty where Slurm's packages bring it."""


# Debian 12's plugin asks for the library by the name that only the headers' package has.
DISTRIBUTIONS = {
    ("debian", "12"): Packaged("libpmix.so", package="libpmix2"),
    ("debian", "13"): Packaged("libpmix.so.2"),
}
ARCHITECTURES = ("x86_64", "aarch64")
INSTALLED_AS = "libpmix.so.2"


def pmix_files() -> tuple[str, ...]:
    """The files whose presence tells whether a host has PMIx."""
    names = {how.library for how in DISTRIBUTIONS.values()}
    return tuple(
        path for arch in ARCHITECTURES for path in (_plugin(arch), *(_library(arch, name) for name in sorted(names)))
    )


def pmix_packages(facts: Facts) -> tuple[str, ...]:
    how = _how(facts)
    return (how.package,) if how and how.package else ()


def pmix_items(facts: Facts) -> list[Item]:
    """The library under the name that the plugin asks for."""
    how = _how(facts)
    if how is None or how.library == INSTALLED_AS:
        return []
    return [Link(_library(facts.arch, how.library), INSTALLED_AS)]


def all_have_pmix(
    facts: Mapping[str, Facts], versions: Mapping[str, Version], known: Mapping[str, str], before: bool
) -> bool:
    """Whether every member that answered has PMIx, or will when it is set up.

    A host that already runs Slurm without it (`known`) must be seen to have it first: the package may fail to install.
    """
    return all(
        _has(fact) or (_will_have(fact, versions.get(name)) and (before or name not in known))
        for name, fact in facts.items()
    )


def _has(facts: Facts) -> bool:
    how = _how(facts)
    paths = [_plugin(facts.arch), _library(facts.arch, how.library)] if how else []
    return bool(paths) and all(path in facts.files and facts.files[path].there for path in paths)


def _will_have(facts: Facts, version: Version | None) -> bool:
    ships = packaged(facts.os_id, facts.os_version)
    return _how(facts) is not None and version is not None and ships is not None and version.release == ships.release


def _how(facts: Facts) -> Packaged | None:
    return DISTRIBUTIONS.get((facts.os_id, facts.os_version)) if facts.arch in ARCHITECTURES else None


def _plugin(arch: str) -> str:
    return f"/usr/lib/{arch}-linux-gnu/slurm-wlm/mpi_pmix.so"


def _library(arch: str, name: str) -> str:
    return f"/usr/lib/{arch}-linux-gnu/pmix2/lib/{name}"
