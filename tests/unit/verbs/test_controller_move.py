"""A controller that moves takes the rental service along: the old one stops before the new one starts."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from tests.contract.rental_providers import KEY
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import AT_ONCE, context_of
from tests.support.fake_renters import READ_LEDGER, ledger_row
from tests.support.fake_world import World, host_facts, lab
from tests.support.specs import ONE_NODE

from shoal.agent.facts import FileFact
from shoal.cloud.status_file import STATUS
from shoal.errors import ProviderError, ShoalError
from shoal.hosts.api import Result, Target
from shoal.local_files import state_directory
from shoal.remote import python_command
from shoal.roles.elastic import SPEC, UNIT
from shoal.verbs.controller_move import RECORD
from shoal.verbs.rentals import LedgerRental
from shoal.verbs.up import plan, up
from shoal_simulators.fake_host import Call, FakeAgent, FakeConnector, FakeHost

CLOUD = (
    ONE_NODE
    + """\
  cloud: {provider: acme, type: gpu-2, max: 2, cpus: 2, memory: 1G}
partitions: {main: {nodesets: [lab, cloud], default: true}}
providers: {acme: {kind: sandbox, key: env:ACME_KEY, url: "http://10.0.0.9:1"}}
"""
)
MOVED = CLOUD.replace("name: c1, address: 10.0.0.1}", "name: c2, address: 10.0.0.2}")
STAYS = MOVED.replace("[{name: n1", "[{name: c1, address: 10.0.0.1}, {name: n1")
"""The old controller computes from now on."""
MOVE_LEDGER = python_command("rental_ledger_move")
STOP, START = ("systemctl", "stop", "shoal-elastic"), ("systemctl", "start", "shoal-elastic")
UP = LedgerRental("t1", "cloud1", account="acme", id="i-1", state="joined", age=0.0)
ORDERED = LedgerRental("t2", "cloud2", account="acme", id="", state="intended", age=0.0)
LEDGER = b'{"ledger": "bGVkZ2Vy", "since": 1000}\n'


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_KEY", KEY)


class Old:
    """The host that rented so far."""

    def __init__(self, world: World, cluster: str = "reef", machines: tuple[LedgerRental, ...] = ()) -> None:
        self.machines = machines
        self.agent = world.agents.get("c1") or FakeAgent(host_facts("c1", "10.0.0.1"))
        self.host = world.hosts.get("c1") or FakeHost(Target("c1"), {("python3",): self.agent.play})
        self.host.answers |= {READ_LEDGER: self._read, MOVE_LEDGER: LEDGER, STOP: self._stop, START: b""}
        world.connector = FakeConnector(*{**world.hosts, "c1": self.host}.values())
        spec, unit = json.dumps({"cluster": cluster}), "[Unit]\n"
        self.facts = {UNIT: FileFact(sha256="0", text=unit, there=True), SPEC: FileFact(sha256="0", text=spec)}
        self.agent.facts = replace(self.agent.facts, files={**self.agent.facts.files, **self.facts})
        self.on_stop: tuple[LedgerRental, ...] = ()
        """What it still orders before it is stopped."""

    @property
    def did(self) -> list[str]:
        """What was done there, in order."""
        names = {STOP: "stop", START: "start"}
        return [self._name(argv) or names[argv] for argv in self.host.argvs if argv in names or self._name(argv)]

    def _name(self, argv: tuple[str, ...]) -> str:
        return argv[len(MOVE_LEDGER)] if argv[: len(MOVE_LEDGER)] == MOVE_LEDGER else ""

    def _stop(self, call: Call) -> bytes:
        self.machines += self.on_stop
        return b""

    def _read(self, call: Call) -> bytes:
        return json.dumps({"machines": [ledger_row(one) for one in self.machines]}).encode()


def moving(text: str = STAYS) -> World:
    world = lab(text)
    world.hosts["c2"].answers |= {MOVE_LEDGER: b"", STOP: Result(5)}
    return world


def taken(world: World) -> list[Any]:
    """What the new controller was told to go on with."""
    calls = [call for call in world.hosts["c2"].calls if call.argv[: len(MOVE_LEDGER)] == MOVE_LEDGER]
    return [json.loads(call.stdin) for call in calls if "take" in call.argv]


def remember(name: str = "c1", address: str = "10.0.0.1") -> None:
    place = state_directory("reef") / RECORD
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps({**asdict(Target(name, address)), "identity": None}))


@cases("text", STAYS, MOVED, ids=["stays in the cluster", "left the file"])
async def test_old_service_stops_and_its_ledger_moves_before_the_new_service_starts(text: str) -> None:
    world = moving(text)
    old = Old(world)
    remember()
    assert (await up(context_of(world), AT_ONCE)).whole
    assert old.did == ["stop", "give"]
    assert taken(world) == [{"ledger": "bGVkZ2Vy", "since": 1000}]
    assert old.agent.items["service shoal-elastic"]["running"] is False
    assert old.agent.items[f"file {UNIT}"].get("content") is None
    stopped = world.hosts["c2"].argvs.index(STOP)
    assert stopped < next(i for i, argv in enumerate(world.hosts["c2"].argvs) if "take" in argv)
    assert json.loads((state_directory("reef") / RECORD).read_text())["name"] == "c2"


@cases("text", STAYS, MOVED, ids=["stays in the cluster", "left the file"])
async def test_controller_move_is_rejected_while_machines_are_rented(text: str) -> None:
    world = moving(text)
    old = Old(world, machines=(UP, ORDERED))
    remember()
    assert await error_of(ProviderError, up(context_of(world), AT_ONCE)) == (
        "moving the controller from c1 to c2 would end the jobs on machines that c1 rented: "
        "cloud1 (acme i-1), cloud2 (acme on order); no host was changed\n"
        "  fix: run on c1, as root: scontrol update nodename=cloud[1-2] state=power_down_asap; wait until their jobs "
        "have ended, then run `shoal up` again. Or use --allow-job-loss to release them at once"
    )
    assert (old.did, world.applied(), taken(world)) == ([], [], [])
    await up(context_of(world), AT_ONCE, allow_job_loss=True)
    assert (old.did, len(taken(world))) == (["stop", "give"], 1)


async def test_order_made_before_the_stop_restarts_the_old_service() -> None:
    world = moving()
    old = Old(world)
    old.on_stop = (ORDERED,)
    with pytest.raises(ProviderError, match=r"cloud2 \(acme on order\)"):
        await up(context_of(world), AT_ONCE)
    assert (old.did, taken(world)) == (["stop", "start"], [])


async def test_failed_ledger_copy_restarts_the_old_service() -> None:
    world = moving()
    old = Old(world)
    world.hosts["c2"].answers |= {MOVE_LEDGER: Result(1, stderr=b"Traceback\nOSError: full\n")}
    said = await error_of(ShoalError, up(context_of(world), AT_ONCE))
    assert "c2: cannot move the ledger /var/lib/shoal/elastic/ledger.db: OSError: full" in said
    assert old.did == ["stop", "give", "start"]
    assert "service shoal-elastic" not in world.agents["c2"].items


async def test_unreachable_old_controller_stops_the_move_unless_forced() -> None:
    world = moving(MOVED)
    remember()
    world.connector = FakeConnector(*world.hosts.values(), FakeHost(Target("c1"), unreachable=True))
    said = await error_of(ShoalError, up(context_of(world), AT_ONCE))
    assert said.startswith("cannot reach c1, which rents machines for this cluster: its service may still run; no host")
    assert "host was changed: c1: " in said and "or switch it off for good, and use --leave-rented" in said
    assert world.applied() == []
    [told] = (await up(context_of(world), AT_ONCE, leave_rented=True)).findings
    assert (told.level, told.host) == ("warning", "c1")
    assert told.fix == "switch it off, or run on it, as root: systemctl disable --now shoal-elastic"


async def test_host_of_another_cluster_is_unchanged() -> None:
    world = moving(MOVED)
    old = Old(world, cluster="other", machines=(UP,))
    remember()
    await up(context_of(world), AT_ONCE)
    assert (old.did, taken(world), old.agent.items) == ([], [], {})


@cases("text", "", "{}", "[1]", '{"name": "c1"}', '{"name": "c2", "address": "10.0.0.2"}')
async def test_invalid_or_current_record_does_not_block_up(text: str) -> None:
    world = moving(MOVED)
    (state_directory("reef")).mkdir(parents=True, exist_ok=True)
    (state_directory("reef") / RECORD).write_text(text)
    assert (await up(context_of(world), AT_ONCE)).whole
    assert taken(world) == []


async def test_plan_reports_the_move_and_its_obstacles() -> None:
    world = moving()
    old = Old(world)
    [told] = [one for one in (await plan(context_of(world))).findings if one.host == "c1"]
    assert (told.level, told.what) == ("info", "the rental service moves from here to c2, with its ledger")
    machines = {"t1": {"node": "cloud1", "account": "acme", "id": "i-1", "state": "joined"}}
    status = {str(STATUS): FileFact(sha256="0", text=json.dumps({"at": 1.0, "machines": machines}))}
    old.agent.facts = replace(old.agent.facts, files={**old.agent.facts.files, **status})
    [told] = [one for one in (await plan(context_of(world))).findings if one.host == "c1"]
    assert (told.level, told.found) == ("error", "cloud1 (acme i-1)")
    assert world.applied() == []
