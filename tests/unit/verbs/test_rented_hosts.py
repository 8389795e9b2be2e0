"""A rented controller and login host against simulated clouds without hosts, killed before and after every call."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.fake_clusters import AT_ONCE
from tests.support.fake_world import World, host_facts

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import ProviderLogin
from shoal.cloud.service.machine_keys import ACTIVATE, PREPARE
from shoal.errors import HostKeyChanged, ProviderError, Unreachable, UsageError
from shoal.hosts.api import Host, Target
from shoal.hosts.provider import Request
from shoal.spec.member import RentedMachine, Shape
from shoal.spec.members import members
from shoal.spec.model import UNCHECKED, Spec
from shoal.verbs.context import Context
from shoal.verbs.down import down
from shoal.verbs.reap import Polling
from shoal.verbs.rented_hosts import HostPolling, RentedHosts
from shoal.verbs.rented_record import RentedHostRecords, placements
from shoal.verbs.up import plan, up
from shoal_simulators import find_simulator
from shoal_simulators.backend import NoHosts
from shoal_simulators.fake_host import Call, FakeHost
from shoal_simulators.instances import Fault
from shoal_simulators.market import Market
from shoal_simulators.server import SimulatorApp, serve

STEP = 4
"""A kill at every fourth call; those between are in the matrix."""
CLUSTER = "reef"
MACHINES = {
    "gcp": RentedMachine("e2-standard-2", zone="us-central1-a", disk_gb=50),
    "aws": RentedMachine("c7i.large", region="us-east-1", disk_gb=50),
}
SECRETS = {"gcp": "key", "aws": "AKIDEXAMPLE:key"}
SETTINGS = {"gcp": {"project": "p"}, "aws": {"regions": "us-east-1 us-west-2"}}
OWN_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI"
NAMES = ("controller", "login1")


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Knife:
    """Kills the process at one of its calls, before or after its effect; later calls fail, too."""

    at: int = -1
    after: bool = False
    calls: int = 0
    dead: bool = False

    async def call(self, work: Any) -> Any:
        if self.dead or (self.calls == self.at and not self.after):
            self.dead = True
            work.close()
            raise Killed
        self.calls += 1
        result = await work
        if self.calls - 1 == self.at:
            self.dead = True
            raise Killed
        return result


@dataclass
class Cloud:
    """A simulated cloud, its machines' host keys, and a clock that sleeping moves."""

    kind: str
    market: Market
    url: str
    tick: list[float]
    identity: Path
    """The operator's key."""
    own: set[str] = field(default_factory=set)
    """Machines that have their own host key."""
    knife: Knife = field(default_factory=Knife)

    def hosts(self) -> RentedHosts:
        """What a new process has."""
        settings = {**SETTINGS[self.kind], "request_interval": "0", "create_interval": "0"}
        login = ProviderLogin("acme", self.kind, SECRETS[self.kind], self.url, settings)
        polling = HostPolling(3.0, self._sleep, lambda: self.tick[0])
        identities = dict.fromkeys(NAMES, self.identity)
        return RentedHosts(CLUSTER, "acme", lambda: login, lambda: self, ("tcp:22",), identities, self._open, polling)

    async def _sleep(self, seconds: float) -> None:
        self.tick[0] += seconds
        await asyncio.sleep(0)

    def _open(self, login: ProviderLogin) -> Any:
        return Cut(rental_provider(login), self.knife)

    async def connect(self, target: Target) -> Host:
        return await self.knife.call(self._connect(target))  # type: ignore[no-any-return]

    async def _connect(self, target: Target) -> Host:
        machines = [one for one in self.market.list_instances() if one.host == target.address and one.phase == "up"]
        if not machines:
            raise Unreachable(target.name, "no route to host")
        order = machines[0].order
        key = re.search(r"echo '(ssh-ed25519 [^']+)'", order.user_data)
        assert key is not None
        shown = f"{OWN_KEY}{machines[0].id}" if machines[0].id in self.own else key[1]
        if target.host_key not in (None, shown):
            raise HostKeyChanged(target.name, "another key", hint="")
        return FakeHost(target, lambda call: self._run(machines[0].id, call))

    def _run(self, id: str, call: Call) -> bytes:
        if call.argv == ACTIVATE:
            self.own.add(id)
            return b""
        assert call.argv == PREPARE
        return f"{OWN_KEY}{id}\n".encode()

    @property
    def live(self) -> list[str]:
        return sorted(one.order.name for one in self.market.instances.values() if one.live)

    @property
    def addresses(self) -> list[str]:
        return sorted(one["address"] for one in self.market.notes.get("addresses", {}).values())


