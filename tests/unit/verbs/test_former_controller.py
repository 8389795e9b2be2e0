"""A cluster keeps its controller until `shoal down`: two rental services would release each other's machines."""

import json
from dataclasses import asdict, replace

import pytest
from tests.contract.rental_providers import KEY
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import AT_ONCE, context_of
from tests.support.fake_world import World, host_facts, lab
from tests.support.specs import ONE_NODE

from shoal.agent.document import HEADER
from shoal.agent.facts import FileFact
from shoal.cloud.status_file import STATUS
from shoal.errors import ShoalError
from shoal.hosts.api import Target
from shoal.local_files import state_directory
from shoal.plan.rebuild import standing_cluster
from shoal.roles.current_conf import SLURM_CONF
from shoal.roles.elastic import UNIT
from shoal.roles.host_record import HOST_RECORD
from shoal.slurm.state import JOB_RECORD
from shoal.verbs.check import check
from shoal.verbs.former_controller import RECORD
from shoal.verbs.up import plan, up
from shoal_simulators.fake_host import FakeAgent, FakeConnector, FakeHost

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
CONF = HEADER + "ClusterName={0}\nSlurmctldHost=c1(10.0.0.1)\nNodeName=n1\nNodeName=cloud[1-2] State=CLOUD\n"
RENTED = {"t1": {"node": "cloud1", "account": "acme", "id": "i-1", "state": "joined"}}
JOB = JOB_RECORD + "\x1f".join(("7", "RUNNING", "ann", "main", "n1", "None", "0:10", "UNLIMITED", "1", "train")) + "\n"
KEEPS = "c1: is the controller of cluster reef, the file says c2, and a cluster keeps that until `shoal down`"
DRAIN = """\
  fix: with c1 as `controller`, run (jobs that wait are lost: submit them again):
  shoal node drain n1
  shoal jobs   # wait until none runs
"""
ANEW = "  shoal down\nthen, with the new file:\n  shoal up"
SAVE_LEDGER = """\
  shoal exec -w c1 -- systemctl stop shoal-elastic
  shoal ssh c1 sudo tar -C /var/lib/shoal/elastic -c ledger.db > ledger.tar
"""
RESTORE_LEDGER = """
  shoal exec -w c2 -- systemctl stop shoal-elastic
  shoal exec -w c2 -- sh -c 'rm -f /var/lib/shoal/elastic/ledger.db*'
  shoal ssh c2 sudo tar -C /var/lib/shoal/elastic -x < ledger.tar
  shoal exec -w c2 -- systemctl start shoal-elastic"""
SAVE_RECORDS = """\
  shoal exec -w c1 -- /usr/local/lib/shoal/accounting-database backup move
  shoal ssh c1 sudo tar -C / -c var/backups/shoal > accounting.tar
"""
RESTORE_RECORDS = """
  shoal ssh c2 sudo tar -C / -x < accounting.tar
  shoal restore   # lists the backups
  shoal restore NAME   # the newest that ends in -move.sql.gz"""


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_KEY", KEY)


def stand(world: World, cluster: str = "reef", machines: str = "") -> None:
    """c1 is the controller of a cluster that stands, and runs a job."""
    agent = world.agents.get("c1") or FakeAgent(host_facts("c1", "10.0.0.1"))
    answers = {("python3",): agent.play, ("scontrol",): b"NodeName=n1 State=ALLOCATED\n", ("squeue",): JOB.encode()}
    world.hosts["c1"] = FakeHost(Target("c1"), answers)
    world.agents["c1"] = agent
    world.connector = FakeConnector(*world.hosts.values())
    record = {"cluster": cluster, "controller": "c1", "address": "10.0.0.1", "id": "0123456789abcdef"}
    texts = {HOST_RECORD: json.dumps(record), SLURM_CONF: CONF.format(cluster), str(STATUS): machines}
    files = {path: FileFact(sha256="0", text=text) for path, text in texts.items() if text}
    agent.facts = replace(agent.facts, files={**agent.facts.files, **files})


