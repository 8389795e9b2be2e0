"""`shoal down` releases rented machines and proves it; `shoal status` shows rentals and why jobs wait."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.contract.rental_providers import CASES, KEY, Trial, trial
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import AT_ONCE, context_of, raised_lab
from tests.support.fake_renters import READ_LEDGER, ledger_row
from tests.support.fake_world import LAB, World, spec_of

from shoal.agent.facts import FileFact
from shoal.cli.cluster_screens import rented_lines
from shoal.cloud.status_file import STATUS
from shoal.errors import ProviderError, ShoalError
from shoal.hosts.api import Result, Target
from shoal.roles.orphaned_rentals import ACCOUNTS
from shoal.spec.finding import Finding
from shoal.verbs import reap
from shoal.verbs.context import Context
from shoal.verbs.cost import COMMAND
from shoal.verbs.down import RentedCost, down
from shoal.verbs.rentals import LedgerRental, RentedView, rented_view
from shoal.verbs.up import plan, up
from shoal_simulators.fake_host import Call, FakeHost, FakeProgram

SERVICE = ("systemctl", "stop", "shoal-elastic"), ("systemctl", "start", "shoal-elastic")


def rented_lab(url: str) -> str:
    cloud = "  cloud: {provider: acme, type: gpu-2, max: 2, cpus: 2, memory: 1G}\n"
    accounts = f"providers: {{acme: {{kind: sandbox, key: env:ACME_KEY, url: '{url}'}}}}\n"
    return LAB.replace("nodesets:\n", f"nodesets:\n{cloud}", 1).replace("[lab]", "[lab, cloud]") + accounts


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reap, "POLLING", reap.Polling(sleep=quickly))
    monkeypatch.setenv("ACME_KEY", KEY)


async def quickly(seconds: float) -> None:
    await asyncio.sleep(0.001)


async def a_cluster(cloud: Trial) -> tuple[World, Context]:
    """One that is up and has rented a machine; another cluster has one at the same account."""
    world, _ = await raised_lab()
    world.hosts["c1"].answers |= {line: b"" for line in SERVICE} | {READ_LEDGER: b'{"machines": []}'}
    world.hosts["c1"].answers |= {COMMAND: b'{"nodes": 420000, "hosts": 0, "unpriced": []}'}
    assert (await cloud.create("cloud1", "t0ken1", "reef")).ok
    assert (await cloud.create("cloud1", "t0ken2", "other")).ok
    return world, context_of(world, rented_lab(cloud.url))


@pytest.fixture
async def cloud() -> AsyncIterator[Trial]:
    async with trial(CASES["sandbox"]) as made:
        yield made


@asynccontextmanager
async def time_passes(cloud: Trial) -> AsyncIterator[None]:
    async def pass_time() -> None:
        while True:
            cloud.clock.now += 30
            await asyncio.sleep(0.01)

    passing = asyncio.create_task(pass_time())
    yield
    passing.cancel()


async def test_down_releases_rented_machines_of_this_cluster_only(cloud: Trial) -> None:
    world, context = await a_cluster(cloud)
    [machine] = await cloud.listed("reef")
    async with time_passes(cloud):
        result = await down(context)
    assert result.given_back == (f"cloud1 (acme {machine.id})",)
    assert result.cost == RentedCost(0.42, 0.0, 0.42)
    assert result.findings == () and result.released == ("c1", "n1", "n2")
    assert await cloud.listed("reef") == []
    assert len(await cloud.listed("other")) == 1
    assert SERVICE[0] in world.hosts["c1"].argvs


async def test_controller_without_the_service_needs_no_force(cloud: Trial) -> None:
    world, context = await a_cluster(cloud)
    world.hosts["c1"].answers |= {SERVICE[0]: Result(5, stderr=b"Unit shoal-elastic.service not loaded.\n")}
    async with time_passes(cloud):
        result = await down(context)
    assert (result.findings, len(result.given_back)) == ((), 1)


async def test_unreachable_provider_keeps_the_controller_running(cloud: Trial) -> None:
    world, context = await a_cluster(cloud)
    cloud.fault("list-fails", -1)
    with pytest.raises(ProviderError) as caught:
        await down(context)
    assert "rented machines may be left (not known): acme: " in str(caught.value)
    assert "use --force, and release them with `shoal reap`" in str(caught.value)
    world.hosts["c1"].answers |= {SERVICE[1]: Result(1, stderr=b"Failed to start")}
    assert "; start shoal-elastic on the controller, Failed to start. Or use --force" in await error_of(
        ProviderError, down(context)
    )
    assert world.hosts["c1"].argvs[-1] == SERVICE[1]
    assert "service slurmd" in world.agents["n1"].items
    forced = await down(context, force=True)
    assert forced.released == ("c1", "n1", "n2")
    [told] = forced.findings
    assert told.level == "error" and "rented machines may be left: acme: " in told.what


@cases("ending", asyncio.CancelledError(), RuntimeError("a bug"))
async def test_interrupted_release_restarts_the_service(
    cloud: Trial, ending: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C cancels; what is rented by then must not be left to itself."""
    world, context = await a_cluster(cloud)

    async def ends(*_: object) -> None:
        raise ending

    monkeypatch.setattr(reap, "record_ended", ends)
    async with time_passes(cloud):
        with pytest.raises(type(ending)):
            await down(context, force=True)
    assert world.hosts["c1"].argvs[-1] == SERVICE[1]
    assert "service slurmd" in world.agents["n1"].items


