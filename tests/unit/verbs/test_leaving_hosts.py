"""Hosts that leave: a finding names what stays on them, and instances of a provider are found and deleted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import AT_ONCE, Sandbox, context_of, raised, raised_lab
from tests.support.fake_world import LAB, World, lab

from shoal.errors import ControllerFailed, HostError, ProviderError, ShoalError, Unreachable
from shoal.hosts.provider import Request
from shoal.plan.model import Cost
from shoal.plan.progress import NoProgress
from shoal.spec.finding import Finding
from shoal.spec.member import Shape
from shoal.spec.members import default_spec
from shoal.verbs.check import check
from shoal.verbs.context import Context
from shoal.verbs.down import DownResult, down
from shoal.verbs.node import remove_node
from shoal.verbs.up import plan, up
from shoal_simulators.fake_provider import FakeProvider

WITHOUT_N2 = LAB.replace(", {name: n2, address: 10.0.0.12}", "")
GIVEN_BACK = (False, None)


def left_on(world: World, host: str) -> tuple[bool, Any]:
    """Whether slurmd runs there, and the content of the munge key."""
    items = world.agents[host].items
    return items["service slurmd"]["running"], items["file /etc/munge/munge.key"].get("content", "a key")


async def lab_with_file(tmp_path: Path) -> tuple[World, Context, Path]:
    world, _ = await raised_lab()
    file = tmp_path / "shoal.yaml"
    file.write_text(LAB)
    return world, replace(context_of(world), file=file), file


# ---- node remove


async def test_node_with_jobs_stays_in_the_file_until_a_later_run(tmp_path: Path) -> None:
    world, context, file = await lab_with_file(tmp_path)
    world.slurm.jobs["7"] = "n2"
    result = await remove_node(context, "n2", AT_ONCE)
    assert (result.staying, result.again, result.findings) == (("n2",), "shoal node remove n2", ())
    assert result.removed == () and left_on(world, "n2") == (True, "a key")
    assert file.read_text() == LAB
    world.slurm.jobs.clear()
    result = await remove_node(context, "n2", AT_ONCE)
    assert (result.removed, result.whole, world.slurm.nodes) == (("n2",), True, ["n1"])
    assert left_on(world, "n2") == GIVEN_BACK
    assert file.read_text() == WITHOUT_N2


class Killed(BaseException):
    """SIGKILL, as far as a test can have one."""


class KilledIn(NoProgress):
    """Progress that ends the run where a phase begins."""

    def __init__(self, title: str) -> None:
        self._title = title

    def phase(self, title: str, total: int) -> Any:
        if title == self._title:
            raise Killed
        return super().phase(title, total)


@cases("moment", "connect and read facts", "jobs on leaving nodes", "controller", "hosts released")
async def test_next_run_removes_the_node_after_a_kill_at_any_time(moment: str, tmp_path: Path) -> None:
    world, context, file = await lab_with_file(tmp_path)
    with pytest.raises(Killed):
        await remove_node(replace(context, progress=KilledIn(moment)), "n2", AT_ONCE)
    assert file.read_text() == LAB
    world.look_again()
    result = await remove_node(context, "n2", AT_ONCE)
    assert (result.removed, result.whole) == (("n2",), True)
    assert world.slurm.nodes == ["n1"]
    assert left_on(world, "n2") == GIVEN_BACK
    assert file.read_text() == WITHOUT_N2


async def test_unreachable_node_stays_in_the_file_with_the_fix(tmp_path: Path) -> None:
    world, context, file = await lab_with_file(tmp_path)
    world.hosts["n2"].unreachable = True
    result = await remove_node(context, "n2", AT_ONCE)
    assert list(result.failures) == ["n2"]
    assert [str(finding) for finding in result.findings] == [
        "n2: is removed from Slurm and still in the file, run `shoal node remove n2` again when it answers; "
        "if it is gone for good, remove it from the file by hand"
    ]
    assert (world.slurm.nodes, file.read_text()) == (["n1"], LAB)


async def test_concurrent_edits_of_the_file_are_kept(tmp_path: Path) -> None:
    _, context, file = await lab_with_file(tmp_path)

    class Edits(NoProgress):
        def phase(self, title: str, total: int) -> Any:
            file.write_text(LAB + "# a note\n")
            return super().phase(title, total)

    await remove_node(replace(context, progress=Edits()), "n2", AT_ONCE)
    assert file.read_text() == WITHOUT_N2 + "# a note\n"


# ---- what providers have


class Elsewhere:
    """A lab whose cluster's name also has hosts at a provider that the file does not name."""

    def __init__(self) -> None:
        self.cloud = FakeProvider()
        self.world = lab()

    async def stray(self) -> None:
        await self.cloud.create("reef", [Request("gpu1", Shape()), Request("gpu2", Shape())], lambda text, part: None)

    def context(self, text: str | None = None) -> Context:
        return context_of(self.world, text, providers=lambda name: self.cloud, registry=lambda: ("cloud",))


