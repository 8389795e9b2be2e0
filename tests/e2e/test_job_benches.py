"""Benches that leave a cluster as it was, on the standing cluster `reef`."""

import pytest
from tests.e2e.bench_runs import ON_STANDING_CLUSTERS, run_small
from tests.e2e.standing import Standing

COVERS = "bench jobs health"
GROUP = "reef"
pytestmark = pytest.mark.sandbox


@pytest.mark.parametrize("name", ON_STANDING_CLUSTERS[GROUP])
def test_bench_passes_its_checks_on_a_standing_cluster(standing: Standing, name: str) -> None:
    run_small(name, standing=standing)
