"""Controllers and the images of providers: in every cell the machine joins and runs a job, or nothing is rented.

The clouds are simulated. Their machines are sandbox hosts with the system of the image: Debian 12 and 13 stand for
Ubuntu 22.04 and 24.04. A cluster for each controller rents from all clouds at once.

    python -m pytest -s -m matrix tests/matrix/test_controller_images.py > bench/results/controller-images.txt
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.cluster import IMAGE, Cluster
from tests.e2e.leftovers import noted
from tests.e2e.simulated_clouds import IMPATIENT, UNFINISHED, Cloud, bill, ended, shown, simulated

from shoal.roles.slurm_tree import find_trees

COVERS = "cloud/providers roles/rented_images cloud/service/join"
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.matrix,  # minutes for each controller
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(IMAGE), reason="its machines have the images of their clouds"),
]

CONTROLLERS = {
    "debian12": "controller: {provider: sandbox, memory: 1G, image: debian12}",
    "debian13": "controller: {provider: sandbox, memory: 1G, image: debian13}",
    "tree": "controller: {provider: sandbox, memory: 1G, image: debian12}\nslurm: {from: shoal}",
}
TITLES = {"debian12": "Debian 12 packages", "debian13": "Debian 13 packages", "tree": "Debian 12, tree"}
SETTINGS = {"gcp": ", project: p"}


@dataclass(frozen=True)
class Rented:
    """A nodeset of one machine with an image."""

    name: str
    kind: str
    image: str
    """As the table shows it; one in brackets is the provider's default."""
    offer: str
    gpus: int = 0
    container: bool = False

    @property
    def line(self) -> str:
        image = "" if self.image.startswith("(") else f", image: {self.image}"
        shape = f"max: 1, cpus: 1, memory: 1G, gpus: {self.gpus}, idle: 10s"
        return f"  {self.name}: {{provider: {self.kind}, {self.offer}{image}, {shape}}}"


IMAGES = (
    Rented("lam24", "lambda", "(Ubuntu 24.04)", "type: cpu_4x_general, region: us-west-1"),
    Rented("lam22", "lambda", "lambda-stack-22-04", "type: cpu_4x_general, region: us-west-1"),
    Rented("goo24", "gcp", "(Ubuntu 24.04)", "type: n1-standard-4, zone: us-central1-a"),
    Rented("goo12", "gcp", "debian-cloud/debian-12", "type: n1-standard-4, zone: us-central1-a"),
    Rented("ama24", "aws", "(Ubuntu 24.04)", "type: c7i.large, region: us-east-1, zone: us-east-1a"),
    Rented("neb24", "nebius", "(Ubuntu 24.04)", "type: gpu-l40s-a 1gpu-8vcpu-32gb, region: eu-north1", gpus=1),
    Rented("dig22", "digitalocean", "(Ubuntu 22.04)", "type: gpu-l40sx1-48gb, region: tor1", gpus=1),
    Rented("pap22", "paperspace", "(Ubuntu 22.04)", "type: A4000, region: NY2", gpus=1),
    Rented("run12", "runpod", "(debian:12)", "type: NVIDIA A40, region: EU-RO-1", gpus=1, container=True),
    Rented("run13", "runpod", "debian:13", "type: NVIDIA A40, region: EU-RO-1", gpus=1, container=True),
    Rented("vas12", "vast", "(debian:12)", "type: RTX 4090, region: DE", gpus=1, container=True),
)
KINDS = tuple(dict.fromkeys(image.kind for image in IMAGES))
REJECTED = "rejected before renting"
TABLE: dict[tuple[str, str], str] = {}


def spec(name: str, controller: str, images: Sequence[Rented], urls: dict[str, str]) -> str:
    accounts = [
        f'  {kind}: {{url: "{urls[kind]}", key: "env:{kind.upper()}_KEY"{SETTINGS.get(kind, "")}}}' for kind in KINDS
    ]
    sets = [image.line for image in images]
    partitions = [f"  {image.name}: {{nodesets: [{image.name}]}}" for image in images]
    lines = [f"cluster: {name}", CONTROLLERS[controller], "providers:", *accounts, "nodesets:", *sets]
    return "\n".join([*lines, "partitions:", *partitions]) + "\n"


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_image_joins_and_runs_a_job_or_is_rejected_before_renting(tmp_path: Path, controller: str) -> None:
    if controller == "tree" and not find_trees():
        pytest.skip("no Slurm in the cache: build it with scripts/build-slurm")
    name = f"ee-im-{controller}"
    with noted(name), ExitStack() as stack:
        clouds = {kind: Cloud(kind, f"id:key-of-{kind}-0123456789") for kind in KINDS}
        urls = {kind: stack.enter_context(simulated(name, cloud)) for kind, cloud in clouds.items()}
        cluster = Cluster(tmp_path, spec(name, controller, IMAGES, urls))
        cluster.env |= {cloud.variable: cloud.key for cloud in clouds.values()}
        findings = cluster.json("check", status=None)["findings"]
        errors = [finding for finding in findings if finding["level"] == "error"]
        rejected = {finding["path"].removeprefix("nodesets.") for finding in errors}
        assert all("its machines cannot join" in finding["what"] for finding in errors), errors
        assert all("from: shoal" in finding["fix"] for finding in errors), errors
        if rejected:
            assert "its machines cannot join" in cluster.shoal("up", status=1).stderr
        assert all(bill(url)["machines"] == [] for url in urls.values())
        for image in IMAGES:
            if image.name in rejected:
                TABLE[image.name, controller] = REJECTED
        fit = [image for image in IMAGES if image.name not in rejected]
        cluster.file.write_text(spec(name, controller, fit, urls))
        try:
            assert cluster.json("up")["whole"]
            cluster.on("controller", "sh", "-c", IMPATIENT)
            problems = run_jobs(cluster, controller, fit)
            for kind in {image.kind for image in fit}:
                cluster.wait(f"machines of {kind} go", lambda kind=kind: ended(urls[kind]))  # type: ignore[misc]
                made = len(bill(urls[kind])["machines"])
                assert made == sum(image.kind == kind for image in fit), bill(urls[kind])
        finally:
            cluster.down()
    print(f"\n{table(controller)}")
    assert problems == []


def run_jobs(cluster: Cluster, controller: str, images: Sequence[Rented]) -> list[str]:
    """A job on each nodeset, all at once. Returns what went wrong."""
    begun, jobs = time.monotonic(), dict[str, str]()
    for image in images:
        options = [f"--partition={image.name}", "--output=/dev/null", *(["--gres=gpu:1"] if image.gpus else [])]
        jobs[image.name] = cluster.on("controller", "sbatch", "--parsable", *options, "--wrap=srun hostname").strip()
    problems, waiting = [], dict(jobs)

    def is_over() -> bool:
        for name, job in list(waiting.items()):
            record = shown(cluster, job)
            if record["JobState"] not in UNFINISHED:
                del waiting[name]
                good = record["JobState"] == "COMPLETED"
                text = f"job ran, {time.monotonic() - begun:.0f} s" if good else record["JobState"]
                TABLE[name, controller] = text
                if not good:
                    problems.append(f"{name}: {record}")
        return not waiting

    cluster.wait("all jobs end", is_over)
    return problems


def table(controller: str) -> str:
    """The column of one controller."""
    lines = [f"{TITLES[controller]:<14}"]
    lines += [f"  {image.kind:<13} {image.image:<23} {TABLE[image.name, controller]}" for image in IMAGES]
    return "\n".join(lines)
