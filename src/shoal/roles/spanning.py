"""Whether the controller can keep jobs on one site and yet let one span several that asks for it."""

from __future__ import annotations

from shoal.agent.facts import Facts
from shoal.slurm.spanning import PLUGIN
from shoal.slurm.versions import Version, packaged
from shoal.spec.model import Spec

DISTRIBUTIONS = (("debian", "12"), ("debian", "13"), ("debian", ""))
"""Whose slurmctld is known to bring the plugin with it. Debian's sid has no version number."""
ARCHITECTURES = ("x86_64", "aarch64")


def spanning_files() -> tuple[str, ...]:
    """The files whose presence tells whether a host has the plugin."""
    return tuple(_plugin(arch) for arch in ARCHITECTURES)


def can_span(spec: Spec, facts: Facts | None, version: Version | None) -> bool:
    """Whether slurmctld has the plugin, or will when it is installed, and the user has no other use for it."""
    if facts is None or version is None or any(key.lower() == "jobsubmitplugins" for key in spec.slurm.options):
        return False
    found = facts.files.get(_plugin(facts.arch))
    if found and found.there:
        return True
    package = facts.packages.get("slurmctld")
    ships = packaged(facts.os_id, facts.os_version)
    new = package is None or package.installed is None
    known = (facts.os_id, facts.os_version) in DISTRIBUTIONS
    return new and known and ships is not None and ships.release == version.release


def _plugin(arch: str) -> str:
    return f"/usr/lib/{arch}-linux-gnu/slurm-wlm/{PLUGIN}"
