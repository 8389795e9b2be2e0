"""A cluster keeps its controller, and where its Slurm comes from, until `shoal down`."""

import json
from dataclasses import asdict, replace

import pytest
from tests.contract.rental_providers import KEY
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import AT_ONCE, Sandbox, context_of
from tests.support.fake_world import World, host_facts, lab
from tests.support.specs import ONE_NODE

from shoal.agent.document import HEADER
from shoal.agent.facts import FileFact
from shoal.cloud.status_file import STATUS
from shoal.errors import ShoalError
from shoal.hosts.api import Target
from shoal.hosts.provider import Request
from shoal.local_files import state_directory
from shoal.roles.accounting import SACCTMGR_CONF
from shoal.roles.current_conf import SLURM_CONF
from shoal.roles.elastic import UNIT
from shoal.roles.host_record import HOST_RECORD, host_id
from shoal.roles.slurm_tree import UNIT_FILES
from shoal.slurm.state import JOB_RECORD
from shoal.spec.member import Shape
from shoal.storage.sshfs import HOST_KEY
from shoal.verbs.check import check
from shoal.verbs.context import Context
from shoal.verbs.rebuild import RECORD, controls
from shoal.verbs.up import plan, up
from shoal_simulators.fake_host import FakeAgent, FakeConnector, FakeHost
from shoal_simulators.fake_provider import FakeProvider

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
CONF = HEADER + "ClusterName={0}\nSlurmctldHost=c1\nNodeName=n1\nNodeName=n9\nNodeName=cloud[1-2] State=CLOUD\n"
RENTED = {"t1": {"node": "cloud1", "account": "acme", "id": "i-1", "state": "joined"}}
JOB = JOB_RECORD + "\x1f".join(("7", "RUNNING", "ann", "main", "n1", "None", "0:10", "UNLIMITED", "1", "train")) + "\n"
REJECTED = """\
c1: is the controller of cluster reef, the file says c2 (running: job 7 (ann); rented: cloud1 (acme i-1); \
c1 has the accounting database)
nothing was changed
  fix: {other}write c1 as `controller` again: a cluster keeps that until `shoal down`
to build the cluster anew, run with c1 as `controller`:
  shoal node drain cloud[1-2],n[1,9]
  shoal jobs   # wait until none runs
  shoal exec -w c1 -- scancel --state=PENDING   # waiting jobs do not come along
  # save what must come along: records of jobs, costs, files of shares (docs/rebuild.md)
  shoal down
then, with the new file:
  shoal up
  shoal node resume cloud[1-2],n1"""
OTHER = "if c1 has another cluster of this name, take it out of this file\n"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_KEY", KEY)


def stand(world: World, cluster: str = "reef") -> None:
    """c1 is the controller of a cluster that stands, rents a machine and runs a job."""
    agent = world.agents.get("c1") or FakeAgent(host_facts("c1", "10.0.0.1"))
    answers = {("python3",): agent.play, ("scontrol",): b"NodeName=n1 State=ALLOCATED\n", ("squeue",): JOB.encode()}
    world.hosts["c1"] = FakeHost(Target("c1"), answers)
    world.agents["c1"] = agent
    world.connector = FakeConnector(*world.hosts.values())
    record = {"cluster": cluster, "controller": "c1", "address": "10.0.0.1", "id": host_id(agent.facts)}
    machines = json.dumps({"at": 1.0, "machines": RENTED})
    texts = {HOST_RECORD: json.dumps(record), SLURM_CONF: CONF.format(cluster), str(STATUS): machines, UNIT: "[Unit]"}
    files = {path: FileFact(sha256="0", text=text, there=True) for path, text in texts.items()}
    files[SACCTMGR_CONF] = FileFact(there=True)
    agent.facts = replace(agent.facts, files={**agent.facts.files, **files})


def remember(name: str = "c1", address: str = "10.0.0.1", id: str = "") -> None:
    place = state_directory("reef") / RECORD
    place.parent.mkdir(parents=True, exist_ok=True)
    target = {**asdict(Target(name, address)), "identity": None}
    place.write_text(json.dumps({"target": target, "id": id or host_id(host_facts("c1", "10.0.0.1"))}))


