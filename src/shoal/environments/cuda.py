"""Whether a build of torch runs on a driver: torch contains CUDA's libraries, and the driver must support them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from shoal.hostlist import compress
from shoal.remote.runner.driver_files import is_met
from shoal.spec.finding import Finding

DriverSupport = Literal["yes", "older", "no"]

# The first Linux driver that supports a major release of CUDA, and the driver of each minor release.
# An older driver of the same major release runs it, but cannot compile kernels for GPUs that torch has none for.
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


def check_driver(cuda: str, driver: str) -> DriverSupport:
    """Whether libraries of this CUDA ("12.8") run on this driver ("535.183.01").

    `older`: they run, as the driver is of the same major release, but features of the newer minor release do not.
    A release that is not in the table counts as the one before it.
    """
    needed, installed = _pair(cuda), _pair(driver)
    of_major = {release: least for release, least in DRIVERS.items() if release[0] == needed[0]}
    if not of_major:
        # CUDA older than the table: every driver supports it. Newer: no known driver does.
        newest = max(DRIVERS.values())
        return "yes" if needed < min(DRIVERS) or (installed > newest and installed[0] >= newest[0] + 10) else "no"
    if installed < min(of_major.values()):
        return "no"
    nearest = max((release for release in of_major if release <= needed), default=min(of_major))
    return "yes" if installed >= of_major[nearest] else "older"


def newest_cuda(driver: str) -> str:
    """The newest CUDA that this driver knows: "12.8". Empty for a driver that is newer than the table, or not known."""
    installed = _pair(driver)
    releases = [release for release, least in DRIVERS.items() if least <= installed]
    if not releases or installed[0] > max(DRIVERS.values())[0]:
        return ""
    return "{}.{}".format(*max(releases))


def is_driver_fit(needed: str, driver: str) -> bool:
    """Whether a driver has what an image needs, in the words of NVIDIA's images: "cuda>=12.4 driver>=470,driver<471".

    One that is newer than the table is, and one that is not known: the node looks again.
    """
    cuda = newest_cuda(driver)
    return not needed or not cuda or is_met(needed, {"driver": driver, "cuda": cuda})


def oldest_driver(cuda: str) -> str:
    """The oldest driver that runs this CUDA."""
    least = [driver for release, driver in DRIVERS.items() if release[0] == _pair(cuda)[0]]
    return f"{min(least)[0]}" if least else f"newer than {max(DRIVERS.values())[0]}"


def cuda_findings(name: str, torch: str, cuda: str | None, drivers: Mapping[str, str]) -> tuple[Finding, ...]:
    """Findings on an environment's torch and the nodes' drivers, given by host. `cuda` is None for a CPU build."""
    if not drivers:
        return ()
    if cuda is None:
        what = f"environment {name}: torch {torch} is a CPU build, and nodes have GPUs"
        return (Finding("warning", what, compress(drivers), "choose a build for CUDA"),)
    support = {driver: check_driver(cuda, driver) for driver in sorted(set(drivers.values()))}
    findings: list[Finding] = []
    for driver, fit in support.items():
        level: Literal["error", "warning", "info"]
        if fit == "no":
            level = "error" if set(support.values()) == {"no"} else "warning"
            what = f"the driver is too old for torch {torch}, built for CUDA {cuda}"
            fix = f"install driver {oldest_driver(cuda)} or newer, or choose a torch for an older CUDA"
        elif fit == "older":
            level, what = "info", f"torch {torch} is for CUDA {cuda}, newer than the driver's own"
            fix = "it runs; a GPU that this torch has no kernels for needs a newer driver"
        else:
            continue
        hosts = compress([host for host, version in drivers.items() if version == driver])
        findings.append(Finding(level, f"environment {name}: {what}", f"driver {driver}", fix, host=hosts))
    return tuple(findings)


def _pair(text: str) -> tuple[int, int]:
    numbers = [int(part) for part in text.split(".")[:2] if part.isdigit()]
    return (numbers[0], numbers[1] if len(numbers) > 1 else 0) if numbers else (0, 0)
