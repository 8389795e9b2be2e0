"""System metrics of a node, parsed from the text of the kernel and of nvidia-smi."""

import os
import time
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.train.tracking.spool import Spool, read_spool
from shoal.train.tracking.system_metrics import KernelCounters, SystemMetrics, gpus, memory, rates, read_counters

NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 9999999     100    0    0    0     0  0 0  9999999     100    0    0    0     0       0          0
  eth0: 1000000     100    0    0    0     0  0 0  2000000     100    0    0    0     0       0          0
   ib0:3000000     100    0    0    0     0  0 0  4000000     100    0    0    0     0       0          0
"""


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/stat").write_text("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3\n")
    (tmp_path / "proc/net/dev").write_text(NET)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1000000 kB\nMemFree: 1 kB\nMemAvailable:  250000 kB\n")
    return tmp_path / "proc"


def test_counters_exclude_loopback_and_idle_time(proc: Path, tmp_path: Path) -> None:
    assert read_counters(proc) == KernelCounters(busy=150, total=1000, received=4_000_000, sent=6_000_000)
    assert read_counters(tmp_path / "none") == KernelCounters(0, 0, 0, 0)


def test_cpu_rate_is_since_the_last_reading_and_network_since_the_first() -> None:
    first, before, now = (
        KernelCounters(0, 0, 0, 0),
        KernelCounters(50, 100, 5_000_000, 0),
        KernelCounters(75, 200, 9_000_000, 1_000_000),
    )
    assert rates(before, now, first) == {
        "cpu_utilization_percentage": 25.0,
        "network_receive_megabytes": 9.0,
        "network_transmit_megabytes": 1.0,
    }
    assert rates(now, now, first) == {}


def test_memory_usage_is_total_minus_available(proc: Path) -> None:
    assert memory((proc / "meminfo").read_text()) == {
        "system_memory_usage_megabytes": 768.0,
        "system_memory_usage_percentage": 75.0,
    }
    assert memory("") == {}


def test_gpu_values_that_are_unavailable_are_omitted() -> None:
    assert gpus("0, 87, 1000, 4000, 250.5\n1, [N/A], 2000, 4000, [N/A]\nNo devices were found\n") == {
        "gpu_0_utilization_percentage": 87.0,
        "gpu_0_memory_usage_megabytes": 1048.6,
        "gpu_0_memory_usage_percentage": 25.0,
        "gpu_0_power_usage_watts": 250.5,
        "gpu_1_memory_usage_megabytes": 2097.2,
        "gpu_1_memory_usage_percentage": 50.0,
    }


@cases(
    "script, tag",
    ("", "none: no nvidia-smi here"),
    ("#!/bin/sh\nexit 9\n", "nvidia-smi failed"),
    ("#!/bin/sh\necho 0,1,2,3,4\n", None),
)
def test_missing_gpu_metrics_are_explained(
    proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, tag: str | None
) -> None:
    (tmp_path / "bin").mkdir()
    if script:
        (tmp_path / "bin/nvidia-smi").write_text(script)
        (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin") if not script else f"{tmp_path}/bin:{os.environ['PATH']}")
    spool = Spool(tmp_path / "s")
    system = SystemMetrics(spool, "n1", 0.01, 7, proc)
    wanted = "metrics" if tag is None else "tags"
    while not (found := [record for _, record in read_spool(spool.path) if record and wanted in record]):
        time.sleep(0.01)
    system.stop()
    spool.close()
    if tag is None:
        assert found[0]["step"] == 7 and found[0]["metrics"]["system/n1/gpu_0_utilization_percentage"] == 1.0
    else:
        assert found[0]["tags"] == {"shoal.gpu_metrics.n1": tag}
