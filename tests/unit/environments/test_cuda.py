"""A torch built for one version of CUDA on a driver for another."""

from tests.support.cases import cases

from shoal.environments.cuda import DRIVERS, check_driver, cuda_findings, oldest_driver


@cases(
    "cuda, driver, fit",
    ("12.8", "570.26", "yes"),
    ("12.8", "580.95.05", "yes"),
    ("12.8", "535.183.01", "older"),
    ("12.8", "525.60.13", "older"),
    ("12.8", "520.61.05", "no"),
    ("12.7", "565.57.01", "yes"),
    ("13.0", "580.65.06", "yes"),
    ("13.0", "575.57.08", "no"),
    ("13.2", "580.65.06", "yes"),
    ("11.8", "450.80.02", "older"),
    ("11.8", "450.36.06", "no"),
    ("10.2", "418.87", "yes"),
    ("14.0", "580.95.05", "no"),
    ("14.0", "640.10", "yes"),
)
def test_driver_supports_its_major_cuda_release(cuda: str, driver: str, fit: str) -> None:
    assert check_driver(cuda, driver) == fit


def test_oldest_driver_is_named_by_its_branch_and_newer_cuda_never_needs_an_older_one() -> None:
    assert (oldest_driver("12.8"), oldest_driver("13.0"), oldest_driver("15.1")) == ("525", "580", "newer than 580")
    assert [DRIVERS[release] for release in sorted(DRIVERS)] == sorted(DRIVERS.values())


def test_driver_that_is_too_old_is_reported_with_the_fix() -> None:
    [finding] = cuda_findings("torch", "2.13.0", "13.0", {"n1": "535.54", "n2": "535.54"})
    assert str(finding) == (
        "n[1-2]: environment torch: the driver is too old for torch 2.13.0, built for CUDA 13.0, "
        "found driver 535.54, install driver 580 or newer, or choose a torch for an older CUDA"
    )
    assert finding.level == "error"
    [finding] = cuda_findings("torch", "2.13.0", "13.0", {"n1": "535.54", "n2": "580.95"})
    assert (finding.level, finding.host) == ("warning", "n1"), "the other node can run it"
    [finding] = cuda_findings("torch", "2.9.0", "12.8", {"n1": "535.54"})
    assert finding.level == "info" and "newer than the driver's own" in finding.what


def test_cpu_build_is_a_warning_only_on_nodes_with_gpus() -> None:
    [finding] = cuda_findings("torch", "2.13.0+cpu", None, {"n1": "580.95"})
    assert finding.level == "warning" and "a CPU build" in finding.what
    assert cuda_findings("torch", "2.13.0+cpu", None, {}) == ()
    assert cuda_findings("torch", "2.13.0", "13.0", {"n1": "580.95"}) == ()