@cases("text, other", (STAYS, OTHER), (MOVED, ""), ids=["stays in the cluster", "left the file"])
async def test_another_controller_is_rejected_with_what_runs_and_the_commands(text: str, other: str) -> None:
    world = lab(text)
    stand(world)
    remember()
    for verb in (up, plan):
        assert await error_of(ShoalError, verb(context_of(world))) == REJECTED.format(other=other)
    with pytest.raises(ShoalError, match="is the controller of cluster reef"):
        await up(context_of(world), AT_ONCE, allow_job_loss=True, leave_rented=True)
    [finding] = [finding for finding in await check(context_of(world)) if finding.host == "c1"]
    assert (finding.level, finding.what) == ("error", "is the controller of cluster reef, the file says c2")
    assert world.applied() == []


async def test_nothing_is_made_before_the_former_controller_is_found() -> None:
    """It is an instance that the file no longer names, and the new controller does not exist yet."""
    text = "cluster: reef\ncontroller: {provider: sandbox}\nnodesets: {fish: {provider: sandbox, count: 1}}\n"
    world = lab(text)
    stand(world)
    cloud = FakeProvider()
    await cloud.create("reef", [Request("c1", Shape())], lambda text, part: None)
    context = context_of(world, providers=lambda name: cloud, registry=lambda: ("sandbox",))
    for verb in (up, plan):
        with pytest.raises(ShoalError, match="c1: is the controller of cluster reef, the file says controller"):
            await verb(context)
    assert "is the controller of cluster reef, the file says controller" in [one.what for one in await check(context)]
    assert [*cloud.clusters["reef"]] == ["c1"]


async def test_former_controller_that_returns_never_gets_commands_that_end_the_cluster() -> None:
    """It was off while the cluster got another controller with `up --leave-rented`."""
    world = lab(MOVED)
    assert (await up(context_of(world), AT_ONCE)).whole
    world.look_again()
    files, services = world.agents["c2"].facts.files, world.agents["c2"].facts.services
    world = lab(STAYS, c2={"files": files, "services": services})
    stand(world)
    for verb in (up, plan):
        assert await error_of(ShoalError, verb(context_of(world))) == (
            "c1: is the controller of a cluster reef too, beside c2 (running: job 7 (ann); rented: cloud1 (acme i-1); "
            "c1 has the accounting database)\nnothing was changed\n"
            f"  fix: {OTHER}if it was the controller before c2, run there, as root: `systemctl disable --now "
            "shoal-elastic slurmctld && rm /etc/shoal/member.json`; then `shoal up`"
        )
    world.hosts["c2"].unreachable = True  # it may still have the cluster
    assert "c1" not in [finding.host for finding in await check(context_of(world)) if finding.level == "error"]


async def test_same_name_at_another_address_is_another_host() -> None:
    old, world = lab(CLOUD, c1={"hostname": "old"}), lab(CLOUD)
    stand(old)
    former = old.hosts["c1"]

    class ByAddress(FakeConnector):
        async def connect(self, target: Target) -> FakeHost:
            return await (old if target.address == "10.0.0.9" else world).connector.connect(target)

    remember(address="10.0.0.9", id=host_id(old.agents["c1"].facts))
    context = Context(world.spec, connector=ByAddress())
    with pytest.raises(ShoalError, match="c1: is the controller of cluster reef, the file says another host called c1"):
        await up(context, AT_ONCE)
    former.unreachable = True
    with pytest.raises(ShoalError, match="c1: cannot be asked whether it still rents machines for reef"):
        await up(context, AT_ONCE)
    remember(address="10.0.0.9")  # the host of the file
    assert (await up(context, AT_ONCE)).whole


async def test_new_controller_is_recorded_before_anything_is_applied() -> None:
    world = lab(MOVED)
    agent = FakeAgent(host_facts("c1", "10.0.0.1"))
    world.connector = FakeConnector(*world.hosts.values(), FakeHost(Target("c1"), {("python3",): agent.play}))
    remember()
    world.agents["c2"].failing = {"service slurmctld": "no space left"}
    with pytest.raises(ShoalError, match="no space left"):
        await up(context_of(world), AT_ONCE)
    record = json.loads((state_directory("reef") / RECORD).read_text())
    assert (record["target"]["name"], record["id"]) == ("c2", host_id(world.agents["c2"].facts))
    assert agent.items == {}


