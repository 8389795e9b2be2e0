"""`shoal node drain|resume|remove`, over a cluster in memory."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.fake_clusters import AT_ONCE, context_of
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


async def test_drain_and_resume_are_rejected_while_slurmctld_is_stopped(world: World, context: Context) -> None:
    world.hosts["c1"].answers = {**world.hosts["c1"].answers, ("systemctl",): b"LoadState=loaded\nActiveState=failed\n"}
    for work in (drain_nodes(context, "n1", "fan broken"), resume_nodes(context, "n1")):
        with pytest.raises(SlurmError, match=r"slurmctld does not run on c1 \(failed\)"):
            await work
    assert world.slurm.updates == []


async def test_host_without_the_compute_role_is_not_a_node() -> None:
    with pytest.raises(UsageError) as caught:
        await drain_nodes(context_of(lab()), "c1,n1", "")
    assert str(caught.value) == "not a compute node: c1\n  fix: name a node that `shoal status` lists"


async def test_removed_node_leaves_file_and_slurm_and_keeps_nothing_of_shoal(world: World, tmp_path: Path) -> None:
    file = tmp_path / "shoal.yaml"
    file.write_text("# our lab\n" + LAB)
    result = await remove_node(replace(context_of(world), file=file), "n2", AT_ONCE)
    assert (result.removed, result.whole) == (("n2",), True)
    assert file.read_text() == "# our lab\n" + LAB.replace(", {name: n2, address: 10.0.0.12}", "")
    assert world.slurm.nodes == ["n1"]
    assert world.agents["n2"].items["service slurmd"]["running"] is False
    assert world.agents["n2"].items["file /etc/munge/munge.key"]["content"] is None


async def test_node_with_jobs_is_unchanged_until_they_end(world: World, tmp_path: Path) -> None:
    world.slurm.jobs["7"] = "n2"
    file = tmp_path / "shoal.yaml"
    file.write_text(LAB)
    result = await remove_node(replace(context_of(world), file=file), "n2", AT_ONCE)
    assert (result.staying, result.removed) == (("n2",), ())
    assert world.agents["n2"].items["service slurmd"]["running"] is True


async def test_remove_needs_a_file() -> None:
    with pytest.raises(UsageError) as caught:
        await remove_node(context_of(lab()), "n2", AT_ONCE)
    assert str(caught.value) == (
        "cannot remove n2: the cluster has no file\n  fix: write one with `shoal init`, then run the command again"
    )


@cases(
    "host, text",
    ("n[1-2]", "n[1-2] names 2 hosts, and this command takes one\n  fix: use n1"),
    ("c1", "not a compute node: c1\n  fix: name a node that `shoal status` lists"),
)
async def test_only_a_single_node_is_removed_at_a_time(host: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "shoal.yaml"
    file.write_text(LAB)
    with pytest.raises(UsageError) as caught:
        await remove_node(replace(context_of(lab()), file=file), host, AT_ONCE)
    assert str(caught.value) == text
    assert file.read_text() == LAB
