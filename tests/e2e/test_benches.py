"""Every bench runs at its smallest size: its own checks pass, and it writes no result.

Those that leave a cluster as it was are in test_job_benches.py and test_image_benches.py, on standing clusters.
"""

import pytest
from tests.documents import ROOT
from tests.e2e.bench_runs import BENCHES, ON_STANDING_CLUSTERS, PARTS, run_small

COVERS = "bench"
pytestmark = pytest.mark.sandbox

ELSEWHERE = {name for names in ON_STANDING_CLUSTERS.values() for name in names}
WITHOUT_PEERS = {"converge": "--no-peers", "elastic": "--no-peer"}
"""Ansible, pyinfra and ParallelCluster take most of the time and say nothing about Shoal."""


@pytest.mark.parametrize("name", [name for name in BENCHES if name not in ELSEWHERE])
def test_bench_passes_its_checks_at_the_smallest_size(name: str) -> None:
    run_small(name, *([WITHOUT_PEERS[name]] if name in WITHOUT_PEERS else []))


@pytest.mark.parametrize("name", PARTS)
def test_other_part_of_a_bench_passes_its_checks(name: str) -> None:
    run_small(name, PARTS[name][1])


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_bench_passes_its_checks_on_a_cluster_of_its_own(name: str) -> None:
    run_small(name)


@pytest.mark.matrix
@pytest.mark.parametrize("name", WITHOUT_PEERS)
def test_bench_passes_its_checks_with_its_peers(name: str) -> None:
    run_small(name)


def test_every_bench_is_documented() -> None:
    text = (ROOT / "bench/README.md").read_text()
    assert BENCHES and not [name for name in BENCHES if f"`bench/{name}`" not in text]
