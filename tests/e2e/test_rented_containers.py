"""Rented containers for real: a simulated RunPod whose pods are behind one port each, and a job that wakes one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.simulated import Cloud, apart, asleep, bill, ended, renting

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(600)]

NAME = "x-pods"
KEY = "rp-e2e-0123456789abcdef"
SPEC = f"""\
cluster: {NAME}
controller: {{provider: sandbox, memory: 1G}}
providers:
  runpod: {{url: "URL-OF-runpod", key: "env:RUNPOD_KEY"}}
budget: {{per_hour: 5}}
nodesets:
  pods: {{provider: runpod, type: NVIDIA A40, region: EU-RO-1, max: 2, cpus: 1, memory: 2G, gpus: 1, idle: 10s}}
"""
JOB = "#!/bin/sh\necho gpu $CUDA_VISIBLE_DEVICES\nsrun echo step $SLURM_JOB_NODELIST\n"


@pytest.fixture(scope="module")
def rented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    cloud = Cloud("runpod", KEY, ("--boot-seconds", "1"))
    with renting(tmp_path_factory.mktemp("pods"), SPEC, cloud) as (cluster, urls):
        yield cluster, urls["runpod"]


def test_a_job_wakes_a_container_and_runs_its_steps_there(rented: tuple[Cluster, str]) -> None:
    cluster, url = rented
    conf = cluster.on("controller", "cat", "/etc/slurm/slurm.conf")
    assert "PartitionName=main Nodes=pods[1-2] " in conf and " MaxNodes=1 " in conf
    # The container has no share and no home: the job brings its results back itself, over what Slurm has.
    script = JOB + "scontrol update job \"$SLURM_JOB_ID\" comment=\"$(cat /tmp/out | tr '\\n' ' ')\"\n"
    submit = 'printf "%s" "$1" > /tmp/job; exec timeout 200 sbatch --wait --parsable --gpus=1 -o /tmp/out /tmp/job'
    job = cluster.on("controller", "sh", "-c", submit, "sh", script).split()[0]
    shown = cluster.on("controller", "scontrol", "-o", "show", "job", job)
    assert "JobState=COMPLETED" in shown
    assert "Comment=gpu 0 step pods1" in shown
    [machine] = bill(url)["machines"]
    assert (machine["type"], machine["region"], machine["usd_hour"]) == ("NVIDIA A40", "EU-RO-1", 0.44)


def test_it_is_given_back_when_idle_and_the_ledger_balances_with_the_bill(rented: tuple[Cluster, str]) -> None:
    cluster, url = rented
    cluster.wait("it goes", lambda: ended(url), 200)
    cluster.wait("Slurm knows", lambda: asleep(cluster), 120)
    assert cluster.json("cost")["machines"] == 0
    assert apart(cluster, url, "pods") == ""


def test_the_node_comes_again_as_another_container(rented: tuple[Cluster, str]) -> None:
    cluster, url = rented
    cluster.on("controller", "sh", "-c", "timeout 200 sbatch --wait --gpus=1 -o /dev/null --wrap 'srun hostname'")
    machines = bill(url)["machines"]
    assert len(machines) == 2
    assert len({one["id"] for one in machines}) == 2
    told = cluster.on("controller", "sh", "-c", "journalctl; cat /proc/[0-9]*/cmdline; true")
    assert "shoal-elastic" in told and KEY not in told
