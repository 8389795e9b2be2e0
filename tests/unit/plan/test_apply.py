"""Apply: the order of steps, which hosts drop out, and what it waits for."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_world import LAB, World, lab, spec_of

from shoal.errors import AgentFailed, ControllerFailed, HostError, SlurmError
from shoal.plan.apply import ApplyResult, ApplyTimeouts, apply
from shoal.plan.diff import make_plan
from shoal.plan.nodes import LEAVING_REASON, active_jobs, drain_nodes, jobs_on, resume_nodes, unready_nodes
from shoal.plan.observe import observe, slurm_view
from shoal.plan.progress import NoProgress, Phase
from shoal.spec.members import members
from shoal.spec.model import Spec
from shoal_simulators.fake_host import Call, FakeAgent

ZERO_TIMEOUTS = ApplyTimeouts(nodes_s=0, drain_s=0)
WITHOUT_N2 = LAB.replace(", {name: n2, address: 10.0.0.12}", "")


class ProgressRecorder:
    """Records the titles of the phases, and the hosts that ended each phase."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, list[tuple[str, str]]]] = []

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Phase]:
        self.phases.append((title, []))
        yield self

    def update(self, host: str, text: str) -> None: ...

    def done(self, host: str, error: str = "") -> None:
        self.phases[-1][1].append((host, error))

    def set_fraction(self, fraction: float, text: str = "") -> None: ...

    @property
    def titles(self) -> list[str]:
        return [title for title, _ in self.phases]


async def bring(
    world: World,
    spec: Spec | None = None,
    timeouts: ApplyTimeouts = ZERO_TIMEOUTS,
    progress: ProgressRecorder | None = None,
) -> tuple[ApplyResult, dict[str, HostError]]:
    spec = spec or world.spec
    async with world.fleet(*(member.name for member in members(spec))) as fleet:
        plan = await make_plan(spec, await observe(fleet, spec), fleet, {})
        nodes = [member.name for member in members(spec) if "compute" in member.roles]
        done = await apply(plan, fleet, world.controller, nodes, progress or NoProgress(), timeouts)
        failures = dict(fleet.failures)
    world.look_again()
    return done, failures


def asked(agent: FakeAgent) -> list[str]:
    return [request["op"] for request in agent.requests if request["op"] in ("secret", "apply")]


@pytest.fixture
async def world() -> World:
    """A lab that is up."""
    world = lab()
    await bring(world)
    return world


async def test_all_hosts_finish_a_stage_before_the_next_begins() -> None:
    progress = ProgressRecorder()
    done, failures = await bring(lab(), progress=progress)
    assert [(title, sorted(ends)) for title, ends in progress.phases] == [
        ("packages, keys, names", [("c1", ""), ("n1", ""), ("n2", "")]),
        ("controller", [("c1", "")]),
        ("nodes", [("c1", ""), ("n1", ""), ("n2", "")]),
    ]
    assert done == ApplyResult(changed=("c1", "n1", "n2")) and failures == {}


async def test_munge_key_of_the_controller_goes_to_every_host_and_a_second_run_changes_nothing(world: World) -> None:
    digests = {agent.items["file /etc/munge/munge.key"]["sha256"] for agent in world.agents.values()}
    before = {name: asked(agent) for name, agent in world.agents.items()}
    assert (len(digests), before["c1"][0]) == (1, "secret") and "secret" not in before["n1"]
    progress = ProgressRecorder()
    assert (await bring(world, progress=progress))[0] == ApplyResult()
    assert {name: asked(agent) for name, agent in world.agents.items()} == before and progress.titles == []


async def test_only_hosts_that_differ_change(world: World) -> None:
    del world.agents["n2"].items["file /etc/default/slurmd"]
    before = asked(world.agents["n1"])
    done, _ = await bring(world)
    assert done.changed == ("n2",) and asked(world.agents["n1"]) == before


