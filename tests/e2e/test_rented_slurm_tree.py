"""`slurm: {from: shoal}`: machines with the default image of each provider join a Debian 12 controller, and run jobs.

With packages, the Slurm of these images and the controller's cannot talk to each other: test_rented_images.py.
"""

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import ON_DEBIAN_12
from tests.e2e.simulated_clouds import shown
from tests.e2e.test_provider_rentals import Case, Clouds, clouds, spec_of

COVERS = "roles/rented_images roles/slurm_tree roles/slurm_source cloud/service/join"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, ON_DEBIAN_12]  # two minutes

CASES = (
    Case("lambda", "type: cpu_4x_general, region: us-west-1"),
    Case("gcp", "type: a2-highgpu-1g, zone: us-central1-a", gpus=1, settings=", project: p"),
    Case("paperspace", "type: A4000, region: NY2", gpus=1),
)


@pytest.fixture(scope="module")
def rented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clouds]:
    spec = spec_of(CASES, "ee-tree", "slurm: {from: shoal}")
    with clouds(tmp_path_factory.mktemp("tree"), CASES, spec) as made:
        yield made


@pytest.mark.parametrize("kind", [case.kind for case in CASES])
def test_default_image_joins_and_runs_a_job(rented: Clouds, kind: str) -> None:
    rental = rented.finish(kind)
    assert shown(rented.cluster, rental.job)["JobState"] == "COMPLETED", shown(rented.cluster, rental.job)
