"""Faults of GPUs, through a simulated NVML and a kernel log: each is found, and a GPU that is well has none."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import nvml
from tests.support.cases import cases

from shoal.remote.node_health import gpu_checks, node
from shoal.remote.node_health.main import CHECKS, run_checks
from shoal.remote.node_health.node import CHECK_NAMES, DRAINING, Baseline, Node, Process

Examine = Callable[..., dict[str, list[str]]]


@pytest.fixture
def baseline() -> Baseline:
    return Baseline({})


@pytest.fixture
def examine(library: Path, baseline: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """The findings of a node with these GPUs. Its baseline and memory stay from call to call."""
    monkeypatch.setattr(gpu_checks, "LIBRARY", str(library))
    monkeypatch.setattr(node, "KERNEL_LOG", str(tmp_path / "kmsg"))
    monkeypatch.setenv("SHOAL_FAKE_NVML", str(tmp_path / "gpus"))

    memory: dict[str, Any] = {}

    def look(*gpus: dict[str, object], log: str = "", **driver: object) -> dict[str, list[str]]:
        (tmp_path / "gpus").write_text(nvml.answers(*gpus, **driver))
        (tmp_path / "kmsg").write_text(log)
        others = {name for name in CHECKS if not name.startswith("gpu-")} | {"gpu-test"}
        findings = run_checks(Node(baseline, memory, {}, time.time()), others, [])
        return {finding["id"]: finding["evidence"] for finding in findings}

    return look


def xid(number: int, age_s: float = 60.0) -> str:
    when = time.clock_gettime(time.CLOCK_BOOTTIME) - age_s
    return f"4,1234,{int(when * 1e6)},-;NVRM: Xid (PCI:0000:41:00): {number}, pid=7, name=python\n"


def test_names_of_checks_are_those_that_run() -> None:
    assert tuple(CHECKS) == CHECK_NAMES and {*DRAINING} < {*CHECK_NAMES}


def test_gpus_that_are_well_have_no_findings(examine: Examine) -> None:
    assert examine({}, {}) == examine({}, {}) == {}
    consumer = dict.fromkeys(("links", "ecc", "remap_pending", "remap_failed", "recovery", "throttle"))
    assert examine({"uuid": "GPU-0", **consumer}, {}) == {"gpu-nvlink": ["GPU 0 (0000:41:00): 0 NVLinks, before 18"]}


def test_host_without_a_driver_has_no_findings(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "LIBRARY", "/nonexistent/libnvidia-ml.so.1")
    assert examine() == {}


@cases(
    "check, change, evidence",
    ("gpu-recovery", {"recovery": 4}, "the driver asks to end its jobs, then reset the GPU"),
    ("gpu-recovery", {"recovery": 9}, "the driver asks to take action 9"),
    ("gpu-ecc", {"ecc": 2}, "2 errors that could not be corrected"),
    ("gpu-remap-pending", {"remap_pending": 1}, "bad memory is replaced at the next reset"),
    ("gpu-remap-pending", {"remap_pending": None, "retired": 1}, "pages are retired at the next reset"),
    ("gpu-remap-failed", {"remap_failed": 1}, "bad memory could not be replaced"),
    ("gpu-clock", {"throttle": 0x40}, "much too hot"),
    ("gpu-nvlink", {"links": 17}, "17 NVLinks, before 18"),
    ("gpu-pcie", {"width": 8}, "8 lanes, before 16"),
    ("gpu-persistence", {"persistence": 0}, "its persistence mode is off"),
)
def test_fault_of_a_gpu_is_found(examine: Examine, check: str, change: dict[str, object], evidence: str) -> None:
    assert examine({}, {}) == {}
    assert examine({}, change) == {check: [f"GPU 1 (0000:42:00): {evidence}"]}


def test_errors_of_nvlinks_are_found_when_they_rise(examine: Examine) -> None:
    assert examine({}) == examine({"link_errors": 107}) == {}
    assert examine({"link_errors": 208}) == {
        "gpu-nvlink-errors": ["GPU 0 (0000:41:00): NVLink 3: errors of flits rose by 101 to 208"]
    }
    assert examine({"link_errors": 208}) == {}


@cases("program, count", ("nv-fabricmanager", 0), ("python", 1))
def test_switches_without_their_manager_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, count: int
) -> None:
    monkeypatch.setattr(gpu_checks, "SWITCHES", f"{tmp_path}/*")
    (tmp_path / "0000:01:00.0").mkdir()
    at = Node(Baseline({}), {}, {}, time.time())
    at._processes = {7: Process(7, program[:15], "S", 1, "1", 0)}
    assert [*gpu_checks.check_fabric_manager(at)] == ["1 NVSwitches, and no nv-fabricmanager"] * count


def test_clocks_of_an_idle_gpu_and_its_power_cap_are_normal(examine: Examine) -> None:
    assert examine({"throttle": 0x1 | 0x4}) == {}


def test_gpu_that_is_gone_is_found_by_the_baseline(examine: Examine) -> None:
    examine({}, {})
    assert examine({}) == {"gpu-lost": ["GPU-1 is gone"]}
    assert examine({}, {"status": 15}) == {"gpu-lost": ["GPU-1 is gone", "GPU 1 is lost"]}


def test_library_of_another_release_is_found(examine: Examine) -> None:
    assert examine({}, init=18) == {"gpu-driver-mismatch": ["Driver/library version mismatch"]}


@cases("number, words", (79, "fell off the bus: reboot"), (119, "has stopped: reset"), (54, "cable"))
def test_xid_that_needs_an_action_is_found(examine: Examine, number: int, words: str) -> None:
    [text] = examine({"recovery": None}, log=xid(number))["gpu-xid"]
    assert text.startswith(f"0000:41:00: XID {number}, ") and words in text and "pid=7" in text
    assert examine({"recovery": None}, log=xid(number, age_s=3 * 3600)) == {}


@cases("number", 13, 31, 43, 45, 63, 94)
def test_xid_of_a_program_is_no_finding(examine: Examine, number: int) -> None:
    assert examine({"recovery": None}, log=xid(number)) == {}


def test_driver_that_asks_for_nothing_settles_an_xid(examine: Examine) -> None:
    assert [*examine({"recovery": 0}, log=xid(119))] == ["gpu-xid-past"]


def test_processes_and_power_of_a_gpu_are_read(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_FAKE_NVML", str(tmp_path / "gpus"))
    (tmp_path / "gpus").write_text(nvml.answers({"pid": 77, "power": 71500}, {}))
    first, second = gpu_checks.Nvml(str(library)).gpus()
    assert (first.pids, first.watts, second.pids) == ([77], 71.5, [])
