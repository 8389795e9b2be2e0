"""Whether a build of torch runs on a driver: torch brings CUDA's libraries along, the driver must be new enough."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from shoal.hostlist import compress
from shoal.spec.finding import Finding

Fit = Literal["yes", "older", "no"]

# The first driver for Linux with which a release of CUDA works at all, and those that came with its minor releases.
# An older one of the same major release runs it, but cannot compile kernels for GPUs that torch has none for.
DRIVERS: Mapping[tuple[int, int], tuple[int, int]] = {
    (11, 0): (450, 80),
    (11, 1): (455, 23),
    (11, 2): (460, 27),
    (11, 3): (465, 19),
    (11, 4): (470, 42),
    (11, 5): (495, 29),
    (11, 6): (510, 39),
    (11, 7): (515, 43),
    (11, 8): (520, 61),
    (12, 0): (525, 60),
    (12, 1): (530, 30),
    (12, 2): (535, 54),
    (12, 3): (545, 23),
    (12, 4): (550, 54),
    (12, 5): (555, 42),
    (12, 6): (560, 28),
    (12, 8): (570, 26),
    (12, 9): (575, 51),
    (13, 0): (580, 65),
}


def fits(cuda: str, driver: str) -> Fit:
    """Whether libraries of this CUDA ("12.8") run on this driver ("535.183.01").

    `older`: they run, as the driver is of the same major release, but what needs its newest part does not. A release
    that the table does not know counts as the one before it.
    """
    wanted, found = _pair(cuda), _pair(driver)
    of_major = {release: least for release, least in DRIVERS.items() if release[0] == wanted[0]}
    if not of_major:
        # Older than the table: every driver serves. Newer: none that we know of does.
        newest = max(DRIVERS.values())
        return "yes" if wanted < min(DRIVERS) or (found > newest and found[0] >= newest[0] + 10) else "no"
    if found < min(of_major.values()):
        return "no"
    known = max((release for release in of_major if release <= wanted), default=min(of_major))
    return "yes" if found >= of_major[known] else "older"


def least_driver(cuda: str) -> str:
    """The oldest driver that runs this CUDA at all, as a person looks for one."""
    least = [driver for release, driver in DRIVERS.items() if release[0] == _pair(cuda)[0]]
    return f"{min(least)[0]}" if least else f"newer than {max(DRIVERS.values())[0]}"


def cuda_findings(name: str, torch: str, cuda: str | None, drivers: Mapping[str, str]) -> tuple[Finding, ...]:
    """What the nodes with GPUs (`drivers`, by host) make of an environment's torch. `cuda` is None of a CPU build."""
    if not drivers:
        return ()
    if cuda is None:
        what = f"environment {name}: torch {torch} is a build for CPUs, and nodes have GPUs"
        return (Finding("warning", what, compress(drivers), "name a build for CUDA"),)
    findings: list[Finding] = []
    for driver in sorted(set(drivers.values())):
        hosts = compress([host for host, found in drivers.items() if found == driver])
        fit = fits(cuda, driver)
        if fit == "no":
            all_of_them = set(drivers.values()) == {driver} or all(fits(cuda, d) == "no" for d in drivers.values())
            findings.append(
                Finding(
                    "error" if all_of_them else "warning",
                    f"environment {name}: torch {torch} is for CUDA {cuda}, which the driver is too old for",
                    f"driver {driver}",
                    f"install driver {least_driver(cuda)} or newer, or choose a torch for an older CUDA",
                    host=hosts,
                )
            )
        elif fit == "older":
            findings.append(
                Finding(
                    "info",
                    f"environment {name}: torch {torch} is for CUDA {cuda}, newer than the driver's own",
                    f"driver {driver}",
                    "it runs; a GPU that this torch has no kernels for needs a newer driver",
                    host=hosts,
                )
            )
    return tuple(findings)


def _pair(text: str) -> tuple[int, int]:
    numbers = [int(part) for part in text.split(".")[:2] if part.isdigit()]
    return (numbers[0], numbers[1] if len(numbers) > 1 else 0) if numbers else (0, 0)
