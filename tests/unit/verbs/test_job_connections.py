"""Which hosts `shoal run` connects to, and which modules job commands import: both cost start time."""

import subprocess
import sys

from tests.support.cases import cases

from shoal.slurm.state import NODES_COMMAND, PARTITIONS_COMMAND
from shoal.spec.loader import load_text
from shoal.verbs.context import Context
from shoal.verbs.early_login import MAX_EAGER_HOSTS
from shoal.verbs.submission import connect
from shoal_simulators.fake_host import FakeConnector, FakeHost

SPEC = "cluster: reef\ncontroller: {{host: c1}}\nnodesets:\n  lab: {{hosts: ['n[1-{}]']}}\n"
SLURM = {NODES_COMMAND: b"nodes", PARTITIONS_COMMAND: b"partitions"}


def reef(nodes: int = 2) -> tuple[Context, FakeConnector]:
    names = [f"n{number}" for number in range(1, nodes + 1)]
    connector = FakeConnector(FakeHost("c1", SLURM), *map(FakeHost, names))
    return Context(load_text(SPEC.format(nodes), "shoal.yaml"), connector=connector), connector


async def test_all_hosts_of_a_small_cluster_are_connected_and_closed() -> None:
    context, connector = reef()
    async with connect(context) as connections:
        assert await connections.slurm == ["nodes", "partitions"]
        assert (await connections.fleet.host("n1")).name == "n1"
        await connections.fleet.host("n2")
    assert [host.connects for host in connector.hosts.values()] == [1, 1, 1]
    assert all(host.closed for host in connector.hosts.values())


async def test_only_the_controller_of_a_large_cluster_is_connected() -> None:
    context, connector = reef(MAX_EAGER_HOSTS)
    async with connect(context) as connections:
        assert await connections.slurm == ["nodes", "partitions"]
    assert {name for name, host in connector.hosts.items() if host.connects} == {"c1"}


async def test_connections_can_be_closed_before_slurm_answers() -> None:
    context, _ = reef()
    async with connect(context) as connections:
        assert not connections.slurm.done()
    assert connections.slurm.cancelled() and connections.tracking.cancelled()


HEAVY = (
    *("ruamel", "sqlite3", "shoal.roles", "shoal.elastic", "shoal.spec.model", "shoal.plan.diff"),
    *("shoal.agent.client", "pydantic", "rich"),
)
"""What reads and judges the file, and what `up` and `down` know: a tenth of a second each, or more."""


@cases(
    "used, last, unused",
    ("cli.run_command verbs.early_login sandbox.provider verbs.run", "verbs.run", HEAVY),
    ("cli.job_commands verbs.jobs verbs.logs cli.job_screens", "verbs.logs", ("pydantic",)),
    ("verbs.up verbs.check verbs.down", "verbs.up", ("httpx",)),
    ids=["run", "jobs and logs", "up without rented machines"],
)
def test_command_does_not_import_what_it_does_not_need(used: str, last: str, unused: tuple[str, ...]) -> None:
    modules = ", ".join(f"shoal.{name}" for name in ("cli.app", *used.split()))
    line = [sys.executable, "-c", f"import sys, {modules}; print(*sys.modules)"]
    loaded = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    assert f"shoal.{last}" in loaded and [name for name in unused if name in loaded] == []
