"""Benches that leave a cluster as it was, on the standing cluster `lagoon`."""

import pytest
from tests.e2e.bench_runs import ON_STANDING_CLUSTERS, PARTS, run_small
from tests.e2e.standing import Standing

COVERS = "bench containers network"
GROUP = "lagoon"
pytestmark = pytest.mark.sandbox


@pytest.mark.parametrize("name", ON_STANDING_CLUSTERS[GROUP])
def test_bench_passes_its_checks_on_a_standing_cluster(standing: Standing, name: str) -> None:
    run_small(name, *PARTS.get(name, ())[:1], standing=standing)
