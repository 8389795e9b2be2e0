"""Every bench runs at its smallest size: its own checks pass, and it writes no result."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.documents import ROOT

COVERS = "bench"
pytestmark = pytest.mark.sandbox

BENCHES = sorted(path.name for path in (ROOT / "bench").iterdir() if path.is_file() and os.access(path, os.X_OK))
BENCH_TIMEOUT_S = 1500
WITHOUT_PEERS = {"converge": "--no-peers", "elastic": "--no-peer"}
"""Ansible, pyinfra and ParallelCluster take most of the time and say nothing about Shoal."""


@pytest.mark.parametrize("name", BENCHES)
def test_bench_passes_its_checks_at_the_smallest_size(name: str) -> None:
    run_small(name, *([WITHOUT_PEERS[name]] if name in WITHOUT_PEERS else []))


@pytest.mark.matrix
@pytest.mark.parametrize("name", WITHOUT_PEERS)
def test_bench_passes_its_checks_with_its_peers(name: str) -> None:
    run_small(name)


def run_small(name: str, *options: str) -> None:
    """Run a bench at its smallest size. It prints a table and saves none."""
    results = read_results()
    bench = subprocess.run(
        [ROOT / "bench" / name, "--small", *options],
        capture_output=True, text=True, timeout=BENCH_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert bench.returncode == 0, f"{bench.stdout[-4000:]}\n{bench.stderr[-8000:]}"
    assert bench.stdout.strip(), "the bench printed no table"
    assert read_results() == results


def test_every_bench_is_documented() -> None:
    text = (ROOT / "bench/README.md").read_text()
    assert BENCHES and not [name for name in BENCHES if f"`bench/{name}`" not in text]


def read_results() -> dict[Path, str]:
    return {path: path.read_text() for path in (ROOT / "bench/results").iterdir()}
