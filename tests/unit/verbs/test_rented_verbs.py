"""`shoal down` gives rented machines back and proves it; `shoal status` shows what is rented and why jobs wait."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.contract.renters import CASES, KEY, Trial, trial
from tests.unit.plan.fake_world import LAB, World, lab, spec_of
from tests.unit.verbs.test_verbs import context_of, raised

from shoal.cli.render_rented import rented_lines
from shoal.elastic.status import STATUS
from shoal.errors import ProviderError
from shoal.hosts.api import Result, Target
from shoal.hosts.fake import FakeHost
from shoal.verbs import reap
from shoal.verbs.context import Context
from shoal.verbs.down import down
from shoal.verbs.rented import RentedView, rented_view

SERVICE = ("systemctl", "stop", "shoal-elastic"), ("systemctl", "start", "shoal-elastic")


def rented_lab(url: str) -> str:
    cloud = "  cloud: {provider: acme, type: gpu-2, max: 2, cpus: 2, memory: 1G}\n"
    accounts = f"providers: {{acme: {{kind: sandbox, key: env:ACME_KEY, url: '{url}'}}}}\n"
    return LAB.replace("nodesets:\n", f"nodesets:\n{cloud}", 1).replace("[lab]", "[lab, cloud]") + accounts


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reap, "PAUSE", 0.0)
    monkeypatch.setenv("ACME_KEY", KEY)


async def a_cluster(cloud: Trial) -> tuple[World, Context]:
    """One that is up and has rented a machine; another cluster has one at the same account."""
    world = lab()
    await raised(world)
    world.hosts["c1"].answers |= {line: b"" for line in SERVICE}
    assert (await cloud.create("cloud1", "t0ken1", "reef")).ok
    assert (await cloud.create("cloud1", "t0ken2", "other")).ok
    return world, context_of(world, rented_lab(cloud.url))


async def time_passes(cloud: Trial) -> None:
    while True:
        cloud.clock.now += 30
        await asyncio.sleep(0.01)


async def test_down_gives_back_what_is_rented_and_touches_nobody_elses() -> None:
    async with trial(CASES["sandbox"]) as cloud:
        world, context = await a_cluster(cloud)
        [machine] = await cloud.listed("reef")
        passing = asyncio.create_task(time_passes(cloud))
        result = await down(context)
        passing.cancel()
        assert result.given_back == (f"cloud1 (acme {machine.id})",)
        assert result.findings == () and result.released == ("c1", "n1", "n2")
        assert await cloud.listed("reef") == []
        assert len(await cloud.listed("other")) == 1
        assert SERVICE[0] in world.hosts["c1"].argvs


async def test_a_provider_that_cannot_be_asked_keeps_the_controller_at_work() -> None:
    async with trial(CASES["sandbox"]) as cloud:
        world, context = await a_cluster(cloud)
        cloud.fault("list-fails", -1)
        with pytest.raises(ProviderError) as caught:
            await down(context)
        assert "rented machines may be left (not known): acme: " in str(caught.value)
        assert "say --force, and see to them with `shoal reap`" in str(caught.value)
        assert world.hosts["c1"].argvs[-1] == SERVICE[1]
        assert "service slurmd" in world.agents["n1"].items
        forced = await down(context, force=True)
        assert forced.released == ("c1", "n1", "n2")
        [told] = forced.findings
        assert told.level == "error" and "rented machines may be left: acme: " in told.what


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
    return await rented_view(spec_of(rented_lab("http://10.0.0.1:1")), host, lambda: now)


async def test_status_tells_every_machine_what_it_costs_and_what_is_wrong() -> None:
    found = await view(json.dumps(SAID))
    assert found is not None and found.waiting == {"7": "acme us-1 out of gpu-2, trying other us-2"}
    assert list(rented_lines(found)) == [
        "rented: 4 machines, [bold]$1.20 an hour[/]",
        "  cloud[1-2]: gpu-2 at acme us-1 (spot), in use, $0.40 an hour each",
        "  cloud3: gpu-2 at acme us-1 (spot), being given back, $0.40 an hour each",
        "  cloud3: gpu-2 at acme us-1 (spot), booting, price unknown",
        "  [yellow]other[/]: the key is not accepted",
    ]


@pytest.mark.parametrize(
    ("text", "now", "problem"),
    [
        (None, 1060.0, "shoal-elastic has said nothing yet; run `shoal up`"),
        ("no json", 1060.0, "this is no status of shoal-elastic.service"),
        ("[]", 1060.0, "this is no status of shoal-elastic.service"),
        (json.dumps(SAID), 1600.0, "shoal-elastic has said nothing for 10 minutes; run `shoal up`"),
    ],
)
async def test_a_service_that_says_nothing_is_told_of(text: str | None, now: float, problem: str) -> None:
    found = await view(text, now)
    assert found is not None and found.problem == problem
    assert f"rented: [red]{problem}[/]" in list(rented_lines(found))


async def test_a_cluster_that_rents_nothing_has_nothing_to_tell() -> None:
    assert await rented_view(spec_of(LAB), FakeHost(Target("c1"), {})) is None
