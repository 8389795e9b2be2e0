"""Which files make their hosts from an image that has packages."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests import installed_images

INSTALLED = {"confinement", "hostile_user", "image_jobs", "jobs", "prove", "stopped_jobs", "toy"}
"""Files whose image has Slurm's packages. hostile_user and image_jobs show that `up` installs all others."""
WITH_PARTS = {
    *("accounting", "doctor", "lab", "rented_nodes", "spec_changes", "storage", "tailscale", "wireguard"),
}
"""Files whose image has those of the parts of a spec, too. test_cluster.py and others have an image without any."""
CHOICES = ("SHOAL_TEST_KIND", "SHOAL_TEST_IMAGE", "SHOAL_TEST_SLURM")
"""With one of these in the environment, hosts are others."""


@pytest.fixture(scope="module", autouse=True)
def installed_packages(request: pytest.FixtureRequest) -> Iterator[None]:
    """`up` on the hosts of these files finds its packages installed: 6 s of CPU less for each host, or more."""
    name = request.path.stem.removeprefix("test_")
    with pytest.MonkeyPatch.context() as patch:
        if name in INSTALLED | WITH_PARTS and not any(os.environ.get(choice) for choice in CHOICES):
            patch.setenv("SHOAL_CACHE", str(installed_images.prepare_containers(parts=name in WITH_PARTS)))
        yield
