"""The acceptance check of GPUs, with a simulated NVML and libcuda: what it finds, and when it runs."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests import nvml
from tests.support.cases import cases

from shoal.remote.node_health import gpu_checks, gpu_test
from shoal.remote.node_health.main import CHECKS, run_checks
from shoal.remote.node_health.node import Baseline, Node, Process


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    nvml.build_cuda(folder)
    return nvml.build(folder)


class NodeWithGpu:
    """A node whose memory and baseline stay from run to run."""

    def __init__(self, folder: Path) -> None:
        self.answers, self.boot = folder / "gpus", folder / "boot"
        self.memory: dict[str, Any] = {}
        self.baseline = Baseline({})
        self.boot.write_text("first\n")

    def run(
        self, *processes: str, gpu: dict[str, object] | None = None, check: str = "gpu-test", **faults: int
    ) -> dict[str, list[str]]:
        """What the check finds while these processes run there. Speeds of this machine vary, so none is compared."""
        lines = "".join(f"cuda.{name} {value}\n" for name, value in faults.items())
        self.answers.write_text(nvml.answers(gpu or {}) + lines)
        node = Node(self.baseline, self.memory, {}, time.time())
        node._processes = {pid: Process(pid, name, "S", 1, "1", 0) for pid, name in enumerate(processes, 50)}
        skip = {name for name in CHECKS if name not in ("gpu-test", check)}
        found = {finding["id"]: finding["evidence"] for finding in run_checks(node, skip, [])}
        assert "failures" not in self.memory
        self.memory = json.loads(json.dumps(self.memory))
        return found


@pytest.fixture
def node(libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeWithGpu:
    tested = NodeWithGpu(tmp_path)
    monkeypatch.setattr(gpu_checks, "LIBRARY", str(libraries))
    monkeypatch.setattr(gpu_test, "BOOT", str(tested.boot))
    monkeypatch.setattr(gpu_test, "TEST_TIMEOUT_S", 600)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries.parent))
    monkeypatch.setenv("SHOAL_FAKE_NVML", str(tested.answers))
    return tested


def test_gpu_that_is_well_passes_with_its_speeds(node: NodeWithGpu) -> None:
    assert node.run() == {}
    result = node.memory["gpu_tests"]["GPU-0"]
    speeds = {"memory GB/s", "copy to GPU GB/s", "copy to host GB/s", "product GFLOP/s"}
    assert {name for name in result if name.endswith("/s")} == speeds
    assert result["memory MB"] == 8 and "problem" not in result


@cases(
    "faults, problem",
    ({"init": 2}, "cuInit: CUDA_ERROR_OUT_OF_MEMORY"),
    ({"memory": 1}, "2 of 2097152 words of its memory changed"),
    ({"copy": 1}, "a copy came back changed"),
    ({"product": 1}, "a product is wrong"),
)
def test_gpu_that_fails_is_found_until_it_passes(node: NodeWithGpu, faults: dict[str, int], problem: str) -> None:
    expected = {"gpu-test": [f"GPU 0 (0000:41:00): {problem}"]}
    assert node.run(**faults) == expected
    assert node.run("slurmstepd") == expected, "a job keeps it from a new test"
    assert node.run() == {}


def test_gpu_that_hangs_holds_up_nothing(node: NodeWithGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_test, "TEST_TIMEOUT_S", 1)
    assert node.run(hang=1) == {"gpu-test": ["GPU 0 (0000:41:00): its test does not end within 1 s"]}


def test_each_boot_is_followed_by_one_test(node: NodeWithGpu) -> None:
    assert node.run() == node.run(product=1) == {}
    node.boot.write_text("second\n")
    assert [*node.run(product=1)] == ["gpu-test"]


@cases("processes, gpu", (("slurmstepd",), {}), (("python",), {"pid": 50}))
def test_gpu_in_use_is_not_tested(node: NodeWithGpu, processes: tuple[str, ...], gpu: dict[str, object]) -> None:
    assert node.run(*processes, gpu=gpu, product=1) == {} and node.memory["gpu_tests"] == {}


def test_driver_that_cannot_run_the_test_is_no_finding(node: NodeWithGpu) -> None:
    assert node.run(module=222) == {} and "cuModuleLoadData" in node.memory["gpu_tests"]["GPU-0"]["unsupported"]


def test_host_without_libcuda_is_no_finding(node: NodeWithGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert node.run() == {} and "libcuda.so.1" in node.memory["gpu_tests"]["GPU-0"]["unsupported"]


def test_speed_is_compared_with_the_best(node: NodeWithGpu) -> None:
    node.baseline.values["memory GB/s GPU-0"] = 1e6
    text = node.run(check="gpu-slow")["gpu-slow"][0]
    assert text.startswith("GPU 0 (0000:41:00): memory ") and text.endswith(" GB/s, before 1000000.0 GB/s")
