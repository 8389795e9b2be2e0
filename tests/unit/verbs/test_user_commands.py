"""Commands of an ordinary user beside `run`: usage, cost, offers, ui, ssh and exec, by one login, without root."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from typer.testing import CliRunner

from shoal.cli.app import make_app
from shoal.cloud.providers.api import Offer, Query
from shoal.cloud.rental import micros
from shoal.cloud.service.costs import CostReport, JobCost
from shoal.cloud.service.public_report import PublicReport, parse_report
from shoal.contract import VERSION
from shoal.errors import CommandTimeout, ShoalError, SlurmError, UsageError
from shoal.hosts.api import Result, Target
from shoal.jobs.record import JobRecord
from shoal.slurm.state import JOB_RECORD
from shoal.spec.cluster_record import RECORD_PATH, ClusterRecord, RecordMember, RecordNodeset
from shoal.verbs.context import Context
from shoal.verbs.cost import cost
from shoal.verbs.exec import execute, forget_host, ssh_command
from shoal.verbs.joined_cluster import JoinedCluster, Login, store
from shoal.verbs.logs import check_owner
from shoal.verbs.own_jobs import LOGIN_SHELL, choose_nodes, parse_running
from shoal.verbs.provider_accounts import offers
from shoal.verbs.slurmctld import running_version
from shoal.verbs.ui import WebPage, ui
from shoal.verbs.usage import usage
from shoal_simulators.fake_host import Call, FakeConnector, FakeHost

RECORD = ClusterRecord(
    "reef",
    VERSION,
    "c1",
    (RecordMember("c1", "10.0.0.1", ("controller",)),),
    accounting=True,
    tracking="mlflow",
    nodesets={"lab": RecordNodeset("n[1-2]", 2.0), "burst": RecordNodeset("burst[1-4]", rented=True)},
)
REPORT = PublicReport(
    1000.0,
    (Offer("lambda", "gpu_1x_a10", "us-west-1", usd_hour=1.29, gpu="A10", gpus=1), Offer("gcp", "a2", "us")),
    {
        "2026-10": CostReport(1000.0, "2026-10", 0, 0, 0, micros("7")),
        "2026-11": CostReport(
            *(1000.0, "2026-11", micros("1.29"), 1, micros("2"), micros("30")),
            users={"alice": micros("20"), "bob": micros("10")},
            jobs=(JobCost("7", "alice", "train", micros("20")), JobCost("8", "bob", "eval", micros("10"))),
        ),
    },
    {"per_month": 500.0},
    {"burst": {"per_hour": 20.0}},
)
QUEUE = b"12|12|n[1-2]\n19|15_3|n2\n"


@pytest.fixture(autouse=True)
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def desktop(answers: Mapping[tuple[str, ...], Any], record: ClusterRecord = RECORD) -> FakeHost:
    return FakeHost(
        Target("desktop"), {("cat", RECORD_PATH): record.as_json().encode(), ("id",): b"alice\n", **answers}
    )


def context_of(host: FakeHost, record: ClusterRecord = RECORD, login: Login | None = None) -> Context:
    return Context(JoinedCluster(record, login or Login("desktop", "alice")), connector=FakeConnector(host))


async def test_usage_takes_nodesets_and_prices_from_the_record() -> None:
    rows = JOB_RECORD.join(("7", "alice", "lab", "3600", "7200", "n[1-2]", "cpu=8,gres/gpu=2", "train"))
    host = desktop({("timeout",): b"reef\n", ("env",): f"{rows}\n".encode()})
    result = await usage(context_of(host), "nodeset", "1970-01-01", None)
    [row] = result.rows
    assert (row.name, row.gpu_hours, row.cost) == ("lab", 2.0, 4.0)
    bare = replace(RECORD, accounting=False)
    with pytest.raises(UsageError, match="has no accounting\n  fix: ask the operator"):
        await usage(context_of(desktop({}, bare), bare), "user", None, None)


async def test_cost_has_all_sums_and_only_the_users_own_jobs() -> None:
    host = desktop({("sh",): REPORT.as_json().encode()})
    result = await cost(context_of(host))
    assert (result.costs.total, [job.id for job in result.costs.jobs]) == (micros("30"), ["7"])
    assert (result.budget.per_month, result.budgets["burst"].per_hour) == (500.0, 20.0)
    assert (await cost(context_of(host), "2026-10")).costs.total == micros("7")
    with pytest.raises(UsageError, match=r"only the operator reads\n  fix: use one of 2026-10, 2026-11, or ask"):
        await cost(context_of(host), "2026-01")
    host = desktop({("sh",): Result(255, b"", b"Permission denied (publickey)")})
    silent = "desktop cannot show what the rental service on c1 publishes\n  fix: join the controller"
    with pytest.raises(ShoalError, match=silent):
        await cost(context_of(host))


async def test_offers_are_what_the_cluster_can_rent_cheapest_first() -> None:
    host = desktop({("sh",): REPORT.as_json().encode()})
    result = await offers(context_of(host), Query())
    assert [(offer.provider, offer.usd_hour) for offer in result.offers] == [("lambda", 1.29), ("gcp", None)]
    assert len((await offers(context_of(host), Query(gpu="a10"), ["lambda"])).offers) == 1
    with pytest.raises(UsageError, match="rents from no runpod\n  fix: use one of gcp, lambda"):
        await offers(context_of(host), Query(), ["runpod"])
    own = replace(RECORD, nodesets={"lab": RecordNodeset("n1")})
    with pytest.raises(UsageError, match="rents no machines"):
        await offers(context_of(desktop({}, own), own), Query())


def test_report_survives_its_file_and_later_keys() -> None:
    assert parse_report(REPORT.as_json()) == REPORT
    later = {**json.loads(REPORT.as_json()), "more": 1}
    later["offers"][0]["colour"] = "red"
    assert parse_report(json.dumps(later)) == REPORT
    for text in ("", "[]", '{"at": 1}', '{"at": 1, "offers": 3, "costs": {}, "budget": {}, "budgets": {}}'):
        with pytest.raises(ValueError):
            parse_report(text)


class ForwardingHost(FakeHost):
    """A host that forwards ports, as SSH does."""

    forwarded: tuple[str, int] | None = None

    async def forward(self, address: str, port: int, local_port: int = 0) -> int:
        self.forwarded = (address, port)
        return local_port or 4000

    async def wait_closed(self) -> None:
        raise KeyboardInterrupt


LOGIN = b"[mlflow]\nmlflow_tracking_username = alice\nmlflow_tracking_password = s3cret\n"
ADDRESS = b'{"uri": "http://10.0.0.5:5000", "username": "jobs"}\n'


async def test_page_opens_through_the_users_login_with_the_users_account() -> None:
    pages: list[WebPage] = []
    answers = {("cat", RECORD_PATH): RECORD.as_json().encode(), ("sh",): ADDRESS + LOGIN, ("python3",): b"200\n"}
    host = ForwardingHost(Target("desktop"), answers)
    for show in (False, True):
        with pytest.raises(KeyboardInterrupt):
            await ui(context_of(host), "mlflow", pages.append, show_password=show)
    assert host.forwarded == ("10.0.0.5", 5000)
    hidden = WebPage("mlflow", "http://127.0.0.1:4000", "alice")
    assert pages == [hidden, replace(hidden, password="s3cret")]
    assert not any(call.root for call in host.calls if call.argv[0] != "python3")


async def test_page_on_a_host_of_the_cluster_is_the_servers_own() -> None:
    pages: list[WebPage] = []
    await ui(context_of(desktop({("sh",): ADDRESS + LOGIN, ("python3",): b"200\n"})), "mlflow", pages.append)
    assert pages == [WebPage("mlflow", "http://10.0.0.5:5000", "alice")]
    pages.clear()
    await ui(context_of(desktop({("sh",): Result(1, b'{"uri": "https://ml.example"}\n')})), "mlflow", pages.append)
    assert pages == [WebPage("mlflow", "https://ml.example")]


@cases(
    "output, record, message",
    (Result(1, b""), RECORD, "does not know the tracking server yet"),
    (Result(1, ADDRESS), RECORD, "you have no login to the tracking server"),
    (Result(1, b""), replace(RECORD, tracking=""), "has no tracking server"),
)
async def test_page_that_cannot_open_says_why(output: Result, record: ClusterRecord, message: str) -> None:
    with pytest.raises(ShoalError, match=message):
        await ui(context_of(desktop({("sh",): output}, record), record), "mlflow", lambda page: None)


def test_users_nodes_are_those_of_running_jobs_and_the_newest_job_counts() -> None:
    jobs = parse_running(QUEUE.decode())
    assert [job.id for job in jobs] == ["15_3", "12"]
    assert {node: job.id for node, job in choose_nodes(jobs, None, None).items()} == {"n2": "15_3", "n1": "12"}
    assert {node: job.id for node, job in choose_nodes(jobs, "12", None).items()} == {"n1": "12", "n2": "12"}
    assert list(choose_nodes(jobs, "15_3", "n2")) == ["n2"] and list(choose_nodes(jobs, "19", None)) == ["n2"]


@cases(
    "queue, job, hosts, message",
    (b"", None, None, "you have no running job"),
    (b"", "7", None, "7 is no running job\n  fix: `shoal jobs`"),
    (QUEUE, "7", None, "7 is no running job of yours\n  fix: use one of 15_3, 12"),
    (QUEUE, None, "n9", "no running job of yours is on n9\n  fix: use one of n\\[1-2\\]"),
    (QUEUE, "15_3", "n1", "job 15_3 does not run on n1\n  fix: use one of n2"),
    (QUEUE, None, "n[1", "is not a hostlist"),
)
def test_node_without_a_job_of_the_user_is_rejected(
    queue: bytes, job: str | None, hosts: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose_nodes(parse_running(queue.decode()), job, hosts)


async def test_exec_is_a_step_of_the_job_on_each_node() -> None:
    def srun(call: Call) -> Result:
        node = next(word.partition("=")[2] for word in call.argv if word.startswith("--nodelist="))
        return Result(3, b"out\n", f"oops\nsrun: error: {node}: task 0: Exited with exit code 3\n".encode())

    host = desktop({("squeue",): QUEUE, ("srun",): srun})
    result = await execute(context_of(host), ["id", "-u"], None, None, root=True, timeout=None)
    assert result.groups == ((("n1", "n2"), Result(3, b"out\n", b"oops\n")),)
    steps = sorted(call.argv[1:3] for call in host.calls if call.argv[0] == "srun")
    assert steps == [("--jobid=12", "--nodelist=n1"), ("--jobid=19", "--nodelist=n2")]
    assert not any(call.root for call in host.calls if call.argv[0] == "srun")
    with pytest.raises(UsageError, match="on nodes of burst\n  fix: yours are on n"):
        await execute(context_of(host), ["id"], None, "burst", root=True, timeout=None)
    with pytest.raises(UsageError, match="there is no nodeset 'x' in cluster reef"):
        await execute(context_of(host), ["id"], None, "x", root=True, timeout=None)

    def late(call: Call) -> Result:
        raise CommandTimeout("desktop", "too long")

    host = desktop({("squeue",): QUEUE, ("srun",): late})
    result = await execute(context_of(host), ["sleep", "9"], "n1", None, root=True, timeout=2.0, job="12")
    assert list(result.failures) == ["n1"] and "give it longer" in result.failures["n1"].hint


async def test_command_runs_in_the_image_of_its_job() -> None:
    """Slurm does not know whether there is one: `srun` of a bundle needs no feature."""
    host = desktop({("squeue",): QUEUE, ("srun",): Result(0, b"")})
    for outside, program in ((False, "python3"), (True, "id")):
        host.calls.clear()
        await execute(context_of(host), ["id"], None, None, root=True, timeout=None, outside=outside)
        steps = [call.argv for call in host.calls if call.argv[0] == "srun"]
        assert [argv[argv.index("--quiet") + 1] for argv in steps] == [program, program]
        assert all(argv[-1] == "id" for argv in steps)


@cases("shell, said", ("/bin/dash", "dash"), ("/no/zsh", "bash"), ("", "bash"))
def test_shell_is_the_users_where_it_is_there(shell: str, said: str) -> None:
    """An image may lack it."""
    run = ["sh", "-c", LOGIN_SHELL[-1].replace(" -l", " -c 'echo $0'")]
    done = subprocess.run(run, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "SHELL": shell})
    assert done.stdout.strip().endswith(f"/{said}"), done.stderr


async def test_ssh_opens_a_shell_inside_the_job_through_the_login() -> None:
    context = context_of(desktop({("squeue",): QUEUE}))
    line = await ssh_command(context, None, [], "12")
    assert line[-3:-1] == ["--", "desktop"] and "-t" in line and "HostKeyAlias=desktop" in line
    step = "srun --jobid=12 --nodelist=n1 --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --quiet --pty "
    assert line[-1].startswith(f"{step}python3 ")
    line = await ssh_command(context, None, [], "12", outside=True)
    assert line[-1].startswith(f"{step}sh -c ")
    line = await ssh_command(context, "n2", ["nvidia-smi", "|", "head"], outside=True)
    assert line[-1].endswith("--quiet sh -c 'nvidia-smi | head'") and "-t" not in line
    line = await ssh_command(context, "n2", ["htop"], terminal=True, outside=True)
    assert line[-1].endswith("--quiet --pty sh -c htop") and "-t" in line
    line = await ssh_command(context, "desktop", ["srun", "--pty", "bash"], terminal=True)
    assert line[-5:] == ["-o", "LogLevel=ERROR", "--", "desktop", "srun --pty bash"] and "-t" in line
    assert (await ssh_command(context, "desktop", []))[-1] == "desktop"
    assert (await ssh_command(context, "c1", ["date"]))[-2:] == ["desktop", "date"]
    for host, message in ((None, "ssh needs a host or a job"), ("n9", "no running job of yours is on n9")):
        with pytest.raises(UsageError, match=message):
            await ssh_command(context, host, [])


def test_job_of_another_user_is_named_as_such() -> None:
    context = context_of(desktop({}))
    check_owner(context, JobRecord("17", "RUNNING", user="alice"))
    check_owner(context, None)
    with pytest.raises(UsageError, match=r"job 18 belongs to bob, not to alice\n  fix: .* open to that user alone"):
        check_owner(context, JobRecord("18", "RUNNING", user="bob"))
    # The name is that of ~/.ssh/config: Shoal does not know it.
    check_owner(context_of(desktop({}), login=Login("desktop")), JobRecord("18", "RUNNING", user="bob"))


async def test_ssh_on_a_host_of_the_cluster_needs_no_ssh() -> None:
    host = desktop({("squeue",): QUEUE})
    context = Context(JoinedCluster(RECORD), connector=FakeConnector(FakeHost(Target("c1"), host.answers)))
    assert (await ssh_command(context, "n1", ["id"]))[:3] == ["srun", "--jobid=12", "--nodelist=n1"]
    with pytest.raises(UsageError, match="no running job of yours is on c1\n  fix: users log in there"):
        await ssh_command(context, "c1", [])
    assert forget_host(context, "c1") is False


async def test_login_host_without_slurmctld_does_not_say_that_it_is_down() -> None:
    version = {("scontrol", "--version"): b"slurm-wlm 22.05.8\n"}
    absent = desktop({**version, ("systemctl",): b"LoadState=not-found\nActiveState=inactive\n"})
    assert await running_version(absent) == "22.05.8"
    down = desktop({**version, ("systemctl",): b"LoadState=loaded\nActiveState=failed\n"})
    with pytest.raises(SlurmError, match="slurmctld does not run on desktop"):
        await running_version(down)


OPERATORS = ("check", "plan", "up", "down", "restore", "reap", "try lambda", "bench links", "keys rotate munge")
NODES = ("node drain n1", "node resume n1", "node remove n1")


@cases("line", *OPERATORS, *NODES)
def test_command_that_needs_root_says_so_and_advises_no_sudo(line: str) -> None:
    store(RECORD, Login("desktop", "alice"))
    words = line.split()
    at = 2 if words[0] in ("node", "keys", "bench") else 1
    done = CliRunner().invoke(make_app(words[0]), [*words[:at], "--json", *words[at:]])
    answer = json.loads(done.output)
    assert (done.exit_code, answer["error"]) == (2, "UsageError")
    assert "needs the operator's file of cluster reef, and the right to become root" in answer["message"]
    assert "sudo" not in done.output and "NOPASSWD" not in done.output