async def test_unreachable_former_controller_stops_up_unless_forced() -> None:
    world = lab(MOVED)
    remember()
    world.connector = FakeConnector(*world.hosts.values(), FakeHost(Target("c1"), unreachable=True))
    for verb in (up, plan):
        said = await error_of(ShoalError, verb(context_of(world)))
        assert said.startswith("c1: cannot be asked whether it still rents machines for reef (")
        assert "nothing was changed" in said and "or switch it off for good, and use `shoal up --leave-rented`" in said
    assert world.applied() == []
    [finding] = (await up(context_of(world), AT_ONCE, leave_rented=True)).findings
    assert (finding.level, finding.host) == ("warning", "c1")
    assert finding.fix == "switch it off, or run on it, as root: systemctl disable --now shoal-elastic"


async def test_recorded_host_of_another_cluster_is_unchanged() -> None:
    world = lab(MOVED)
    stand(world, cluster="other")
    remember()
    assert (await up(context_of(world), AT_ONCE)).whole
    assert world.agents["c1"].items == {}


@cases("text", "", "{}", "[1]", '{"target": {"name": "c1"}}')
async def test_invalid_record_does_not_block_up(text: str) -> None:
    world = lab(MOVED)
    (state_directory("reef")).mkdir(parents=True, exist_ok=True)
    (state_directory("reef") / RECORD).write_text(text)
    assert (await up(context_of(world), AT_ONCE)).whole


@cases(
    "hostname, key, running, expected",
    ("c1", "KEY", False, True),
    ("renamed", "KEY", True, True),
    ("c1", "NEW", True, True),
    ("c1", "OTHER", False, False),
    ("copy", "KEY", False, False),
    ("n1", "OTHER", True, False),
    ids=["stopped", "renamed", "new key", "same hostname", "same key", "another slurmctld"],
)
def test_controller_is_told_by_two_signs(hostname: str, key: str, running: bool, expected: bool) -> None:
    world = lab(CLOUD)
    stand(world)
    facts = replace(world.agents["c1"].facts, hostname=hostname, services={"slurmctld": "active"} if running else {})
    assert controls(world.spec, facts)  # it has the rental service
    id = host_id(replace(facts, files={HOST_KEY: FileFact(text="ssh-ed25519 KEY")}))
    files = {UNIT: FileFact(), HOST_KEY: FileFact(text=f"ssh-ed25519 {key}")}
    files[HOST_RECORD] = FileFact(text=json.dumps({"cluster": "reef", "id": id}))
    assert controls(world.spec, replace(facts, files={**facts.files, **files})) == expected


def set_tree(world: World, *names: str) -> None:
    """Give hosts of a cluster that is up Shoal's Slurm."""
    files = {path: FileFact(text=f"{HEADER}ExecStart=/opt/shoal/slurm-24.11.5-1/sbin/slurmd\n") for path in UNIT_FILES}
    for name in names:
        facts = world.agents[name].facts
        world.agents[name].facts = replace(facts, files={**facts.files, **files}, init="systemd")


async def test_cluster_keeps_its_slurm(world: World) -> None:
    set_tree(world, "c1", "n1", "n2")
    world.slurm.jobs["7"] = "n1"
    rejected = """\
c1: has Slurm from shoal, the file says `slurm: {from: packages}` (running: job 7 (root))
nothing was changed
  fix: write `slurm: {from: shoal}` again: a cluster keeps that until `shoal down`
to build the cluster anew, run with `slurm: {from: shoal}`:
  shoal node drain n[1-2]
  shoal jobs   # wait until none runs
  shoal down
then, with the new file:
  shoal up
  shoal node resume n[1-2]"""
    for verb in (up, plan):
        assert await error_of(ShoalError, verb(context_of(world))) == rejected
    [finding] = [finding for finding in await check(context_of(world)) if finding.level == "error"]
    assert (finding.host, finding.path) == ("c1", "slurm.from")


async def test_controller_that_down_deletes_has_its_queue_and_records_saved(sandbox: Sandbox) -> None:
    set_tree(sandbox.world, "controller")
    fix = await error_of(ShoalError, plan(sandbox.context()))
    assert "scancel --state=PENDING" in fix and "(docs/rebuild.md)\n  shoal down" in fix


async def test_node_that_was_off_while_the_slurm_changed_is_named_alone(world: World) -> None:
    set_tree(world, "n1")
    assert await error_of(ShoalError, up(context_of(world), AT_ONCE)) == (
        "n1: has Slurm from shoal, the file says `slurm: {from: packages}` (the controller has not)\nnothing was "
        "changed\n  fix: run `shoal node remove n1`, write n1 into the file again, and run `shoal up`"
    )
