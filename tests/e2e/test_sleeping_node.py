"""A node that sleeps for longer than SlurmdTimeout takes jobs again soon after it wakes, without help."""

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import Cluster, running

COVERS = "roles/controller remote/returning_nodes.sh"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]

SPEC = """\
cluster: sleeping
controller: {provider: sandbox, memory: 768M}
nodesets:
  fish: {provider: sandbox, count: 1, memory: 512M}
slurm:
  options: {SlurmdTimeout: 30}
"""
DOWN_STATES = {"DOWN", "NOT_RESPONDING"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("sleeping"), SPEC) as made:
        yield made


def given_up(cluster: Cluster) -> bool:
    return cluster.states()["fish1"] == DOWN_STATES


def test_node_that_slept_past_the_slurm_timeout_takes_jobs_again(cluster: Cluster) -> None:
    cluster.fault("freeze", "fish1")
    cluster.wait("Slurm gives it up", lambda: given_up(cluster))
    cluster.fault("thaw", "fish1")
    cluster.wait("it takes jobs", lambda: cluster.states()["fish1"] == {"IDLE"})
    assert cluster.on("controller", "srun", "hostname") == "fish1\n"


def test_up_returns_a_sleeping_node_at_once(cluster: Cluster) -> None:
    cluster.on("controller", "systemctl", "stop", "shoal-returning-nodes")
    cluster.fault("freeze", "fish1")
    cluster.wait("Slurm gives it up", lambda: given_up(cluster))
    cluster.fault("thaw", "fish1")
    assert cluster.json("up")["whole"]
    assert cluster.states()["fish1"] == {"IDLE"}
    assert cluster.on("controller", "systemctl", "is-active", "shoal-returning-nodes") == "active\n"