async def test_second_cancel_does_not_prevent_the_service_restart(cloud: Trial) -> None:
    world, context = await a_cluster(cloud)
    waits, starting, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def for_ever(seconds: float) -> None:
        waits.set()
        await asyncio.Event().wait()

    async def slowly(program: FakeProgram) -> int:
        starting.set()
        await go_on.wait()
        return 0

    world.hosts["c1"].answers |= {SERVICE[1]: slowly}
    work = asyncio.create_task(down(context, polling=reap.Polling(sleep=for_ever)))
    await waits.wait()
    work.cancel()
    await starting.wait()
    work.cancel()
    await asyncio.sleep(0)
    assert not work.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_service_that_cannot_be_stopped_ends_down_unless_forced(cloud: Trial) -> None:
    world, context = await a_cluster(cloud)
    world.hosts["c1"].answers |= {SERVICE[0]: Result(1, stderr=b"Failed to stop: Connection timed out\n")}
    assert await error_of(ShoalError, down(context)) == (
        "cannot stop shoal-elastic, which would rent again for jobs in the queue: "
        "Failed to stop: Connection timed out\n"
        "  fix: solve that first; or use --force, and then release what it rents with `shoal reap`"
    )
    assert len(await cloud.listed("reef")) == 1
    async with time_passes(cloud):
        forced = await down(context, force=True)
    assert [str(finding) for finding in forced.findings] == [
        "c1: cannot stop shoal-elastic, which may rent again for jobs in the queue, "
        "found Failed to stop: Connection timed out, switch the controller off, then run `shoal reap`"
    ]
    assert (len(forced.given_back), forced.released) == (1, ("c1", "n1", "n2"))


async def test_machine_only_in_the_ledger_keeps_the_controller_unless_forced(cloud: Trial) -> None:
    world, context = await a_cluster(cloud)
    ledger_has(world, LedgerRental("t0ken9", "cloud2", account="acme", id="i-9", state="joined", age=0.0))
    why = "acme: the ledger has acme i-9, this key's list does not show it: is it the right key or project?"
    async with time_passes(cloud):
        assert f"rented machines may be left (acme i-9): {why}\n" in await error_of(ProviderError, down(context))
        assert world.hosts["c1"].argvs[-1] == SERVICE[1]
        forced = await down(context, force=True)
    assert [(one.level, one.what, one.found) for one in forced.findings] == [
        ("error", f"rented machines may be left: {why}", "acme i-9")
    ]
    assert not any("t0ken9" in json.loads(call.stdin)["ended"] for call in ledger_calls(world))


# ---- machines that the file no longer names


def ledger_has(world: World, *rows: LedgerRental) -> None:
    world.hosts["c1"].answers |= {READ_LEDGER: json.dumps({"machines": [ledger_row(row) for row in rows]}).encode()}


def ledger_calls(world: World) -> list[Call]:
    return [call for call in world.hosts["c1"].calls if call.argv[: len(READ_LEDGER)] == READ_LEDGER]


def says(world: World, machines: dict[str, dict[str, str]], accounts: dict[str, object] | None = None) -> None:
    """The last status of the service on the controller, and its accounts."""
    agent = world.agents["c1"]
    texts = {str(STATUS): json.dumps({"at": 1.0, "machines": machines})}
    texts |= {ACCOUNTS: json.dumps(accounts)} if accounts else {}
    facts = {path: FileFact(sha256="0", text=text) for path, text in texts.items()}
    agent.facts = replace(agent.facts, files={**agent.facts.files, **facts})


