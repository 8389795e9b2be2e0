"""Which offers can join is known before one is rented: by provider, image and the controller's Slurm."""

from tests.support.cases import cases
from tests.support.fake_world import spec_of

from shoal.cloud.providers.api import System
from shoal.elastic import blocks_of_unfit_offers
from shoal.plan.cluster_findings import member_version_findings
from shoal.roles.rented_images import image_system, offer_findings
from shoal.slurm.versions import ONE_SLURM, Version

REEF = """
cluster: reef
controller: {host: c1}
nodesets:
  pool: {max: 2, cpus: 4, memory: 8G, OFFERS}
providers:
  lambda: {key: env:K}
  gcp: {key: env:K, project: p}
  runpod: {key: env:K}
  paperspace: {key: env:K}
"""
CONTROLLERS = {
    "Debian 12": Version(22, 5, 8),
    "Ubuntu 24.04": Version(23, 11, 4),
    "Debian 13": Version(24, 11, 5),
    "Ubuntu 26.04": Version(25, 11, 2),
}
CAN_JOIN = {
    "Debian 12": {"runpod"},
    "Ubuntu 24.04": {"lambda", "gcp", "runpod"},
    "Debian 13": {"lambda", "gcp"},
    "Ubuntu 26.04": set(),
}
"""The providers whose default image can join, by the controller's distribution."""


def findings(offers: str, controller: Version) -> list[str]:
    return [f"{one.level}: {one}" for one in offer_findings(spec_of(REEF.replace("OFFERS", offers)), controller)]


@cases("controller", *CONTROLLERS)
@cases("provider", "lambda", "gcp", "runpod", "paperspace")
def test_every_pair_of_controller_and_default_image_joins_or_is_rejected(controller: str, provider: str) -> None:
    rejected = findings(f"provider: {provider}, type: t", CONTROLLERS[controller])
    assert bool(rejected) is (provider not in CAN_JOIN[controller])


def test_rejection_names_both_releases_and_the_line_to_write() -> None:
    [text] = findings("provider: lambda, type: gpu_1x_a10", Version(22, 5, 8))
    assert text == (
        "error: nodesets.pool: nodeset `pool`: its machines cannot join, found lambda rents Ubuntu 24.04 with Slurm "
        "23.11.4, and the controller's 22.05.8 takes 22.05, "
        f"{ONE_SLURM}; or name another `image` there, or take a controller with another Slurm"
    )


def test_nodeset_with_another_offer_that_joins_is_only_warned_about() -> None:
    [text] = findings(
        "offers: [{provider: lambda, type: a}, {provider: gcp, type: b, image: debian-12}]", Version(22, 5)
    )
    assert text.startswith("warning: nodesets.pool: nodeset `pool`: some of its offers cannot join, and are not rented")


def test_one_slurm_for_all_hosts_takes_every_image() -> None:
    spec = spec_of(REEF.replace("OFFERS", "provider: paperspace, type: A4000") + "slurm: {from: shoal}\n")
    assert offer_findings(spec, Version(24, 11, 5)) == []


def test_cpu_without_a_tree_is_rejected_with_the_wheel_to_install() -> None:
    spec = spec_of(REEF.replace("OFFERS", "provider: lambda, type: gpu_1x_gh200") + "slurm: {from: shoal}\n")
    [finding] = offer_findings(spec, Version(24, 11, 5), ("x86_64",))
    assert (finding.level, finding.path) == ("error", "nodesets.pool")
    assert "gpu_1x_gh200 of lambda needs a Slurm for aarch64, and there is one for x86_64 only" in str(finding)
    assert "install the wheel `shoal-slurm` for aarch64" in str(finding)
    [block] = blocks_of_unfit_offers(spec, Version(24, 11, 5), ("x86_64",))
    assert (block.account, block.type) == ("lambda", "gpu_1x_gh200")
    assert offer_findings(spec, Version(24, 11, 5), ("aarch64", "x86_64")) == []


def test_plan_is_rejected_like_one_of_hosts_that_cannot_talk() -> None:
    spec = spec_of(REEF.replace("OFFERS", "provider: lambda, type: a"))
    [finding] = member_version_findings(spec, {"c1": Version(22, 5, 8)})
    assert (finding.level, finding.path) == ("error", "nodesets.pool")


def test_service_rents_no_offer_that_cannot_join() -> None:
    offers = "offers: [{provider: lambda, type: a, region: us-west-1}, {provider: runpod, type: b}]"
    [block] = blocks_of_unfit_offers(spec_of(REEF.replace("OFFERS", offers)), Version(22, 5, 8))
    found = (block.account, block.type, block.place, block.nodeset, block.until)
    assert found == ("lambda", "a", "us-west-1", "pool", None)
    assert block.why.startswith("lambda rents Ubuntu 24.04 with Slurm 23.11.4")


@cases(
    "image, system",
    ("lambda-stack-22-04", System("ubuntu", "22.04")),
    ("gpu-base-24-04", System("ubuntu", "24.04")),
    ("projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64", System("ubuntu", "24.04")),
    ("common-cu129-ubuntu-2404-nvidia-580", System("ubuntu", "24.04")),
    ("debian-cloud/debian-12", System("debian", "12")),
    ("debian:13-slim", System("debian", "13")),
    ("runpod/pytorch:2.4.0-py3.11-cuda12.4.1-devel-ubuntu22.04", System("ubuntu", "22.04")),
    ("nvidia/cuda:12.8.1-base-ubuntu24.04@sha256:00", System("ubuntu", "24.04")),
    ("python:3.12-bookworm", System("debian", "12")),
    ("ML-in-a-Box Ubuntu 22.04", System("ubuntu", "22.04")),
    ("0920582c7ff041399e34823a0be62549", None),
    ("rockylinux:9", None),
)
def test_name_of_an_image_tells_its_system(image: str, system: System | None) -> None:
    assert image_system(image) == system
