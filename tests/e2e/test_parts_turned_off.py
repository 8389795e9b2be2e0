"""Parts that a change of the file turns off on a cluster that runs, and what stays of them. It begins with one host."""

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import KIND, ON_DEBIAN_12, Cluster, running
from tests.e2e.test_confinement import OPEN_BOTH, settings
from tests.e2e.tracking_checks import put_stand_in

COVERS = "roles tracking sandbox/cgroups.py plan/diff"
pytestmark = [
    pytest.mark.sandbox,
    ON_DEBIAN_12,
    pytest.mark.skipif(KIND == "vm", reason="every virtual machine has cgroups"),
]

SPEC = """\
cluster: x-parts
controller: {provider: sandbox, memory: 1G, compute: true, gpus: 2, cgroups: true}
"""
PLAIN = "nodesets:\n  plain: {provider: sandbox, count: 1, memory: 512M}\n"
TRACKING = "tracking: mlflow\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("parts"), SPEC) as made:
        put_stand_in(made, "controller")
        yield made


def test_host_without_cgroups_turns_confinement_off_for_all_and_tracking_stops_with_its_line(cluster: Cluster) -> None:
    """The settings of cgroups are the whole cluster's, so the weakest host decides, and jobs run all the same."""
    before = cluster.file.read_text()
    cluster.file.write_text(before + PLAIN + TRACKING)
    assert cluster.json("up")["whole"]
    assert settings(cluster, "slurm.conf")["ProctrackType"] == "proctrack/linuxproc"
    assert "TaskPlugin" not in settings(cluster, "slurm.conf")
    assert settings(cluster, "cgroup.conf")["ConstrainDevices"] == "no"
    assert sorted(cluster.on("controller", "srun", "-N2", "hostname").split()) == ["controller", "plain1"]
    output = cluster.on("controller", "srun", "-w", "controller", "--gpus=1", "bash", "-c", f"exec 2>&1; {OPEN_BOTH}")
    assert "open 0" in output and "open 1" in output, output
    assert is_active(cluster) == "active" and "5000" in firewall(cluster)

    cluster.file.write_text(before)
    assert cluster.json("up")["removed"] == ["plain1"]
    assert settings(cluster, "slurm.conf")["ProctrackType"] == "proctrack/cgroup"
    output = cluster.on("controller", "srun", "-w", "controller", "--gpus=1", "bash", "-c", f"exec 2>&1; {OPEN_BOTH}")
    assert "open 0" in output and "open 1" not in output, output
    assert is_active(cluster) == "inactive" and "5000" not in firewall(cluster)
    cluster.on("controller", "test", "-e", "/var/lib/shoal-mlflow")
    assert cluster.json("up")["unchanged"]


def is_active(cluster: Cluster) -> str:
    return cluster.on("controller", "systemctl", "is-active", "shoal-mlflow", status=None).strip()


def firewall(cluster: Cluster) -> str:
    return cluster.on("controller", "nft", "list", "table", "inet", "shoal")
