"""The one table of Slurm's releases: what each of them knows, and which may talk to which.

Code asks this table (`release.knows("sackd")`, `can_talk(controller, node)`) and compares versions nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

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

Number = tuple[int, int]
"""A release as (year, month): 22.05 is (22, 5)."""

_FEATURES: dict[Feature, tuple[Number, Number | None]] = {
    # feature: (the first release that knows it, the first that does not any more)
    "supported": ((22, 5), None),  # the oldest that Shoal drives
    "cloud_reg_addrs": ((20, 11), (23, 11)),  # in SlurmctldParameters; 23.11 logs an error at the word
    "address_from_registration": ((23, 11), None),  # what cloud_reg_addrs asked for, always on
    "cloud_nodes_visible": ((23, 2), None),  # before that, sinfo hides them unless PrivateData=cloud
    "preempt_parameters": ((23, 2), None),  # the key PreemptParameters; before, a word of SlurmctldParameters
    "fanout_to_any_node": ((23, 11), None),  # before that, TreeWidth=65533 or addresses that do not resolve break it
    "prolog_shipped": ((23, 11), None),  # configless nodes get Prolog and Epilog too
    "reconfigure_adds_nodes": ((23, 11), None),  # before that, slurmctld must restart
    "sackd": ((23, 11), None),  # clients without a slurmd on a login host
    "auth_slurm": ((24, 5), None),  # auth/slurm with several keys, in slurm.jwks
    "cgroup_disabled": ((24, 5), None),  # CgroupPlugin=disabled
    "autodetect_nvidia": ((24, 11), None),  # gres.conf AutoDetect=nvidia
}

_OLDEST_SPOKEN: dict[Number, Number] = {
    # SLURM_MIN_PROTOCOL_VERSION of each release: the oldest it still understands
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
    ("debian", "12"): "22.05.8",
    ("debian", "13"): "24.11.5",
    ("debian", "sid"): "26.05.5",
    ("ubuntu", "22.04"): "21.08.5",
    ("ubuntu", "24.04"): "23.11.4",
    ("ubuntu", "26.04"): "25.11.2",
}

_VERSION = re.compile(r"(?:^|[\s:])(\d\d)\.(\d\d)(?:\.(\d+))?(?![\d.])")


@dataclass(frozen=True, order=True)
class Version:
    """A version of Slurm, 22.05.8."""

    major: int
    minor: int
    micro: int = 0

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read what `slurmd -V` prints (`slurm-wlm 24.11.5`) or a package's version (`22.05.8-4+deb12u3`)."""
        match = _VERSION.search(text)
        if match is None:
            raise ValueError(f"no Slurm version in {text[:80]!r}; expected text like 'slurm 22.05.8'")
        return cls(int(match[1]), int(match[2]), int(match[3] or 0))

    @property
    def release(self) -> Release:
        return Release(self.major, self.minor)

    def knows(self, feature: Feature) -> bool:
        return self.release.knows(feature)

    def __str__(self) -> str:
        return f"{self.release}.{self.micro}"


@dataclass(frozen=True, order=True)
class Release:
    """A release of Slurm, 22.05: all its versions speak the same protocol and know the same words."""

    major: int
    minor: int

    def knows(self, feature: Feature) -> bool:
        """Whether this release has a feature. A release newer than the table has what the newest in it has."""
        since, gone = _FEATURES[feature]
        return since <= (self.major, self.minor) and (gone is None or (self.major, self.minor) < gone)

    @property
    def oldest_spoken(self) -> Release:
        """The oldest release whose daemons and commands this one understands."""
        number = (self.major, self.minor)
        if number in _OLDEST_SPOKEN:
            return Release(*_OLDEST_SPOKEN[number])
        # Two releases a year, each speaking three back: the rule since 24.11.
        if number > max(_OLDEST_SPOKEN) and self.minor in (5, 11):
            half_years = 2 * self.major + (self.minor == 11) - 3
            return Release(half_years // 2, 11 if half_years % 2 else 5)
        return self

    def __str__(self) -> str:
        return f"{self.major}.{self.minor:02}"


def knows(version: Version, feature: Feature) -> bool:
    """Whether a version of Slurm has a feature."""
    return version.knows(feature)


def can_talk(controller: Version, node: Version) -> bool:
    """Whether a slurmctld takes a slurmd or a command of that version: never a newer one, nor one before its window."""
    return controller.release.oldest_spoken <= node.release <= controller.release


def packaged(os_id: str, os_version: str) -> Version | None:
    """The Slurm that a distribution carries; None where we do not know. Debian's sid has no version number."""
    if os_id == "debian" and os_version in ("", "unstable"):
        os_version = "sid"
    text = _PACKAGED.get((os_id, os_version))
    return Version.parse(text) if text else None


def lowest(versions: Iterable[Version]) -> Version:
    """The oldest of them. All members read one slurm.conf, so what the oldest does not know may not be in it."""
    return min(versions)


def known_to_all(feature: Feature, versions: Iterable[Version]) -> bool:
    """Whether every member's Slurm has a feature."""
    return all(version.knows(feature) for version in versions)


def window_findings(controller: tuple[str, Version], others: Mapping[str, Version]) -> list[Finding]:
    """Every host whose Slurm cannot be part of this cluster, each with the ways out."""
    name, version = controller
    everyone = {name: version, **others}
    way_out = _way_out(name, everyone)
    findings = [
        Finding(
            "error",
            what="Slurm before 22.05 is not supported",
            found=f"Slurm {found}",
            fix=f"upgrade the host to a distribution with a newer Slurm ({_carriers()}), or take it out of the spec",
            host=host,
        )
        for host, found in everyone.items()
        if not found.knows("supported")
    ]
    if not version.knows("supported"):
        return findings  # what could talk to such a controller is not the question yet
    window = _window(version.release)
    for host, found in others.items():
        if not found.knows("supported") or can_talk(version, found):
            continue
        newer = found.release > version.release
        findings.append(
            Finding(
                "error",
                what="Slurm newer than the controller's" if newer else "Slurm too old for the controller's",
                found=f"Slurm {found}; the controller {name} has {version} and talks to {window}",
                fix=f"{way_out}; or install Slurm {window} on {host}; or take {host} out of the spec",
                host=host,
            )
        )
    return findings


def _way_out(controller: str, everyone: Mapping[str, Version]) -> str:
    """The host that could be the controller of all of them, or what the controller would have to be."""
    for host, version in everyone.items():
        if host != controller and all(can_talk(version, other) for other in everyone.values()):
            return f"make {host} the controller (its Slurm {version} talks to every other host)"
    newest = max(version.release for version in everyone.values())
    if all(newest.oldest_spoken <= version.release for version in everyone.values()):
        return f"install Slurm {newest} on {controller}"
    return "bring all hosts to one release, as no Slurm talks to all of these"


def _window(release: Release) -> str:
    oldest = max(release.oldest_spoken, Release(*_FEATURES["supported"][0]))
    return f"{oldest} to {release}" if oldest != release else str(release)


def _carriers() -> str:
    carriers = [
        f"{os_id.capitalize()} {os_version} has {text}"
        for (os_id, os_version), text in _PACKAGED.items()
        if Version.parse(text).knows("supported") and os_version != "sid"
    ]
    return ", ".join(carriers)
