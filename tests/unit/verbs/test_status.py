"""`shoal status`, over a cluster in memory."""

import asyncio

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import context_of
from tests.support.fake_world import LAB, World, lab

from shoal.errors import SlurmError
from shoal.hosts.api import Result
from shoal.slurm.state import NODES_COMMAND
from shoal.verbs.context import Context
from shoal.verbs.slurmctld import NO_CONFIGURATION, slurm_output
from shoal.verbs.status import status
from shoal_simulators.fake_host import FakeHost, FakeProgram


async def test_status_shows_the_slurm_state(world: World, context: Context) -> None:
    world.slurm.jobs["7"] = "n1"
    world.slurm.states["n2"], world.slurm.reasons["n2"] = "IDLE+DRAIN", "fan broken"
    found = await status(context)
    assert (found.cluster, found.controller, found.version) == ("reef", "c1", "22.05.8")
    assert [(node.name, node.state, node.reason) for node in found.nodes] == [
        ("n1", ("IDLE",), ""),
        ("n2", ("IDLE", "DRAIN"), "fan broken"),
    ]
    assert [(part.name, part.nodes, part.default) for part in found.partitions] == [("main", "n[1-2]", True)]
    assert [(job.id, job.nodes) for job in found.jobs] == [("7", "n1")]
    assert (found.absent, found.extra) == ((), ())


async def test_status_names_nodes_missing_in_the_file_or_in_slurm(world: World) -> None:
    other = context_of(world, LAB.replace("name: n2, address: 10.0.0.12", "name: n3, address: 10.0.0.13"))
    found = await status(other)
    assert (found.absent, found.extra) == (("n3",), ("n2",))


async def test_status_of_a_missing_or_removed_cluster_is_an_error() -> None:
    world = lab()
    world.hosts["c1"].answers = {}
    assert await error_of(SlurmError, status(context_of(world))) == "c1 has no Slurm yet\n  fix: run `shoal up`"
    said = b"scontrol: error: fetch_config: DNS SRV lookup failed\n" + NO_CONFIGURATION.encode()
    gone = b"LoadState=not-found\nActiveState=inactive\n"
    world.hosts["c1"].answers = {("scontrol",): Result(1, b"", said), ("systemctl",): gone}
    assert await error_of(SlurmError, status(context_of(world))) == (
        "Slurm on c1 is not set up: it has no configuration\n  fix: run `shoal up`"
    )


@cases("state", "failed", "inactive", "activating")
async def test_status_reports_a_stopped_slurmctld_at_once(world: World, context: Context, state: str) -> None:
    asked = len(world.hosts["c1"].calls)
    world.hosts["c1"].answers |= {("systemctl",): f"LoadState=loaded\nActiveState={state}\n".encode()}
    assert await error_of(SlurmError, status(context)) == (
        f"slurmctld does not run on c1 ({state})\n"
        "  fix: run `shoal up`; its log: `shoal ssh c1 journalctl -u slurmctld`"
    )
    assert [call.argv[0] for call in world.hosts["c1"].calls[asked:]] == ["scontrol", "systemctl"]


async def test_hanging_slurmctld_is_reported() -> None:
    async def hang(program: FakeProgram) -> int:
        await asyncio.sleep(3600)
        return 0

    assert await error_of(SlurmError, slurm_output(FakeHost("c1", {NODES_COMMAND: hang}), NODES_COMMAND, 0.05)) == (
        "slurmctld on c1 does not answer within 0.05 s\n"
        "  fix: run `shoal up`; its log: `shoal ssh c1 journalctl -u slurmctld`"
    )


async def test_status_quotes_the_slurm_error(world: World, context: Context) -> None:
    world.slurm.broken = "slurm_load_node error: Unable to contact slurm controller (connect failure)\n"
    with pytest.raises(SlurmError) as caught:
        await status(context)
    assert "on c1 failed: slurm_load_node error: Unable to contact slurm controller (connect failure)\n" in str(
        caught.value
    )
