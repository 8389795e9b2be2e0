"""Which files make their hosts from an image that has Slurm's packages, or all that `up` installs."""

from collections.abc import Iterator

import pytest
from tests.e2e.standing import standing as standing
from tests.e2e.standing import standing_clusters as standing_clusters
from tests.e2e.standing import use_installed_packages

WITH_SLURM = {"lagoon"}
"""Groups whose image has Slurm's packages: they show that `up` installs all others."""
WITH_PARTS = {
    *("accounting", "doctor", "lab", "rented_nodes", "spec_changes", "storage", "tailscale", "wireguard"),
    *("reef", "parts_turned_off"),
}
"""Groups and files whose image has those of all parts, too. That of test_cluster.py and others has none of either."""


@pytest.fixture(scope="module", autouse=True)
def installed_packages(request: pytest.FixtureRequest) -> Iterator[None]:
    """`up` on the hosts of these files finds its packages installed: 6 s of CPU less for each host, or more."""
    group = getattr(request.module, "GROUP", request.path.stem.removeprefix("test_"))
    with pytest.MonkeyPatch.context() as patch:
        if group in WITH_SLURM | WITH_PARTS:
            use_installed_packages(patch, parts=group in WITH_PARTS)
        yield
