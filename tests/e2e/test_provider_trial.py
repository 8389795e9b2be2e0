"""`shoal try` on a sandbox cluster beside simulated clouds: the whole trial, and a trial that Ctrl-C stops."""

import signal
from collections.abc import Iterator

import pytest
from tests.e2e.cluster import LIMIT, Cluster
from tests.e2e.simulated_clouds import LATE_S, Cloud, bill, ended, renting

COVERS = "verbs/provider_trial verbs/rented_accounts cloud/providers"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]  # six times `up`, and three machines that join

NAME = "ee-try"
CLOUDS = {kind: Cloud(kind, f"id:key-of-{kind}-0123456789") for kind in ("aws", "nebius")}
SPEC = f"""\
cluster: {NAME}
controller: {{provider: sandbox, memory: 1G, compute: true}}
budget: {{per_hour: 5}}
providers:
  aws: {{url: "URL-OF-aws", key: "env:AWS_KEY", settings: {{image: ami-0123456789abcdef0}}}}
  nebius: {{url: "URL-OF-nebius", key: "env:NEBIUS_KEY", settings: {{image: computeimage-e00debian12}}}}
"""
CHEAPEST = {"aws": "g4dn.xlarge", "nebius": "gpu-l40s-a 1gpu-8vcpu-32gb"}
"""The cheapest machine with a GPU."""


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, dict[str, str]]]:
    with renting(tmp_path_factory.mktemp("try"), SPEC, *CLOUDS.values()) as made:
        yield made


@pytest.mark.parametrize("kind", CLOUDS)
def test_trial_passes_every_step_and_knows_its_bill(trial: tuple[Cluster, dict[str, str]], kind: str) -> None:
    cluster, url = trial[0], trial[1][kind]
    report = cluster.json("try", kind, "--max-cost", "1", "--yes")
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
    assert (report["provider"], report["type"]) == (kind, CHEAPEST[kind])
    assert {"slurmd", "GPUs"} <= set(report["node"])
    assert CLOUDS[kind].key not in str(report)
    [machine] = bill(url)["machines"]
    assert machine["ended"]
    assert abs(report["usd"] - machine["usd"]) <= LATE_S * machine["usd_hour"] / 3600
    assert "try1" not in cluster.on("controller", "sinfo", "-h", "-N")


def test_interrupted_trial_releases_its_machine(trial: tuple[Cluster, dict[str, str]]) -> None:
    cluster, url = trial[0], trial[1]["aws"]
    before = len(bill(url)["machines"])
    process = cluster.background("try", "aws", "--yes")
    cluster.wait("a machine is ordered", lambda: len(bill(url)["machines"]) > before)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, output
    assert ended(url)
    assert "try1" not in cluster.on("controller", "sinfo", "-h", "-N")