ONE = {"t1": {"node": "cloud1", "account": "acme", "id": "i-1", "state": "joined"}}
ORDERED = {"t2": {"node": "cloud2", "account": "acme", "id": "", "state": "intended"}}
OTHER = rented_lab("http://10.0.0.1:1").replace("acme", "tide")
LEFT = (
    "rented machines would never be released, as the file has no account acme any more: "
    "cloud1 (acme i-1), cloud2 (acme on order)"
)


HERE, THERE = rented_lab("http://10.0.0.1:1"), rented_lab("http://10.0.0.2:1")
PUT_BACK = "put it back until they are released, or run `shoal reap` with the old file"


def acme(**settings: str) -> dict[str, object]:
    """The account of HERE, as the service has it."""
    return {"acme": {"kind": "sandbox", "url": "http://10.0.0.1:1", "settings": settings}}


def errors(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "error"]


async def test_down_is_rejected_for_machines_of_a_removed_account_unless_forced(world: World, context: Context) -> None:
    says(world, ONE | ORDERED)
    assert await error_of(ProviderError, down(context)) == (
        f"{LEFT}; nothing was changed\n  fix: {PUT_BACK}; or use --force, and delete them in the provider's console"
    )
    assert "service slurmd" in world.agents["n1"].items
    forced = await down(context, force=True)
    [told] = forced.findings
    assert (told.level, f"{told.what}: {told.found}", told.host) == ("error", LEFT, "c1")
    assert forced.released == ("c1", "n1", "n2")


@cases("text", LAB, OTHER, ids=["rents nothing", "rents elsewhere"])
async def test_up_is_rejected_before_any_change_and_plan_reports_the_same(world: World, text: str) -> None:
    says(world, ONE | ORDERED)
    for agent in world.agents.values():
        agent.requests.clear()
    assert await error_of(ProviderError, up(context_of(world, text), AT_ONCE)) == (
        f"{LEFT}; no host was changed\n"
        f"  fix: {PUT_BACK}; or use --leave-rented, and delete them in the provider's console"
    )
    assert world.applied() == []
    [told] = errors((await plan(context_of(world, text))).findings)
    assert (f"{told.what}: {told.found}", told.host) == (LEFT, "c1")


async def test_up_with_leave_rented_ends_the_ledger_rows(world: World, context: Context) -> None:
    says(world, ONE)
    ledger_has(world)
    result = await up(context, AT_ONCE, leave_rented=True)
    assert [finding.level for finding in result.findings] == ["error"]
    [call] = ledger_calls(world)
    assert json.loads(call.stdin) == {"ended": {"t1": ["joined", 0.0]}}


@cases(
    "before, after, row, why",
    (LAB, LAB, {}, "the file has no account acme any more"),
    (HERE, THERE, {}, "account acme is another one in the file now"),
    (HERE, HERE, {}, ""),
    (HERE, THERE, {"id": "i-1", "state": "made", "of_now": True}, ""),
    ids=["removed", "moved", "the same", "made with the moved account"],
)
async def test_order_made_while_up_changes_its_account_is_reported(
    before: str, after: str, row: dict[str, Any], why: str
) -> None:
    world, _ = await raised_lab(before)
    says(world, {}, acme())
    ordered = LedgerRental("t1", "cloud1", account="acme", id="", state="intended", age=0.0)
    ledger_has(world, replace(ordered, **row), replace(ordered, token="t2", node="cloud2", state="failed", age=50.0))
    found = errors((await up(context_of(world, after), AT_ONCE)).findings)
    assert [(one.what, one.found, one.fix) for one in found] == (
        [(f"rented machines would never be released, as {why}", "cloud1 (acme on order)", PUT_BACK)] if why else []
    )


@cases(
    "text, why",
    (THERE, "as account acme is another one in the file now"),
    (HERE.replace("key:", "project: p2, key:"), "as account acme is another one"),
    (HERE.replace("key:", "settings: {project: p2}, key:"), "as account acme is anoth"),
    (LAB + "providers: {acme: {kind: sandbox, url: 'http://10.0.0.1:1'}}\n", "as the file has no rented nodeset"),
    ids=["another place", "another project", "another project as a setting", "no nodeset"],
)
async def test_changed_account_or_removed_nodeset_blocks_up_with_live_machines(
    world: World, text: str, why: str
) -> None:
    says(world, ONE, acme(project="p1"))
    with pytest.raises(ProviderError, match=why):
        await up(context_of(world, text), AT_ONCE)


