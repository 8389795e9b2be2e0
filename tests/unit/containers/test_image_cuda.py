"""CUDA in images against the drivers of nodes, before a job is submitted."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.fake_world import gpus, host_facts, spec_of
from tests.unit.containers.test_job_images import NAMESPACES, REEF
from tests.unit.jobs.job_clusters import NODES, job

from shoal.containers.images import StoredImage, driver_of
from shoal.environments.cuda import is_driver_fit, newest_cuda
from shoal.errors import UsageError
from shoal.remote.image_facts import config_facts, directory_facts
from shoal.roles.images import image_features
from shoal.slurm.state import NodeState, PartitionState
from shoal.verbs.images import nodes_with_images, unfit_nodes

OF_CUDA_IMAGE = "cuda>=12.4 brand=tesla,driver>=470,driver<471 brand=nvidia,driver>=535,driver<536"
IMAGE = StoredImage("cuda", architecture="amd64", cuda=OF_CUDA_IMAGE)


def nodes(**drivers: str) -> tuple[NodeState, ...]:
    """Nodes with a GPU and these drivers; without one where it is empty."""
    features = ("images", "images-amd64")
    return tuple(
        replace(NODES[0], name=name, features=(*features, f"driver-{driver}"))
        if driver
        else replace(NODES[3], name=name, features=features, partitions=("main",))
        for name, driver in drivers.items()
    )


@cases(
    "driver, newest, fits",
    ("580.95.05", "13.0", True),
    ("550.54", "12.4", True),
    ("545.23", "12.3", False),
    ("535.183.01", "12.2", True),  # NVIDIA's own list of older drivers
    ("470.82", "11.4", True),
    ("460.91", "11.2", False),
    ("999.1", "", True),  # a driver that we do not know yet
    ("", "", True),
)
def test_driver_is_compared_with_what_an_image_says(driver: str, newest: str, fits: bool) -> None:
    assert (newest_cuda(driver), is_driver_fit(OF_CUDA_IMAGE, driver)) == (newest, fits)
    assert is_driver_fit("", driver)


def test_nodes_with_an_older_driver_are_left_out() -> None:
    assert unfit_nodes(IMAGE, job(), nodes(new="580.95", old="545.23", cpu="")) == ("old",)
    assert unfit_nodes(replace(IMAGE, cuda=""), job(), nodes(old="545.23")) == ()


def test_job_whose_image_no_driver_can_run_is_rejected_with_the_fix() -> None:
    cluster = nodes(old1="545.23", old2="460.91", cpu="")
    with pytest.raises(UsageError) as error:
        unfit_nodes(IMAGE, job(gpus_per_node=1), cluster)
    assert (
        str(error.value).splitlines()[0]
        == "image cuda needs CUDA 12.4, and the drivers of old[1-2] are for 12.3 or older"
    )
    assert "take an image for CUDA 12.3 or older" in (error.value.hint or "")
    assert unfit_nodes(IMAGE, job(gpus_per_node=0), cluster) == ()
    assert unfit_nodes(IMAGE, job(export={"NVIDIA_DISABLE_REQUIRE": "1"}), cluster) == ()
    with pytest.raises(UsageError, match="needs CUDA 12"):
        unfit_nodes(IMAGE, job(partition="main", gpus_per_node=1), (*cluster, *nodes_of("other", new="580.95")))


def test_node_that_the_job_names_is_not_left_out_in_silence() -> None:
    cluster = nodes(old="545.23", new="580.95", cpu="")
    with pytest.raises(UsageError, match=r"the drivers of old are for 12\.3 or older"):
        unfit_nodes(IMAGE, job(nodelist="old,new"), cluster)
    assert unfit_nodes(IMAGE, job(nodelist="new"), cluster) == ()


def nodes_of(partition: str, **drivers: str) -> tuple[NodeState, ...]:
    return tuple(replace(node, partitions=(partition,)) for node in nodes(**drivers))


def test_node_has_its_driver_as_a_feature() -> None:
    facts = host_facts("n1", "10.0.0.11", arch="x86_64")
    facts = replace(facts, files={**facts.files, **NAMESPACES})
    spec = spec_of(REEF + "containers: oci\n")
    assert image_features(spec, facts) == ("images", "images-amd64")
    card = replace(gpus(1)[0], driver="580.95.05")
    features = image_features(spec, replace(facts, gpus=(card,)))
    assert features == ("images", "images-amd64", "driver-580.95") and driver_of(features) == "580.95"
    unreadable = replace(card, driver="[N/A]")
    assert image_features(spec, replace(facts, gpus=(unreadable,))) == ("images", "images-amd64")


def test_image_says_what_it_needs() -> None:
    config = {"architecture": "arm64", "config": {"Env": ["A=b", f"NVIDIA_REQUIRE_CUDA={OF_CUDA_IMAGE}"]}}
    assert config_facts(config) == {"architecture": "arm64", "cuda": OF_CUDA_IMAGE}
    config["config"] = {"Env": ["NVIDIA_REQUIRE_CUDA=cuda>=9", "NVIDIA_DISABLE_REQUIRE=1"]}
    assert config_facts(config)["cuda"] == "" and config_facts({"config": None}) == {"architecture": "", "cuda": ""}


def test_directory_needs_the_cuda_of_its_own_libraries(tmp_path: Path) -> None:
    image, host = tmp_path / "image[1]", tmp_path / "host"
    assert directory_facts(str(image))["cuda"] == ""
    packages = "usr/local/lib/python3.12/site-packages/nvidia/cuda_runtime/lib"
    for place, name in (("usr/local/cuda-13.0/lib64", "libcudart.so.13.0.96"), (packages, "libcudart.so.12")):
        (image / place).mkdir(parents=True)
        (image / place / name).touch()
    assert directory_facts(str(image))["cuda"] == "cuda>=12.0"
    # A link in the image may lead to a directory of the host.
    host.mkdir()
    (host / "libcudart.so.9").touch()
    (image / "usr/local/cuda-9").mkdir()
    (image / "usr/local/cuda-9/lib64").symlink_to(host)
    assert directory_facts(str(image))["cuda"] == "cuda>=12.0"


def test_nodes_of_other_partitions_do_not_say_what_the_job_can_run() -> None:
    """One that may be rented has the features of every CPU type."""
    partitions = [PartitionState("main", "UP", default=True), PartitionState("cloud", "UP")]
    [own], plain = nodes(own=""), replace(NODES[3], name="plain", features=(), partitions=("desk",))
    rented = replace(own, name="rented", partitions=("cloud",), features=(*own.features, "images-arm64"))
    cluster = (own, rented, plain)
    assert nodes_with_images(job(), cluster, partitions) == [own]
    assert nodes_with_images(job(partition="cloud"), cluster, partitions) == [rented]
    assert nodes_with_images(job(partition="desk"), cluster, partitions) == cluster