async def test_failed_host_drops_out_and_the_others_finish() -> None:
    world = lab()
    world.agents["n1"].failing["packages munge slurm-client slurmd nftables"] = "no space left on /var"
    progress = ProgressRecorder()
    done, failures = await bring(world, progress=progress)
    assert str(failures["n1"]) == (
        "n1: packages munge slurm-client slurmd nftables: no space left on /var\n"
        "  fix: see what `shoal ssh n1 apt-get install munge slurm-client slurmd nftables` says, "
        "then run `shoal up` again"
    )
    assert "n1" not in done.changed and "service slurmd" in world.agents["n2"].items
    assert "service slurmd" not in world.agents["n1"].items
    assert ("n1", "packages munge slurm-client slurmd nftables: no space left on /var") in progress.phases[0][1]
    assert done.unready == ()


async def test_host_lost_midway_drops_out() -> None:
    world = lab()
    world.hosts["n1"].lose_after_lines = 25
    _, failures = await bring(world)
    assert "the connection broke while it ran" in failures["n1"].cause
    assert "service slurmd" in world.agents["n2"].items


async def test_controller_failure_ends_the_run_before_the_nodes_and_hides_no_other_failure() -> None:
    world = lab()
    world.agents["c1"].failing["service slurmctld"] = "slurmctld did not start: fatal: bad config"
    with pytest.raises(AgentFailed, match="c1: service slurmctld: slurmctld did not start: fatal: bad config"):
        await bring(world)
    assert "service slurmd" not in world.agents["n1"].items
    world.agents["n2"].failing["user slurm"] = "the id 64030 belongs to user bob"
    with pytest.raises(ControllerFailed) as caught:
        await bring(world)
    assert str(caught.value) == (
        "c1: service slurmctld: slurmctld did not start: fatal: bad config\n"
        "and n2: user slurm: the id 64030 belongs to user bob "
        "(repair it on the host (`shoal ssh n2`), then run `shoal up` again)\n"
        "  fix: look at `shoal ssh c1 journalctl -u slurmctld`, then run `shoal up` again"
    )
    assert list(caught.value.failures) == ["c1", "n2"]
    for agent in world.agents.values():
        agent.failing.clear()
    done, failures = await bring(world)
    assert (done.unready, failures) == ((), {})


async def test_leaving_node_is_drained_and_removed_when_empty(world: World) -> None:
    world.slurm.jobs["7"] = "n[1-2]"
    done, _ = await bring(world, spec_of(WITHOUT_N2))
    assert done.staying == ("n2",) and world.slurm.nodes == ["n1", "n2"] and "Nodes=n[1-2]" in world.slurm.conf
    assert world.slurm.updates == [("nodename=n2", "state=drain", f"reason={LEAVING_REASON}")]
    world.slurm.jobs.clear()
    progress = ProgressRecorder()
    done, _ = await bring(world, spec_of(WITHOUT_N2), progress=progress)
    assert progress.titles == ["jobs on leaving nodes", "packages, keys, names", "controller", "nodes"]
    assert world.slurm.nodes == ["n1"] and done == ApplyResult(changed=("c1", "n1"))


async def test_jobs_of_a_leaving_node_are_awaited_without_a_limit(world: World) -> None:
    asked_for = 0

    def ends_soon(call: Call) -> bytes:
        nonlocal asked_for
        asked_for += "--nodelist" in call.argv
        world.slurm.jobs = {} if asked_for > 1 else {"7": "n2"}
        return world.slurm.squeue(call)  # type: ignore[return-value]

    world.hosts["c1"].answers |= {("squeue",): ends_soon}
    done, _ = await bring(world, spec_of(WITHOUT_N2), ApplyTimeouts(nodes_s=0, drain_s=None))
    assert done.staying == () and asked_for == 2 and world.slurm.nodes == ["n1"]


async def test_dead_slurmctld_is_repaired_before_a_drain(world: World) -> None:
    del world.agents["c1"].items["service slurmctld"]
    calls = 0

    def dead_once(call: Call) -> object:
        nonlocal calls
        calls += 1
        world.slurm.broken = "" if "service slurmctld" in world.agents["c1"].items else "Unable to contact slurmctld"
        return world.slurm.scontrol(call)

    world.hosts["c1"].answers |= {("scontrol",): dead_once}  # type: ignore[dict-item]
    done, _ = await bring(world, spec_of(WITHOUT_N2))
    assert world.slurm.updates == [("nodename=n2", "state=drain", f"reason={LEAVING_REASON}")]
    assert done.staying == () and world.slurm.nodes == ["n1"]