async def test_provider_hosts_missing_from_the_file_are_planned_and_deleted() -> None:
    it = Elsewhere()
    assert (await up(it.context(), AT_ONCE)).whole
    it.world.look_again()
    await it.stray()
    assert (await plan(it.context())).delete == (("cloud", "gpu1"), ("cloud", "gpu2"))
    assert [(f.level, f.what) for f in await check(it.context())] == [("info", "changes are due on gpu[1-2]")]
    assert (await up(it.context(), AT_ONCE)).removed == ("gpu1", "gpu2")
    assert it.cloud.clusters == {}


async def test_down_deletes_provider_hosts_missing_from_the_file() -> None:
    it = Elsewhere()
    await it.stray()
    result = await down(it.context())
    assert result == DownResult("reef", deleted=("gpu1", "gpu2"), released=("c1", "n1", "n2"))
    assert it.cloud.clusters == {}


async def test_new_controller_does_not_delete_hosts_of_another_without_permission() -> None:
    it = Elsewhere()
    await it.stray()
    assert (await plan(it.context())).cost is Cost.JOBS
    assert await error_of(ShoalError, up(it.context(), AT_ONCE)) == (
        "gpu[1-2] would be deleted, and the new controller does not know which jobs run there; nothing was changed\n"
        "  fix: run `shoal down` with the old file first, give this cluster another name, or use --allow-job-loss"
    )
    assert len(it.cloud.clusters["reef"]) == 2
    assert (await up(it.context(), AT_ONCE, allow_job_loss=True)).removed == ("gpu1", "gpu2")


async def test_unreachable_provider_outside_the_file_is_a_warning() -> None:
    class Mute(FakeProvider):
        async def instances(self, cluster: str) -> list[Any]:
            raise ProviderError("no account", hint="log in to it")

    it = Elsewhere()
    it.cloud = Mute()
    said = Finding("warning", "cannot ask cloud whether it has hosts of cluster reef", "no account", "log in to it")
    result = await up(it.context(), AT_ONCE)
    assert (result.findings, result.whole) == ((said,), True)
    assert (await down(it.context())).findings == (said,)


async def test_equal_names_at_two_providers_are_two_hosts() -> None:
    sandbox, cloud = Sandbox(), FakeProvider()
    both = {"sandbox": sandbox.provider, "cloud": cloud}
    context = replace(sandbox.context(), providers=lambda name: both[name], registry=lambda: tuple(both))
    await up(context, AT_ONCE)
    sandbox.world.look_again()
    await cloud.create("reef", [Request("fish1", Shape())], lambda text, part: None)
    planned = await plan(context)
    assert (planned.create, planned.delete) == ((), (("cloud", "fish1"),))


async def test_changed_shape_is_a_warning_in_plan_up_and_check(sandbox: Sandbox) -> None:
    made = sandbox.provider.clusters["reef"]
    made["fish2"] = replace(made["fish2"], shape=replace(made["fish2"].shape, gpus=1))
    said = (
        "fish2: was made with 1 GPU; the file now says 2 GPUs, "
        "`shoal node remove` it, put it back into the file and run `shoal up` to remake it"
    )
    assert [str(finding) for finding in (await plan(sandbox.context())).findings] == [said]
    assert [str(finding) for finding in (await up(sandbox.context(), AT_ONCE)).findings] == [said]
    assert [str(finding) for finding in await check(sandbox.context())] == [said]
    assert sandbox.provider.clusters["reef"]["fish2"].shape.gpus == 1