@cases(
    "settings, after",
    ({}, ""),
    ({}, "project: p1, "),
    ({"project": "p1"}, ""),
    ({"project": "p1"}, "settings: {project: p1}, "),
)
async def test_configured_account_blocks_nothing_and_its_project_may_be_implicit(
    world: World, settings: dict[str, str], after: str
) -> None:
    says(world, ONE | ORDERED, acme(**settings))
    assert errors((await plan(context_of(world, HERE.replace("key:", f"{after}key:")))).findings) == []


@cases("text", "", "no json", "[]", '{"machines": 5}', '{"machines": {"t": 7}}')
async def test_unreadable_status_does_not_block_up(world: World, text: str) -> None:
    agent = world.agents["c1"]
    agent.facts = replace(agent.facts, files={**agent.facts.files, str(STATUS): FileFact(sha256="0", text=text)})
    assert (await up(context_of(world, LAB), AT_ONCE)).findings == ()


async def test_smaller_nodeset_is_reported_with_the_released_machines() -> None:
    world, _ = await raised_lab(HERE)
    fewer = await plan(context_of(world, HERE.replace("max: 2", "max: 1")))
    assert [str(finding) for finding in fewer.findings if "cloud" in finding.what] == [
        "cloud2: no longer rented for the cluster; the controller releases their machines"
    ]
    assert not [finding for finding in fewer.findings if finding.host.startswith("cloud")]


async def test_job_on_a_removed_rented_node_blocks_up() -> None:
    """Its machine is released as soon as the service has the new file."""
    world, _ = await raised_lab(HERE)
    fewer = context_of(world, HERE.replace("max: 2", "max: 1"))
    world.slurm.jobs = {"6": "n1", "7": "cloud2"}
    world.look_again()
    assert await error_of(ShoalError, up(fewer, AT_ONCE)) == (
        "this change would end jobs (7); nothing was changed\n  fix: wait for them, or use --allow-job-loss"
    )
    world.slurm.jobs = {"6": "n1"}
    assert (await plan(fewer)).lost_jobs == ()


SAID = {
    "at": 1000.0,
    "problem": "",
    "accounts": {"acme": "", "other": "the key is not accepted"},
    "jobs": {"7": "acme us-1 out of gpu-2, trying other us-2"},
    "machines": {
        f"t0ken{number}": {
            "node": f"cloud{node}", "state": state, "since": 900.0, "usd_hour": price, "jobs": [],
            "account": "acme", "type": "gpu-2", "place": "us-1", "market": "spot", "id": f"i-{number}",
        }
        for number, (node, state, price) in enumerate(
            [(1, "joined", 0.4), (2, "joined", 0.4), (3, "releasing", 0.4), (3, "made", None)]
        )
    },
}  # fmt: skip


async def view(text: str | None, now: float = 1060.0) -> RentedView | None:
    answer = Result(1, stderr=b"No such file") if text is None else Result(0, stdout=text.encode())
    host = FakeHost(Target("c1"), {("cat", str(STATUS)): answer})
    return await rented_view(spec_of(HERE), host, lambda: now)


async def test_status_shows_every_machine_its_cost_and_problems() -> None:
    found = await view(json.dumps(SAID))
    assert found is not None and found.waiting == {"7": "acme us-1 out of gpu-2, trying other us-2"}
    assert list(rented_lines(found)) == [
        "rented: 4 machines, [bold]at least $1.20 an hour[/]",
        "  cloud[1-2]: gpu-2 at acme us-1 (spot), in use, $0.40 an hour each",
        "  cloud3: gpu-2 at acme us-1 (spot), being released, $0.40 an hour each",
        "  cloud3: gpu-2 at acme us-1 (spot), booting, price unknown",
        "  [yellow]other[/]: the key is not accepted",
    ]


@cases(
    "text, now, problem",
    (None, 1060.0, "shoal-elastic has written no status yet; run `shoal up`"),
    ("no json", 1060.0, f"{STATUS} is not a status of shoal-elastic; run `shoal up`"),
    ("[]", 1060.0, f"{STATUS} is not a status of shoal-elastic; run `shoal up`"),
    (json.dumps(SAID), 1600.0, "shoal-elastic has written no status for 10 minutes; run `shoal up`"),
)
async def test_silent_service_is_reported(text: str | None, now: float, problem: str) -> None:
    found = await view(text, now)
    assert found is not None and found.problem == problem
    assert f"rented: [red]{problem}[/]" in list(rented_lines(found))
    assert await rented_view(spec_of(LAB), FakeHost(Target("c1"), {})) is None
