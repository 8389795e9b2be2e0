"""Ordinary users: they join with their own login, have no file, and never become root."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.contract import VERSION
from shoal.errors import UsageError
from shoal.hosts.api import Target
from shoal.jobs.model import job_from_options
from shoal.spec.cluster_record import RECORD_PATH, ClusterRecord, RecordMember, RecordShare, parse_record
from shoal.verbs.context import Context, open_context, open_hosts
from shoal.verbs.joined_cluster import JoinedCluster, Login, find_joined, join, parse_login
from shoal.verbs.run import run
from shoal.verbs.status import status
from shoal.verbs.up import plan
from shoal_simulators.fake_host import Call, FakeConnector, FakeHost

RECORD = ClusterRecord(
    "reef",
    VERSION,
    "c1",
    (RecordMember("c1", "10.0.0.1", ("compute", "controller")), RecordMember("n1", "10.0.0.2", ("compute",))),
    {"c1": "ssh-ed25519 AAAA"},
    {"/data": RecordShare("nfs")},
    "/data/shoal-jobs",
)
NODE = "NodeName=n1 CPUAlloc=0 CPUTot=2 State=IDLE Partitions=main\n"


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "config" / "shoal" / "clusters"


def desktop(record: ClusterRecord = RECORD, text: str = "") -> FakeHost:
    return FakeHost(
        Target("desktop"),
        {
            ("cat", RECORD_PATH): (text or record.as_json()).encode(),
            ("id",): b"alice\n",
            ("scontrol", "--version"): b"slurm-wlm 22.05.8\n",
            ("scontrol", "-d"): NODE.encode(),
            ("scontrol",): b"PartitionName=main State=UP Nodes=n1 Default=YES\n",
            ("squeue",): b"",
        },
    )


async def test_join_keeps_what_the_cluster_says_and_commands_find_it(config: Path) -> None:
    result = await join(parse_login("alice@desktop"), FakeConnector(desktop()))
    assert (result.cluster, result.login, result.jobs) == ("reef", "alice@desktop", "/data/shoal-jobs/alice")
    assert result.changed
    assert (config / "reef.json").stat().st_mode & 0o777 == 0o600
    for context in (open_context(), open_hosts(), open_hosts(), open_context(cluster="reef")):
        assert context.joined is not None and context.joined.record == RECORD
        assert (await context.targets())["c1"] == Target("desktop", None, None, "alice")
    assert not (await join(Login("desktop"), FakeConnector(desktop()))).changed


async def test_users_command_asks_slurm_and_never_root(config: Path) -> None:
    host = desktop()
    context = Context(JoinedCluster(RECORD, Login("desktop", "alice")), connector=FakeConnector(host))
    result = await status(context)
    assert [node.name for node in result.nodes] == ["n1"]
    with pytest.raises(UsageError, match="needs the operator's file"):
        await plan(context)


async def test_users_job_is_written_and_submitted_through_the_one_host(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    host = desktop()
    sent: list[tuple[tuple[str, ...], bytes]] = []
    answer = {"root": "/data/shoal-jobs/alice", "user": "alice", "code": False, "runtime": True, "marked": False}

    def shell(call: Call) -> bytes:
        sent.append((call.argv[5:6], call.stdin))
        return b"17\n" if "sbatch" in call.argv[2] else b""

    host.answers |= {
        ("python3",): json.dumps(answer).encode(),
        ("sh",): shell,
        ("touch",): b"",
        ("scontrol", "-o"): b"PartitionName=main State=UP Nodes=n1 Default=YES\n",
    }
    context = Context(JoinedCluster(RECORD, Login("desktop", "alice")), connector=FakeConnector(host))
    job = job_from_options({"script": "train.py"})
    submitted = await run(context, job, tmp_path)
    assert (submitted.id, submitted.shared) == ("17", True)
    assert "#SBATCH --chdir=/data/shoal-jobs/alice\n" in submitted.script
    assert (f"/data/shoal-jobs/alice/code/{submitted.code}.tar",) in [place for place, _ in sent]
    for root, text in (("/home/alice/jobs", "not on a share"), ("/old/alice", "keep the owners of files")):
        record = replace(RECORD, shares={**RECORD.shares, "/old": RecordShare("sshfs", private=False)})
        host.answers = {
            **host.answers,
            ("python3",): json.dumps({**answer, "root": root}).encode(),
            ("cat", RECORD_PATH): record.as_json().encode(),
        }
        with pytest.raises(UsageError, match=text):
            await run(context, job, tmp_path)


async def test_change_of_the_cluster_is_noticed_and_kept(config: Path) -> None:
    await join(Login("desktop", "alice"), FakeConnector(desktop()))
    context = open_context()
    changed = replace(RECORD, environments={"torch": "/data/environments"})
    assert context.joined is not None
    await status(replace(context, connector=FakeConnector(desktop(changed))))
    assert context.joined.changed and context.joined.record == changed
    again = find_joined("reef")
    assert again is not None and again.record == changed


async def test_host_without_a_description_of_this_release_is_rejected(config: Path) -> None:
    other = replace(RECORD, version="9.1.0")
    later = json.dumps({**json.loads(RECORD.as_json()), "format": 2, "version": "9.0.0"})
    for host, message in (
        (desktop(other), rf"built by Shoal 9.1.0, and this is Shoal {VERSION}"),
        (desktop(text=later), r"built by Shoal 9\.0\.0, which is newer"),
        (FakeHost(Target("desktop"), {}), "does not say which cluster it belongs to"),
    ):
        with pytest.raises(UsageError, match=message):
            await join(Login("desktop"), FakeConnector(host))
    for text in ("[]", "{", '{"format": 1}', "[" * 100000):
        with pytest.raises(UsageError, match="is not a description of a cluster"):
            parse_record(text, "cluster.json")


async def test_several_clusters_need_a_name_and_another_of_the_same_name_replaces_none(config: Path) -> None:
    for name in ("reef", "bay"):
        await join(Login("desktop"), FakeConnector(desktop(replace(RECORD, cluster=name))))
    with pytest.raises(UsageError, match=r"several clusters: bay, reef\n  fix: name one with --cluster bay"):
        open_context()
    assert open_context(cluster="bay").cluster == "bay"
    assert open_context(cluster="sandbox").joined is None
    other = desktop(replace(RECORD, host_keys={"c1": "ssh-ed25519 BBBB"}))
    other.target = Target("elsewhere")
    with pytest.raises(UsageError, match="you have joined another cluster that is called reef, through alice@desktop"):
        await join(Login("elsewhere"), FakeConnector(other))


def test_controller_itself_needs_no_join(config: Path, tmp_path: Path) -> None:
    here = tmp_path / "cluster.json"
    here.write_text(RECORD.as_json())
    joined = find_joined(None, here)
    assert joined is not None and joined.login is None and joined.record == RECORD
    assert find_joined("other", here) is None


@cases("text", "", "@desktop", "alice@", "-oProxyCommand=x", "a b@c")
def test_login_that_is_none_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="is not a login"):
        parse_login(text)
