"""Which files make their hosts from an image that has Slurm's packages."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests import installed_images

INSTALLED = {
    *("accounting", "confinement", "doctor", "hostile_user", "image_jobs", "jobs", "lab", "prove"),
    *("rented_host_keys", "spec_changes", "stopped_jobs", "storage", "tailscale", "toy", "wireguard"),
}
"""Files that do not test that `up` installs packages; test_cluster.py, test_existing_hosts.py and others do."""
CHOICES = ("SHOAL_TEST_KIND", "SHOAL_TEST_IMAGE", "SHOAL_TEST_SLURM")
"""With one of these in the environment, hosts are others."""


@pytest.fixture(scope="module", autouse=True)
def installed_packages(request: pytest.FixtureRequest) -> Iterator[None]:
    """`up` on the hosts of these files finds its packages installed: 6 s of CPU less for each host."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem.removeprefix("test_") in INSTALLED and not any(os.environ.get(name) for name in CHOICES):
            patch.setenv("SHOAL_CACHE", str(installed_images.prepare_containers()))
        yield
