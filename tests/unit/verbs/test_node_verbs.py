"""`shoal node drain|resume|remove`, over a cluster in memory."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import AT_ONCE, context_of, raised
from tests.support.fake_world import LAB, World, lab

from shoal.errors import SlurmError, UsageError
from shoal.verbs.context import Context
from shoal.verbs.node import drain_nodes, remove_node, resume_nodes


async def test_nodes_are_drained_with_a_reason_and_resumed(world: World, context: Context) -> None:
    assert await drain_nodes(context, "n[1-2]", "fan broken") == ["n1", "n2"]
    assert world.slurm.reasons == {"n1": "fan broken", "n2": "fan broken"}
    assert await resume_nodes(context, "n1") == ["n1"]
    assert await resume_nodes(context, "n1") == []
    assert world.slurm.states == {"n2": "IDLE+DRAIN"}


async def test_rented_nodes_are_drained_and_resumed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "key")
    rented = "  cloud: {provider: sandbox, type: cpu, max: 2, cpus: 1, memory: 1G}\npartitions"
    accounts = 'providers: {sandbox: {key: env:KEY, url: "http://10.0.0.9:1"}}\n'
    world = lab(LAB.replace("partitions", rented).replace("[lab]", "[lab, cloud]") + accounts)
    context = await raised(world)
    assert await drain_nodes(context, "n1,cloud[1-2]", "moves") == ["n1", "cloud1", "cloud2"]
    world.slurm.states["cloud1"] = "IDLE+CLOUD+POWERED_DOWN"  # Slurm rejects to resume what takes jobs
    assert await resume_nodes(context, "cloud[1-2]") == ["cloud2"]
    assert world.slurm.states == {"n1": "IDLE+DRAIN", "cloud1": "IDLE+CLOUD+POWERED_DOWN"}


async def test_drain_and_resume_are_rejected_while_slurmctld_is_stopped(world: World, context: Context) -> None:
    world.hosts["c1"].answers = {**world.hosts["c1"].answers, ("systemctl",): b"LoadState=loaded\nActiveState=failed\n"}
    for work in (drain_nodes(context, "n1", "fan broken"), resume_nodes(context, "n1")):
        with pytest.raises(SlurmError, match=r"slurmctld does not run on c1 \(failed\)"):
            await work
    assert world.slurm.updates == []


NO_NODE = "not a compute node: c1\n  fix: name a node that `shoal status` lists"


@cases(
    "host, text",
    ("n[1-2]", "n[1-2] names 2 hosts, and this command takes one\n  fix: use n1"),
    ("c1", NO_NODE),
)
async def test_only_a_single_node_of_a_file_is_removed_at_a_time(host: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "shoal.yaml"
    file.write_text(LAB)
    assert await error_of(UsageError, remove_node(replace(context_of(lab()), file=file), host, AT_ONCE)) == text
    assert file.read_text() == LAB
    assert await error_of(UsageError, drain_nodes(context_of(lab()), "c1,n1", "")) == NO_NODE
    assert await error_of(UsageError, remove_node(context_of(lab()), "n2", AT_ONCE)) == (
        "cannot remove n2: the cluster has no file\n  fix: write one with `shoal init`, then run the command again"
    )
