"""The one table of Slurm's releases: what each supports, and which are compatible.

Code asks it (`version.supports("sackd")`, `is_compatible(controller, node)`) and compares versions nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shoal.spec.finding import Finding

Feature = Literal[
    "address_from_registration",
    "auth_slurm",
    "autodetect_nvidia",
    "cgroup_disabled",
    "cloud_nodes_visible",
    "cloud_reg_addrs",
    "fanout_to_any_node",
    "preempt_parameters",
    "prolog_shipped",
    "reconfigure_adds_nodes",
    "sackd",
    "supported",
]


class SlurmRelease(NamedTuple):
    """A release of Slurm, 22.05: all its versions have the same protocol and settings."""

    major: int
    minor: int

    def supports(self, feature: Feature) -> bool:
        """Whether this release has a feature. A release newer than the table has what the newest entry has."""
        since, until = _FEATURES[feature]
        return since <= self and (until is None or self < until)

    @property
    def oldest_compatible(self) -> SlurmRelease:
        """The oldest release whose daemons and commands this one accepts."""
        if self in _OLDEST_COMPATIBLE:
            return SlurmRelease(*_OLDEST_COMPATIBLE[self])
        # Two releases a year, each compatible with three before it: the rule since 24.11.
        if self > max(_OLDEST_COMPATIBLE) and self.minor in (5, 11):
            half_years = 2 * self.major + (self.minor == 11) - 3
            return SlurmRelease(half_years // 2, 11 if half_years % 2 else 5)
        return self

    def __str__(self) -> str:
        return f"{self.major}.{self.minor:02}"


_FEATURES: dict[Feature, tuple[tuple[int, int], tuple[int, int] | None]] = {
    # feature: (the first release that supports it, the first that no longer does)
    "supported": ((22, 5), None),  # the oldest that Shoal drives
    "cloud_reg_addrs": ((20, 11), (23, 11)),  # in SlurmctldParameters; 23.11 logs an error
    "address_from_registration": ((23, 11), None),  # what cloud_reg_addrs asked for, always on
    "cloud_nodes_visible": ((23, 2), None),  # before that, sinfo hides them unless PrivateData=cloud
    "preempt_parameters": ((23, 2), None),  # the key PreemptParameters; before, a word of SlurmctldParameters
    "fanout_to_any_node": ((23, 11), None),  # before that, TreeWidth=65533, or unresolvable addresses break it
    "prolog_shipped": ((23, 11), None),  # configless nodes get Prolog and Epilog too
    "reconfigure_adds_nodes": ((23, 11), None),  # before that, slurmctld must restart
    "sackd": ((23, 11), None),  # clients without a slurmd on a login host
    "auth_slurm": ((24, 5), None),  # auth/slurm with several keys, in slurm.jwks
    "cgroup_disabled": ((24, 5), None),  # CgroupPlugin=disabled
    "autodetect_nvidia": ((24, 11), None),  # gres.conf AutoDetect=nvidia
}

_OLDEST_COMPATIBLE: dict[tuple[int, int], tuple[int, int]] = {
    # SLURM_MIN_PROTOCOL_VERSION of each release
    (20, 11): (19, 5),
    (21, 8): (20, 2),
    (22, 5): (20, 11),
    (23, 2): (21, 8),
    (23, 11): (22, 5),
    (24, 5): (23, 2),
    (24, 11): (23, 2),
    (25, 5): (23, 11),
    (25, 11): (24, 5),
    (26, 5): (24, 11),
}

_PACKAGED: dict[tuple[str, str], str] = {
    ("debian", "11"): "20.11.7",
    ("debian", "12"): "22.05.8",
    ("debian", "13"): "24.11.5",
    ("debian", "sid"): "26.05.5",
    ("ubuntu", "20.04"): "19.05.5",
    ("ubuntu", "22.04"): "21.08.5",
    ("ubuntu", "24.04"): "23.11.4",
    ("ubuntu", "26.04"): "25.11.2",
}

ONE_SLURM = "write `slurm: {from: shoal}` into the file, for the same Slurm on all hosts"
"""The fix for hosts whose packages cannot work together."""

_VERSION = re.compile(r"(?:^|[\s:])(\d\d)\.(\d\d)(?:\.(\d+))?(?![\d.])")


@dataclass(frozen=True, order=True)
class Version:
    """A version of Slurm, 22.05.8."""

    major: int
    minor: int
    micro: int = 0

    @classmethod
    def parse(cls, text: str) -> Version:
        """Parse the output of `slurmd -V` (`slurm-wlm 24.11.5`) or a package's version (`22.05.8-4+deb12u3`)."""
        match = _VERSION.search(text)
        if match is None:
            raise ValueError(f"no Slurm version in {text[:80]!r}; expected text like 'slurm 22.05.8'")
        return cls(int(match[1]), int(match[2]), int(match[3] or 0))

    @property
    def release(self) -> SlurmRelease:
        return SlurmRelease(self.major, self.minor)

    def supports(self, feature: Feature) -> bool:
        return self.release.supports(feature)

    def __str__(self) -> str:
        return f"{self.release}.{self.micro}"


