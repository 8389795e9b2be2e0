"""`shoal down`, over a cluster in memory."""

from pathlib import Path

from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import AT_ONCE, Sandbox
from tests.support.fake_world import World

from shoal.errors import ShoalError
from shoal.verbs.context import Context
from shoal.verbs.down import DownResult, down
from shoal.verbs.up import up


def _kept(state: Path) -> bool:
    return state.exists()


@cases("state", "RUNNING", "SUSPENDED", "CONFIGURING")
async def test_down_is_rejected_for_jobs_that_hold_nodes(world: World, context: Context, state: str) -> None:
    world.slurm.jobs, world.slurm.job_states = {"7": "n1", "8_2": "n2"}, {"7": state, "8_2": state}
    assert await error_of(ShoalError, down(context)) == (
        "cluster reef has 2 running job(s): 7, 8_2\n  fix: wait for them, cancel them, or use --force"
    )
    assert (await down(context, force=True)).released == ("c1", "n1", "n2")


async def test_down_is_not_rejected_for_a_job_that_completes(world: World, context: Context) -> None:
    world.slurm.jobs, world.slurm.job_states = {"7": "n1"}, {"7": "COMPLETING"}
    assert (await down(context)).released == ("c1", "n1", "n2")


async def test_down_releases_hosts_and_deletes_their_keys(world: World, context: Context, state: Path) -> None:
    result = await down(context)
    assert result == DownResult("reef", released=("c1", "n1", "n2"))
    assert not _kept(state)
    for agent in world.agents.values():
        assert agent.items["service munge"]["running"] is False
        assert agent.items["block members in /etc/hosts"]["content"] == ""


async def test_down_with_an_unreachable_host_releases_the_others_and_keeps_the_keys(
    world: World, context: Context, state: Path
) -> None:
    world.hosts["n2"].unreachable = True
    world.agents["n1"].failing["service slurmd"] = "slurmd does not stop"
    result = await down(context)
    assert result.released == ("c1",)
    assert {name: str(error) for name, error in result.failures.items()} == {
        "n1": "n1: service slurmd: slurmd does not stop\n"
        "  fix: look at `shoal ssh n1 journalctl -u slurmd`, then run `shoal down` again",
        "n2": "n2: does not answer within 10 s\n  fix: is the host up?",
    }
    assert _kept(state)


async def test_down_deletes_provider_hosts_and_accepts_a_missing_cluster() -> None:
    sandbox = Sandbox()
    assert await down(sandbox.context()) == DownResult("reef")
    await up(sandbox.context(), AT_ONCE)
    assert await down(sandbox.context()) == DownResult("reef", deleted=("controller", "fish1", "fish2"))
    assert sandbox.provider.clusters == {}
