"""Users that the file no longer names are locked, never deleted; the effect on their jobs is reported or rejected."""

from tests.support.errors import error_of
from tests.support.fake_clusters import AT_ONCE, context_of
from tests.support.fake_world import LAB, World, lab

from shoal.errors import ShoalError
from shoal.plan.model import Cost
from shoal.verbs.up import plan, up

ALICE = "users:\n  alice: {uid: 2001}\n"
BOTH = ALICE + "  bob: {uid: 2002}\n"
OVER_SSH = "storage: {/home: {kind: sshfs}}\n"
ENDS = "found job 7, 9, `scancel -u bob` on c1 ends what they have in the queue"
WARNED = f"users: bob is no longer named and gets locked; their jobs still run, the waiting ones too, {ENDS}"
HOME_GOES = f"users: bob is no longer named and gets locked; nodes that have their home over SSH lose it, {ENDS}"


async def with_jobs_of_both(more: str = "") -> World:
    """Job 7 of bob's runs and 9 waits; 8 is alice's, and 6 of bob's has just ended."""
    world = lab(LAB + BOTH + more, n1={"fuse": True}, n2={"fuse": True})
    assert (await up(context_of(world), AT_ONCE)).whole
    world.look_again()
    world.slurm.jobs = {"6": "n1", "7": "n1", "8": "n2", "9": ""}
    world.slurm.job_states = {"6": "COMPLETING", "9": "PENDING"}
    world.slurm.job_users = {"6": "bob", "7": "bob", "8": "alice", "9": "bob"}
    return world


def warnings_of(findings: tuple[object, ...]) -> list[str]:
    return [str(finding) for finding in findings if "gets locked" in str(finding)]


def locked(world: World) -> set[str]:
    return {name for name, agent in world.agents.items() if agent.items["user bob"].get("locked")}


async def test_user_with_jobs_is_locked_with_a_warning_and_the_jobs_continue() -> None:
    world = await with_jobs_of_both()
    context = context_of(world, LAB + ALICE)
    shown = await plan(context)
    assert warnings_of(shown.findings) == [WARNED]
    assert shown.lost_jobs == () and shown.cost < Cost.JOBS
    assert locked(world) == set(), "a plan changes nothing"
    result = await up(context, AT_ONCE)
    assert result.whole and warnings_of(result.findings) == [WARNED]
    assert locked(world) == {"c1", "n1", "n2"}
    assert not any("delete" in str(change.action) for change in shown.changes)
    world.look_again()
    again = await up(context, AT_ONCE)
    assert again.unchanged and warnings_of(again.findings) == []


async def test_home_of_a_user_with_jobs_stays_mounted_without_permission() -> None:
    world = await with_jobs_of_both(OVER_SSH)
    context = context_of(world, LAB + ALICE + OVER_SSH)
    shown = await plan(context)
    assert warnings_of(shown.findings) == [HOME_GOES]
    assert shown.lost_jobs == ("7", "9") and shown.cost is Cost.JOBS
    assert {change.what for change in shown.changes if change.cost is Cost.JOBS} == {"user bob"}
    assert await error_of(ShoalError, up(context, AT_ONCE)) == (
        "this change would end jobs (7, 9); nothing was changed\n  fix: wait for them, or use --allow-job-loss"
    )
    assert locked(world) == set()
    assert (await up(context, AT_ONCE, allow_job_loss=True)).whole
    assert locked(world) == {"c1", "n1", "n2"}


async def test_user_without_jobs_is_removed_at_once_without_a_warning() -> None:
    world = await with_jobs_of_both(OVER_SSH)
    world.slurm.jobs = {"6": "n1", "8": "n2"}
    result = await up(context_of(world, LAB + ALICE + OVER_SSH), AT_ONCE)
    assert result.whole and warnings_of(result.findings) == []
    assert locked(world) == {"c1", "n1", "n2"}