def is_compatible(controller: Version, node: Version) -> bool:
    """Whether a slurmctld accepts a slurmd or a command of that version: never a newer one, nor one too old."""
    return controller.release.oldest_compatible <= node.release <= controller.release


def packaged_version(os_id: str, os_version: str) -> Version | None:
    """The Slurm version of a distribution; None where it is unknown. Debian's sid has no version number."""
    if os_id == "debian" and os_version in ("", "unstable"):
        os_version = "sid"
    text = _PACKAGED.get((os_id, os_version))
    return Version.parse(text) if text else None


def all_support(feature: Feature, versions: Iterable[Version]) -> bool:
    """Whether every member's Slurm has a feature."""
    return all(version.supports(feature) for version in versions)


def version_findings(controller: tuple[str, Version], others: Mapping[str, Version]) -> list[Finding]:
    """Every host whose Slurm cannot be part of this cluster, each with fixes."""
    name, version = controller
    everyone = {name: version, **others}
    fix = _controller_fix(name, everyone)
    upgrade = (
        f"{ONE_SLURM}; or upgrade the host to a distribution with a newer Slurm ({_packagers()}), "
        "or take it out of the spec"
    )
    findings = [
        Finding("error", "Slurm before 22.05 is not supported", f"Slurm {its_version}", upgrade, host=host)
        for host, its_version in everyone.items()
        if not its_version.supports("supported")
    ]
    if not version.supports("supported"):
        return findings  # compatibility with such a controller does not matter yet
    window = compatible_releases(version.release)
    for host, its_version in others.items():
        if not its_version.supports("supported") or is_compatible(version, its_version):
            continue
        newer = its_version.release > version.release
        what = "Slurm newer than the controller's" if newer else "Slurm too old for the controller's"
        evidence = f"Slurm {its_version}; the controller {name} has {version} and talks to {window}"
        its_fix = f"{ONE_SLURM}; or {fix}; or install Slurm {window} on {host}; or take {host} out of the spec"
        findings.append(Finding("error", what, evidence, its_fix, host=host))
    return findings


def _controller_fix(controller: str, everyone: Mapping[str, Version]) -> str:
    """A host that could be the controller of all, or the release that the controller needs."""
    for host, version in everyone.items():
        if host != controller and all(is_compatible(version, other) for other in everyone.values()):
            return f"make {host} the controller (its Slurm {version} talks to every other host)"
    newest = max(version.release for version in everyone.values())
    if all(newest.oldest_compatible <= version.release for version in everyone.values()):
        return f"install Slurm {newest} on {controller}"
    return "bring all hosts to one release, as no Slurm talks to all of these"


def compatible_releases(release: SlurmRelease) -> str:
    """The releases that a controller takes, as text: `22.05 to 23.11`."""
    oldest = max(release.oldest_compatible, SlurmRelease(*_FEATURES["supported"][0]))
    return f"{oldest} to {release}" if oldest != release else str(release)


def _packagers() -> str:
    return ", ".join(
        f"{os_id.capitalize()} {os_version} has {text}"
        for (os_id, os_version), text in _PACKAGED.items()
        if Version.parse(text).supports("supported") and os_version != "sid"
    )
