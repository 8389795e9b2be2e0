"""`shoal try` on a sandbox cluster beside simulated clouds: the whole trial, and a trial that Ctrl-C stops."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from tests.e2e.cluster import LIMIT, Cluster
from tests.e2e.simulated_clouds import LATE_S, Cloud, bill, ended, renting

pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]  # four times `up`, and two machines that join

NAME = "ee-try"
KEY = "id:key-of-aws-0123456789"
SPEC = f"""\
cluster: {NAME}
controller: {{provider: sandbox, memory: 1G, compute: true}}
budget: {{per_hour: 5}}
providers:
  aws: {{url: "URL-OF-aws", key: "env:AWS_KEY", settings: {{image: ami-0123456789abcdef0}}}}
"""


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    with renting(tmp_path_factory.mktemp("try"), SPEC, Cloud("aws", KEY)) as (cluster, urls):
        yield cluster, urls["aws"]


def test_trial_passes_every_step_and_knows_its_bill(trial: tuple[Cluster, str]) -> None:
    cluster, url = trial
    report = cluster.json("try", "aws", "--max-cost", "1", "--yes")
    assert report["passed"], report
    assert [(step["name"], step["error"]) for step in report["steps"]] == [
        (name, "")
        for name in (
            "add a nodeset to the cluster",
            "order",
            "boot, join and check of its GPUs",
            "job",
            "release",
            "bill",
            "remove the nodeset",
        )
    ]
    assert (report["provider"], report["type"]) == ("aws", "g4dn.xlarge")  # the cheapest with a GPU
    assert {"slurmd", "GPUs"} <= set(report["node"])
    assert KEY not in str(report)
    [machine] = bill(url)["machines"]
    assert machine["ended"]
    assert abs(report["usd"] - machine["usd"]) <= LATE_S * machine["usd_hour"] / 3600
    assert "try1" not in cluster.on("controller", "sinfo", "-h", "-N")


def test_interrupted_trial_releases_its_machine(trial: tuple[Cluster, str]) -> None:
    cluster, url = trial
    before = len(bill(url)["machines"])
    process = cluster.background("try", "aws", "--yes")
    cluster.wait("a machine is ordered", lambda: len(bill(url)["machines"]) > before)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, output
    assert ended(url)
    assert "try1" not in cluster.on("controller", "sinfo", "-h", "-N")