class Cut:
    """A client whose calls the knife may cut."""

    def __init__(self, client: Any, knife: Knife) -> None:
        self._client, self._knife = client, knife
        self.abilities = client.abilities

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name == "close":
            return method
        return lambda *arguments: self._knife.call(method(*arguments))


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "id_ed25519.pub").write_text("ssh-ed25519 AAAA me\n")
    return tmp_path


@pytest.fixture(params=sorted(MACHINES))
async def cloud(request: pytest.FixtureRequest, home: Path) -> AsyncIterator[Cloud]:
    async with open_cloud(request.param, home) as made:
        yield made


@asynccontextmanager
async def open_cloud(kind: str, home: Path) -> AsyncIterator[Cloud]:
    tick = [1_800_000_000.0]
    simulator = find_simulator(kind)
    profile = simulator.profile.adjusted(real_hosts=True, boot_s=1.0)
    market = Market(profile, simulator.types, NoHosts(), clock=lambda: tick[0])
    async with serve(SimulatorApp(simulator(market), limited=False)) as url:
        yield Cloud(kind, market, url, tick, home / "id_ed25519")


def requests(cloud: Cloud, names: Sequence[str] = NAMES) -> list[Request]:
    return [Request(name, Shape(), MACHINES[cloud.kind]) for name in names]


def silent(what: str, done: float) -> None:
    """Progress is not shown."""


async def test_hosts_are_rented_once_with_reserved_addresses_and_their_own_keys(cloud: Cloud) -> None:
    quotes = await cloud.hosts().quote(requests(cloud))
    assert [(quote.name, quote.usd_hour, quote.disk_gb) for quote in quotes] == [(name, None, 50) for name in NAMES]
    assert cloud.live == []
    made = await cloud.hosts().create(CLUSTER, requests(cloud), silent)
    assert [(one.name, one.state, one.type) for one in made] == [
        (name, "running", MACHINES[cloud.kind].type) for name in NAMES
    ]
    assert sorted(str(one.target.address) for one in made) == cloud.addresses
    assert len(cloud.live) == 2
    assert len(cloud.own) == 2
    records = RentedHostRecords.read(CLUSTER).hosts
    assert all(record.host_key.startswith(OWN_KEY) and not record.next_key for record in records.values())
    assert sorted(at.address for at in placements(CLUSTER).values()) == cloud.addresses
    again = await cloud.hosts().create(CLUSTER, requests(cloud), silent)
    assert [one.target for one in again] == [RentedHostRecords.read(CLUSTER).hosts[name].target(name) for name in NAMES]
    assert len(cloud.live) == 2


@cases("reserved", True, False)
async def test_stopped_machine_starts_with_its_address_if_that_is_reserved(cloud: Cloud, reserved: bool) -> None:
    free = [Request("controller", Shape(), RentedMachine(MACHINES[cloud.kind].type, keep_address=False))]
    asked = requests(cloud, ["controller"]) if reserved else free
    [made] = await cloud.hosts().create(CLUSTER, asked, silent)
    assert len(cloud.addresses) == reserved
    [machine] = [one for one in cloud.market.instances.values() if one.live]
    cloud.market.stop(machine.id)
    [listed] = await cloud.hosts().instances(CLUSTER)
    assert listed.state == "stopped"
    [started] = await cloud.hosts().create(CLUSTER, asked, silent)
    assert (started.target.address == made.target.address) is reserved
    assert placements(CLUSTER)["controller"].address == started.target.address
    assert len(cloud.market.instances) == 1