# ---- hosts that cannot be made


async def test_failed_host_creation_does_not_stop_the_others() -> None:
    sandbox = Sandbox()
    sandbox.provider.failing["fish2"] = "no capacity"
    result = await up(sandbox.context(), AT_ONCE)
    assert (result.created, result.changed) == (("controller", "fish1"), ("controller", "fish1"))
    assert {name: str(error) for name, error in result.failures.items()} == {
        "fish2": "fish2: sandbox cannot create it: no capacity"
    }
    sandbox.world.look_again()
    sandbox.provider.failing.clear()
    again = await up(sandbox.context(), AT_ONCE)
    assert (again.created, again.whole) == (("fish2",), True)


async def test_failed_controller_creation_ends_the_run() -> None:
    class Closed(FakeProvider):
        async def create(self, *args: Any) -> list[Any]:
            raise ProviderError("closed for the night")

    sandbox = Sandbox()
    sandbox.provider.failing["controller"] = "no capacity"
    with pytest.raises(HostError, match="controller: sandbox cannot create it: no capacity"):
        await up(sandbox.context(), AT_ONCE)
    assert sandbox.world.applied() == []
    with pytest.raises(ProviderError, match="closed for the night"):
        await up(Context(default_spec("reef"), providers=lambda name: Closed()), AT_ONCE)


async def test_controller_failure_lists_every_failure() -> None:
    world = lab()
    world.hosts["c1"].unreachable = world.hosts["n2"].unreachable = True
    for verb in (up, plan):
        with pytest.raises(ControllerFailed) as caught:
            await verb(context_of(world))
        assert str(caught.value) == (
            "c1: does not answer within 10 s\nand n2: does not answer within 10 s (is the host up?)\n"
            "  fix: is the host up?"
        )
        assert list(caught.value.failures) == ["c1", "n2"]
    assert world.applied() == []


# ---- down, when it cannot ask


@cases(
    "fault, words, released",
    (
        "unreachable",
        "c1: does not answer within 10 s\n  fix: is the host up?; or use --force, which ends them",
        ("n1", "n2"),
    ),
    (
        "silent",
        "squeue on c1 failed: Unable to contact slurm controller\n"
        "  fix: look at `shoal ssh c1 journalctl -u slurmctld`; or use --force, which ends them",
        ("c1", "n1", "n2"),
    ),
    ("stopped", "slurmctld on c1 does not run (failed)", ("c1", "n1", "n2")),
)
async def test_down_is_rejected_when_it_cannot_ask_for_jobs(
    world: World, context: Context, fault: str, words: str, released: tuple[str, ...]
) -> None:
    facts = world.agents["c1"].facts
    world.hosts["c1"].unreachable = fault == "unreachable"
    world.slurm.broken = "Unable to contact slurm controller" if fault == "silent" else ""
    if fault == "stopped":
        world.agents["c1"].facts = replace(facts, services={**facts.services, "slurmctld": "failed"})
    assert (await error_of(ShoalError, down(context))).startswith(f"cannot ask whether jobs run: {words}")
    assert "service slurmd" in world.agents["n1"].items
    assert (await down(context, force=True)).released == released


async def test_down_needs_no_force_without_slurm() -> None:
    world = lab()
    assert (await down(context_of(world))).released == ("c1", "n1", "n2")
    await raised(world)
    await down(context_of(world))
    world.look_again()
    world.slurm.broken = "Unable to contact slurm controller"
    assert (await down(context_of(world))).released == ("c1", "n1", "n2")


async def test_stopped_sandbox_is_deleted_without_force(sandbox: Sandbox) -> None:
    for host in ("fish1", "fish2"):
        await sandbox.provider.faults.kill("reef", host)
    sandbox.world.hosts["controller"].unreachable = Unreachable("controller", "no route")
    with pytest.raises(ShoalError, match="cannot ask whether jobs run: controller: no route"):
        await down(sandbox.context())
    await sandbox.provider.faults.kill("reef", "controller")
    assert (await down(sandbox.context())).deleted == ("controller", "fish1", "fish2")
