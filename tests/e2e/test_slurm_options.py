"""A setting in `slurm.options` that Slurm rejects does not affect the running cluster and its jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import Cluster, running

pytestmark = pytest.mark.sandbox

SPEC = """\
cluster: x-options
controller: {provider: sandbox, memory: 512M, compute: true}
slurm: {options: {KillWait: 31}}
"""
GOOD = "{KillWait: 31}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("options"), SPEC) as made:
        yield made


@pytest.fixture
def job(cluster: Cluster) -> Iterator[str]:
    """A job that runs meanwhile."""
    wait = "while [ ! -e /tmp/release ]; do sleep 0.2; done"
    number = cluster.on("controller", "sbatch", "--parsable", "--mem=20M", "--output=/dev/null", "--wrap", wait).strip()
    cluster.wait("it runs", lambda: state_of(cluster, number) == "RUNNING")
    yield number
    cluster.on("controller", "touch", "/tmp/release")
    cluster.wait("it ends", lambda: state_of(cluster, number) == "COMPLETED")
    cluster.on("controller", "rm", "/tmp/release")


def state_of(cluster: Cluster, job: str) -> str:
    return cluster.on("controller", "scontrol", "show", "job", job).split("JobState=")[1].split()[0]


@pytest.mark.parametrize(
    ("options", "complaint", "advice"),
    [
        ("{Nope: 1}", "unrecognized key: Nope", "correct or delete slurm.options.Nope"),
        ("{KillWait: soon}", 'KillWait value "soon" is not a valid number', "correct or delete slurm.options.KillWait"),
    ],
)
def test_option_slurm_cannot_read_is_reported_by_check_and_not_applied(
    cluster: Cluster, job: str, options: str, complaint: str, advice: str
) -> None:
    before = cluster.on("controller", "cat", "/etc/slurm/slurm.conf")
    started = cluster.on("controller", "systemctl", "show", "-p", "MainPID", "slurmctld")
    cluster.edit(GOOD, options)
    try:
        checked = cluster.shoal("check", status=1)
        applied = cluster.shoal("up", status=1)
    finally:
        cluster.edit(options, GOOD)
    for done in (checked, applied):
        assert complaint in done.stdout + done.stderr
        assert advice in done.stdout + done.stderr
    assert f"fix: {advice} in the cluster's file, then run `shoal up` again" in applied.stderr, applied.stderr
    assert cluster.on("controller", "cat", "/etc/slurm/slurm.conf") == before
    assert cluster.on("controller", "systemctl", "show", "-p", "MainPID", "slurmctld") == started, "not even restarted"
    assert state_of(cluster, job) == "RUNNING"
    assert "no changes" in cluster.shoal("up").stdout


def test_option_that_stops_slurmctld_is_rolled_back(cluster: Cluster, job: str) -> None:
    """A plugin that is not there: the file can be read, and slurmctld ends all the same."""
    before = cluster.on("controller", "cat", "/etc/slurm/slurm.conf")
    options = "{PreemptType: preempt/nope}"
    cluster.edit(GOOD, options)
    try:
        done = cluster.shoal("up", status=1)
    finally:
        cluster.edit(options, GOOD)
    assert "slurmctld did not start with the new /etc/slurm/slurm.conf" in done.stderr
    assert "correct or delete slurm.options.PreemptType" in done.stderr
    assert "The old file is back in force, and slurmctld runs" in done.stderr
    assert cluster.on("controller", "cat", "/etc/slurm/slurm.conf") == before
    cluster.wait("slurmctld answers again, and the job still runs", lambda: state_of(cluster, job) == "RUNNING")
    assert cluster.on("controller", "srun", "--mem=20M", "hostname").strip() == "controller"
    assert "no changes" in cluster.shoal("up").stdout