async def test_everything_is_given_back(cloud: Cloud) -> None:
    await cloud.hosts().create(CLUSTER, requests(cloud), silent)
    await cloud.hosts().delete(CLUSTER, ["login1"], silent)
    assert len(cloud.live) == len(cloud.addresses) == 1
    await cloud.hosts().destroy(CLUSTER, silent)
    assert (cloud.live, cloud.addresses, RentedHostRecords.read(CLUSTER).hosts) == ([], [], {})


@cases("after", False, True)
@cases("first", 0, *(pytest.param(call, marks=pytest.mark.matrix) for call in range(1, STEP)))
async def test_killed_at_any_call_nothing_is_ordered_twice_or_left(cloud: Cloud, first: int, after: bool) -> None:
    """The next run adopts what there is; `destroy`, killed as often, leaves nothing."""
    one, cuts = requests(cloud, ["controller"]), first
    while True:
        cloud.knife = Knife(cuts, after)
        with suppress(Killed):
            await cloud.hosts().create(CLUSTER, one, silent)
        killed, cloud.knife = cloud.knife.dead, Knife()
        if killed:
            await cloud.hosts().create(CLUSTER, one, silent)
        assert len(cloud.live) == 1, f"killed at call {cuts}: {cloud.live}"
        assert len(cloud.addresses) == 1, f"killed at call {cuts}: {cloud.addresses}"
        cloud.knife = Knife(cuts % 8, after)
        with suppress(Killed):
            await cloud.hosts().destroy(CLUSTER, silent)
        cloud.knife = Knife()
        await cloud.hosts().destroy(CLUSTER, silent)
        assert (cloud.live, cloud.addresses) == ([], []), f"killed at call {cuts}"
        assert not RentedHostRecords.read(CLUSTER).hosts
        if not killed:
            break
        cuts += STEP
    assert cuts > 10


async def test_host_that_a_killed_run_ordered_is_finished_by_the_next(cloud: Cloud) -> None:
    """It runs by then, and lacks its reserved address and its own host key."""
    one, cuts, seen = requests(cloud, ["controller"]), 0, set[str]()
    while not cloud.own:
        cloud.knife = Knife(cuts, after=True)
        with suppress(Killed):
            await cloud.hosts().create(CLUSTER, one, silent)
        cloud.knife, cuts = Knife(), cuts + 1
        cloud.tick[0] += 3600.0
        seen |= {instance.state for instance in await cloud.hosts().instances(CLUSTER)}
    assert seen == {"starting"}
    await cloud.hosts().create(CLUSTER, one, silent)
    [instance] = await cloud.hosts().instances(CLUSTER)
    assert (instance.state, [instance.target.address]) == ("running", cloud.addresses)


async def test_lost_answer_makes_one_machine(cloud: Cloud) -> None:
    cloud.market.faults.append(Fault("error-after-create"))
    cloud.market.faults.append(Fault("lagging-list", seconds=20))
    await cloud.hosts().create(CLUSTER, requests(cloud, ["controller"]), silent)
    assert len(cloud.market.instances) == 1


async def test_full_zone_is_followed_by_the_next_one_of_the_region(cloud: Cloud) -> None:
    anywhere = RentedMachine(MACHINES[cloud.kind].type, region={"gcp": "us-central1", "aws": "us-east-1"}[cloud.kind])
    cloud.market.faults.append(Fault("stockout"))
    [made] = await cloud.hosts().create(CLUSTER, [Request("controller", Shape(), anywhere)], silent)
    assert made.place == {"gcp": "us-central1-b", "aws": "us-east-1b"}[cloud.kind]
    assert len(cloud.addresses) == 1