@cases(
    "state, reason, resumed, unready",
    ("IDLE+DRAIN", LEAVING_REASON, True, False),
    ("DOWN+NOT_RESPONDING", "Not responding", True, False),
    ("IDLE+DRAIN", "fan broken", False, False),
    ("DOWN+NOT_RESPONDING", "fan broken", False, True),
    ("DOWN+DRAIN+NOT_RESPONDING", "Not responding", False, True),
)
async def test_returning_node_is_resumed_unless_the_operator_drained_it_or_set_it_down(
    world: World, state: str, reason: str, resumed: bool, unready: bool
) -> None:
    world.slurm.states["n2"], world.slurm.reasons["n2"] = state, reason
    done, _ = await bring(world, timeouts=ApplyTimeouts(nodes_s=30) if resumed else ZERO_TIMEOUTS)
    assert world.slurm.updates == [("nodename=n2", "state=resume")] * resumed
    assert done.unready == (("n2", reason),) * unready


async def test_unregistered_nodes_are_reported_with_the_reason() -> None:
    world = lab()
    world.slurm.states = {"n1": "DOWN*", "n2": "UNKNOWN*"}
    world.slurm.reasons["n1"] = "Low RealMemory"
    done, failures = await bring(world)
    assert done.unready == (("n1", "Low RealMemory"), ("n2", "unknown+not_responding")) and failures == {}


async def test_restarting_slurmctld_is_awaited_and_a_silent_one_an_error_with_the_log_command(world: World) -> None:
    world.slurm.broken = "Unable to contact slurm controller"
    assert await error_of(SlurmError, bring(world)) == (
        "slurmctld on c1 does not answer: Unable to contact slurm controller\n"
        "  fix: look at `shoal ssh c1 journalctl -u slurmctld`"
    )
    asyncio.get_running_loop().call_later(0.3, setattr, world.slurm, "broken", "")
    done, _ = await bring(world, timeouts=ApplyTimeouts(nodes_s=30))
    assert done == ApplyResult()


async def test_slurm_is_queried_on_the_controller(world: World) -> None:
    host = world.hosts["c1"]
    world.slurm.jobs = {"7": "n1", "8_3": "n[1-2]"}
    assert await jobs_on(host, "n1") == ["7", "8_3"] and await jobs_on(host, "n2") == ["8_3"]
    assert await unready_nodes(host, ["n1", "n9"]) == {"n9": "not in Slurm's configuration"}
    view = await slurm_view(host)
    assert view.running and sorted(view.nodes) == ["n1", "n2"]
    assert [job.id for job in view.jobs if "n2" in job.node_names] == ["8_3"]
    world.slurm.broken = "down"
    assert not (await slurm_view(host)).running
    with pytest.raises(SlurmError, match="squeue on c1 failed: down"):
        await jobs_on(host, "n1")


@cases(
    "state, holds, loses",
    ("RUNNING", True, True),
    ("SUSPENDED", True, True),
    ("CONFIGURING", True, True),
    ("COMPLETING", True, False),
    ("PENDING", False, False),
)
async def test_job_holds_its_node_until_completion_and_is_active_until_its_end(
    world: World, state: str, holds: bool, loses: bool
) -> None:
    world.slurm.jobs, world.slurm.job_states = {"7": "n1"}, {"7": state}
    assert (await jobs_on(world.hosts["c1"], "n1") == ["7"]) is holds
    assert (await active_jobs(world.hosts["c1"]) == ["7"]) is loses


async def test_nodes_that_take_jobs_are_not_resumed(world: World) -> None:
    await drain_nodes(world.hosts["c1"], ["n1"], "fan broken")
    await resume_nodes(world.hosts["c1"], ["n1", "n2"])
    assert world.slurm.updates[1:] == [("nodename=n1", "state=resume")]
    await resume_nodes(world.hosts["c1"], ["n1", "n2"])
    assert len(world.slurm.updates) == 2


async def test_slurm_error_is_quoted(world: World) -> None:
    assert await error_of(SlurmError, drain_nodes(world.hosts["c1"], ["n8", "n9"], "why not")) == (
        "c1: Slurm rejected `scontrol update nodename=n[8-9] state=drain`: "
        "slurm_update error: Invalid node name specified\n"
        "  fix: `shoal status` shows the nodes that Slurm knows; `shoal up` repairs the rest"
    )