def remember(name: str = "c1", address: str = "10.0.0.1") -> None:
    place = state_directory("reef") / RECORD
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps({**asdict(Target(name, address)), "identity": None}))


@cases("text", STAYS, MOVED, ids=["stays in the cluster", "left the file"])
async def test_another_controller_is_rejected_with_what_runs_and_the_commands(text: str) -> None:
    world = lab(text)
    stand(world, machines=json.dumps({"at": 1.0, "machines": RENTED}))
    remember()
    for verb in (up, plan):
        assert await error_of(ShoalError, verb(context_of(world))) == (
            f"{KEEPS} (running: job 7 (ann); rented: cloud1 (acme i-1))\nnothing was changed\n"
            f"{DRAIN}{SAVE_LEDGER}{ANEW}{RESTORE_LEDGER}"
        )
    with pytest.raises(ShoalError, match="is the controller of cluster reef"):
        await up(context_of(world), AT_ONCE, allow_job_loss=True, leave_rented=True)
    [finding] = [finding for finding in await check(context_of(world)) if finding.host == "c1"]
    assert (finding.level, f"c1: {finding.what}") == ("error", KEEPS)
    assert world.applied() == []


async def test_cluster_that_rents_nothing_keeps_its_controller_too() -> None:
    text = ONE_NODE.replace("name: c1, address: 10.0.0.1}", "name: c2, address: 10.0.0.2}")
    text = text.replace("[{name: n1", "[{name: c1, address: 10.0.0.1}, {name: n1")
    for accounting, expected in (
        ("", f"{DRAIN}{ANEW}"),
        ("accounting: true\n", f"{DRAIN}{SAVE_RECORDS}{ANEW}{RESTORE_RECORDS}"),
        ("accounting: {host: n1}\n", f"{DRAIN}{ANEW}"),
    ):
        world = lab(text + accounting)
        stand(world)
        assert await error_of(ShoalError, up(context_of(world), AT_ONCE)) == (
            f"{KEEPS} (running: job 7 (ann))\nnothing was changed\n{expected}"
        )


async def test_first_up_after_down_records_the_new_controller() -> None:
    world = lab(MOVED)
    agent = FakeAgent(host_facts("c1", "10.0.0.1"))
    world.connector = FakeConnector(*world.hosts.values(), FakeHost(Target("c1"), {("python3",): agent.play}))
    remember()
    assert (await up(context_of(world), AT_ONCE)).whole
    assert json.loads((state_directory("reef") / RECORD).read_text())["name"] == "c2"
    assert agent.items == {}


async def test_unreachable_former_controller_stops_up_unless_forced() -> None:
    world = lab(MOVED)
    remember()
    world.connector = FakeConnector(*world.hosts.values(), FakeHost(Target("c1"), unreachable=True))
    for verb in (up, plan):
        said = await error_of(ShoalError, verb(context_of(world)))
        assert said.startswith("c1: does not answer; it rents machines for reef, and its service may still run (")
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


@cases("text", "", "{}", "[1]", '{"name": "c1"}', '{"name": "c2", "address": "10.0.0.2"}')
async def test_invalid_or_current_record_does_not_block_up(text: str) -> None:
    world = lab(MOVED)
    (state_directory("reef")).mkdir(parents=True, exist_ok=True)
    (state_directory("reef") / RECORD).write_text(text)
    assert (await up(context_of(world), AT_ONCE)).whole


async def test_host_with_the_hostname_of_the_controller_is_no_former_one() -> None:
    world = lab(CLOUD)
    stand(world)
    conf = world.agents["c1"].facts.files
    twin = {path: conf[path] for path in (HOST_RECORD, SLURM_CONF)}
    for service, expected in ((False, None), (True, "n1")):
        files = {**world.agents["n1"].facts.files, **twin, UNIT: FileFact(there=service)}
        facts = {"c1": world.agents["c1"].facts, "n1": replace(world.agents["n1"].facts, hostname="c1", files=files)}
        standing = standing_cluster(world.spec, facts)
        assert (standing and standing.controller) == expected
