"""Hosts are reached while a command still loads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.cli import early
from shoal.errors import ProviderError, Unreachable
from shoal.hosts.api import Target
from shoal.hosts.fake import FakeConnector, FakeHost
from shoal.providers.fake import FakeProvider
from shoal.slurm.state import NODES_COMMAND, PARTITIONS_COMMAND
from shoal.spec.load import load_text
from shoal.verbs.connect_early import AT_ONCE, Ahead, Reached, reach
from shoal.verbs.context import Context, open_hosts

SPEC = "cluster: reef\ncontroller: {{host: c1}}\nnodesets:\n  lab: {{hosts: ['n[1-{}]']}}\n"
SLURM = {NODES_COMMAND: b"nodes", PARTITIONS_COMMAND: b"partitions"}


class Noticed(FakeConnector):
    """Tells other threads when the last of its hosts is asked for."""

    def __init__(self, *hosts: FakeHost) -> None:
        super().__init__(*hosts)
        self.all_asked = threading.Event()

    async def connect(self, target: Target) -> FakeHost:
        if target.name == list(self.hosts)[-1]:
            self.all_asked.set()
        return await super().connect(target)


def reef(nodes: int = 2) -> tuple[Context, Noticed]:
    names = [f"n{number}" for number in range(1, nodes + 1)]
    connector = Noticed(FakeHost("c1", SLURM), *map(FakeHost, names))
    return Context(load_text(SPEC.format(nodes), "shoal.yaml"), connector=connector), connector


def taken_over(ahead: Ahead) -> list[str]:
    """What Slurm said, as a command learns it."""

    async def work() -> list[str]:
        async with await ahead.reached() as reached:
            assert (await reached.fleet.host("n1")).name == "n1"
            return await reached.slurm

    with asyncio.Runner(loop_factory=ahead.take_over) as runner:
        return runner.run(work())


def test_the_thread_connects_while_others_work_and_the_command_goes_on_with_it() -> None:
    context, connector = reef()
    ahead = Ahead(context)
    assert connector.all_asked.wait(30), "nobody has taken it over yet"
    assert taken_over(ahead) == ["nodes", "partitions"]
    assert [host.connects for host in connector.hosts.values()] == [1, 1, 1]
    assert all(host.closed for host in connector.hosts.values())


async def test_of_a_large_cluster_only_the_controller_is_met() -> None:
    context, connector = reef(AT_ONCE)
    async with await reach(context) as reached:
        assert await reached.slurm == ["nodes", "partitions"]
    assert {name for name, host in connector.hosts.items() if host.connects} == {"c1"}


def test_what_nobody_needs_is_left_whatever_became_of_it() -> None:
    context, connector = reef()
    ahead = Ahead(context)
    connector.all_asked.wait(30)
    ahead.leave()
    assert all(host.closed for host in connector.hosts.values())
    connector.hosts["c1"].unreachable = True
    Ahead(context).leave()
    Ahead(nowhere()).leave()


def test_what_stood_in_the_way_is_told_to_who_takes_over() -> None:
    context, connector = reef()
    connector.hosts["c1"].unreachable = True
    with pytest.raises(Unreachable, match="c1: does not answer"):
        taken_over(Ahead(context))
    with pytest.raises(ProviderError, match="host controller is not there yet"):
        taken_over(Ahead(nowhere()))


def nowhere() -> Context:
    spec = load_text("cluster: none\ncontroller: {provider: sandbox, compute: true}\n", "shoal.yaml")
    return Context(spec, providers=lambda name: FakeProvider())


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("SHOAL_FILE", "SHOAL_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "reef.yaml").write_text("cluster: reef\ncontroller: {host: localhost.invalid, compute: true}\n")
    (tmp_path / "other.yaml").write_text("cluster: other\ncontroller: {host: other.invalid, compute: true}\n")
    return tmp_path / "reef.yaml"


@pytest.mark.parametrize(
    ("words", "reached"),
    [
        ("--file reef.yaml train.py", "reef"),
        ("-f reef.yaml train.py", "reef"),
        ("--file=reef.yaml train.py", "reef"),
        ("train.py --file other.yaml", "other"),  # the script's own option: found out later
        ("--file reef.yaml --dry-run train.py", ""),
        ("--help", ""),
        ("--file", ""),
        ("--file nowhere.yaml train.py", ""),
        ("--file reef.yaml --cluster reef train.py", ""),
    ],
)
def test_the_cluster_of_a_command_line_is_reached_where_its_file_was_read_before(
    file: Path, words: str, reached: str
) -> None:
    early.begin(words.split())
    assert early._begun == [], "not read yet"
    open_hosts(file)
    open_hosts(file.with_name("other.yaml"))
    early.begin(words.split())
    assert [ahead.context.cluster for ahead in early._begun] == ([reached] if reached else [])
    context = open_hosts(file)
    ahead = early.begun(context)
    assert (early._begun, ahead.context.cluster) == ([], "reef")
    ahead.leave()


def test_what_is_reached_can_be_closed_before_slurm_has_answered() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        never: asyncio.Future[list[str]] = loop.create_future()
        nowhere: asyncio.Future[str] = loop.create_future()
        context, _ = reef()
        await Reached(await context.connections(), never, nowhere).close()
        assert never.cancelled() and nowhere.cancelled()

    asyncio.run(work())


HEAVY = (
    "ruamel",
    "sqlite3",
    "shoal.roles",
    "shoal.elastic",
    "shoal.spec.model",
    "shoal.plan.diff",
)
"""What reads and judges the file, and what `up` and `down` know: a tenth of a second each, or more."""


def test_running_a_job_and_showing_it_loads_nothing_of_what_builds_clusters() -> None:
    used = "shoal.cli.app, shoal.cli.job_commands, shoal.verbs.run, shoal.cli.job_results, shoal.cli.render_jobs"
    program = f"import sys, shoal.cli.early, {used}, shoal.providers.sandbox.provider; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert [name for name in HEAVY if name in done.stdout.split()] == []


def test_reaching_hosts_does_not_wait_for_pydantic() -> None:
    program = "import sys, shoal.verbs.connect_early, shoal.providers.sandbox.provider; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert "shoal.hosts.ssh" in done.stdout.split() and "pydantic" not in done.stdout.split()