async def test_rejected_order_is_reported_and_its_address_given_back_by_down(cloud: Cloud) -> None:
    cloud.market.faults.append(Fault("quota"))
    with pytest.raises(ProviderError, match="acme does not rent it out") as caught:
        await cloud.hosts().create(CLUSTER, requests(cloud, ["controller"]), silent)
    assert set(caught.value.hosts) == {"controller"}
    await cloud.hosts().destroy(CLUSTER, silent)
    assert (cloud.live, cloud.addresses) == ([], [])


async def test_two_operators_at_once_end_with_one_machine(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run that saw nothing yet orders, too; the next run deletes the younger machine."""
    await cloud.hosts().create(CLUSTER, requests(cloud, ["controller"]), silent)
    first = cloud.live
    twin = cloud.hosts()
    await twin.quote(requests(cloud, ["controller"]))
    free = [Request("controller", Shape(), RentedMachine(MACHINES[cloud.kind].type, keep_address=False))]
    async with twin._client() as (client, login):
        from shoal.verbs.rented_hosts import _Run

        await cloud._sleep(10)
        records = RentedHostRecords(CLUSTER)
        monkeypatch.setattr(records, "update", lambda name, **fields: None)
        await _Run(twin, client, login, records, silent)._order(free[0])
    assert len(cloud.live) == 2
    await cloud.hosts().create(CLUSTER, requests(cloud, ["controller"]), silent)
    assert cloud.live == first


# The verbs


def rented_world(cloud: Cloud) -> tuple[World, Context]:
    """A cluster in memory whose hosts the simulated cloud rents out. Fake agents know no WireGuard."""
    rented = {"provider": "acme", "type": "e2-standard-2", "usd_hour": 0.07, "image": "debian-12"}
    data = {
        "cluster": CLUSTER,
        "providers": {"acme": {"kind": "gcp", "project": "p", "url": cloud.url, "key": "env:ACME_KEY"}},
        "controller": {**rented, "zone": "us-central1-a", "compute": True},
        "login": rented,
    }
    spec = Spec.model_validate(data, context=UNCHECKED)
    facts = {name: host_facts(name, f"10.0.0.{number}") for number, name in enumerate(NAMES, 1)}
    world = World(spec, facts)
    return world, Context(spec, connector=world.connector, registry=lambda: (), accounts={"acme": cloud.hosts()})


async def test_plan_shows_the_price_and_up_asks_rents_and_builds(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_KEY", "key")
    async with open_cloud("gcp", home) as cloud:
        world, context = rented_world(cloud)
        shown = await plan(context)
        told = (
            "rent from acme: e2-standard-2 in us-central1-a with a disk of 100 GB and a reserved address: $0.07 an hour"
        )
        assert [(change.host, change.action) for change in shown.changes] == [(name, told) for name in NAMES]
        assert "together $0.14 an hour" in shown.findings[-1].what
        with pytest.raises(UsageError, match="this rents controller from acme"):
            await up(context, AT_ONCE)
        assert (cloud.live, cloud.addresses) == ([], [])
        result = await up(context, AT_ONCE, rent=True)
        assert (result.created, result.changed, result.failures) == (NAMES, NAMES, {})
        placed = members(context.spec)
        assert [member.address for member in placed] == [placements(CLUSTER)[name].address for name in NAMES]
        assert {target.user for target in (await context.targets()).values()} == {"ubuntu"}
        world.look_again()
        again = await up(context, AT_ONCE)
        assert (again.created, len(cloud.live)) == ((), 2)

        assert isinstance(context.known, Spec)
        smaller = context.known.model_copy(update={"login": None})
        world.look_again()
        removed = await up(replace(context, known=smaller), AT_ONCE)
        assert removed.removed == ("login1",)
        assert len(cloud.live) == len(cloud.addresses) == 1

        world.hosts["controller"].unreachable = True  # fake agents keep no ledger
        polling = Polling(sleep=cloud._sleep)
        gone = await down(replace(context, known=smaller), force=True, polling=polling)
        assert gone.deleted == ("controller",)
        assert (cloud.live, cloud.addresses) == ([], [])
