"""How tests run a bench: at its smallest size, where its own checks count and its times do not."""

import os
import subprocess
from pathlib import Path

from tests.documents import ROOT
from tests.e2e.standing import Standing

BENCHES = sorted(path.name for path in (ROOT / "bench").iterdir() if path.is_file() and os.access(path, os.X_OK))
ON_STANDING_CLUSTERS = {"reef": ("launch", "doctor"), "lagoon": ("containers", "network")}
"""By group. `converge` and `elastic` measure how hosts are built."""
PARTS = {"network": ("wireguard", "shares")}
"""The part of a bench that leaves a cluster as it was, and the other."""
BENCH_TIMEOUT_S = 1500


def run_small(name: str, *options: str | Path, standing: Standing | None = None) -> None:
    """Run a bench. It prints a table and saves none."""
    results, env = read_results(), None
    if standing is not None:
        options, env = (*options, "--on", standing.cluster.file, "--key", standing.keys / "ada"), standing.cluster.env
    bench = subprocess.run(
        [ROOT / "bench" / name, "--small", *options],
        capture_output=True, text=True, timeout=BENCH_TIMEOUT_S, check=False, env=env,
    )  # fmt: skip
    assert bench.returncode == 0, f"{bench.stdout[-4000:]}\n{bench.stderr[-8000:]}"
    assert bench.stdout.strip(), "the bench printed no table"
    assert read_results() == results


def read_results() -> dict[Path, str]:
    return {path: path.read_text() for path in (ROOT / "bench/results").iterdir()}
