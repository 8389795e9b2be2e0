"""`shoal env`, `shoal run --env`, `shoal ui` and the services in `shoal status`, over hosts in memory."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_world import host_facts, spec_of
from tests.support.screens import screen_text

from shoal.agent.facts import FileFact
from shoal.cli.cluster_screens import show_services
from shoal.cli.env_commands import show_built, show_cleaned, show_list
from shoal.contract import VERSION
from shoal.environments.store import (
    MARK,
    BuiltEnvironment,
    NodeEnvironment,
    StoredEnvironment,
    inspect_command,
    parse_inspection,
)
from shoal.errors import CommandTimeout, PartialFailure, ShoalError, UsageError
from shoal.hosts.api import Target
from shoal.jobs.model import JobPaths, JobSpec, ResolvedJob
from shoal.jobs.record import JobComment
from shoal.jobs.script import sbatch_script
from shoal.roles.clock import CONTAINER_MARKS
from shoal.tracking import login, mlflow
from shoal.verbs import env
from shoal.verbs.context import Context
from shoal.verbs.env import (
    CleanResult,
    EnvironmentState,
    explain_kept,
    job_environment,
    list_environments,
    require_environment,
)
from shoal.verbs.env_build import BuildResult, build
from shoal.verbs.health import Clocks, TrackingHealth, clocks, tracking_health
from shoal.verbs.status import ClusterStatus
from shoal.verbs.ui import WebPage, ui
from shoal_simulators.fake_host import FakeConnector, FakeHost, FakeProgram

REEF = """
cluster: reef
controller: {host: c1}
nodesets:
  lab: {hosts: [n1, n2]}
environments:
  torch: {requirements: reqs.txt}
"""
MADE = {
    "event": "done",
    **{"id": "ab12", "path": "/shared/environments/ab12", "place": "shared", "python": "3.11", "source": "cd34"},
    **{"packages": ["six==1.16.0"], "torch": None, "cuda": None, "made_at": 0, "made": True, "shoal": VERSION},
}


class Hosts:
    """A controller with a scripted builder, and two nodes."""

    def __init__(self, place: Path, told: dict[str, Any] = MADE, looks: dict[str, str] | None = None) -> None:
        (place / "reqs.txt").write_text("six\n")
        self.told, self.names = told, b""
        self.looks = looks or {"n1": "env 3.11\n", "n2": "env 3.11\n"}
        self.asked: dict[str, Any] = {}
        self.links: tuple[str, ...] = ()
        self.controller = FakeHost(Target("c1"), {("python3",): self._builder, ("sh",): self._shell})
        nodes = [FakeHost(Target(name), {("sh",): self._look(name)}) for name in ("n1", "n2")]
        self.context = Context(spec_of(REEF), place / "shoal.yaml", connector=FakeConnector(self.controller, *nodes))

    async def _builder(self, program: FakeProgram) -> int:
        self.asked = json.loads(await program.readline())
        await program.print(b'{"event": "progress", "text": "Collecting six"}\n')
        await program.print(json.dumps(self.told).encode() + b"\n")
        return 0

    def _shell(self, call: Any) -> bytes:
        if call.stdin:
            self.names = call.stdin
        if call.argv[4] == "write_link":
            self.links = call.argv[5:]
        return self.names if call.argv[4] == "read_names" else b""

    def _look(self, name: str) -> Any:
        return lambda call: self.looks[name].encode()


async def test_environment_is_built_on_the_controller_and_published(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    result = await build(hosts.context)
    assert (result.failures, result.fresh, result.findings) == ({}, ("torch",), ())
    assert hosts.asked["requirements"] == "six\n" and hosts.asked["directory"] == "/shared/environments"
    assert json.loads(hosts.names)["id"] == "ab12" and hosts.links == ("/shared/environments/torch", "ab12")
    assert hosts.asked["shoal"] == VERSION and "def init" in "".join(hosts.asked["files"].values())
    [listed] = await list_environments(hosts.context)
    assert (listed.name, listed.state, listed.path) == ("torch", "built", "/shared/environments/torch")
    (tmp_path / "reqs.txt").write_text("six<2\n")
    [listed] = await list_environments(hosts.context)
    assert listed.state == "changed"
    (tmp_path / "reqs.txt").write_text("six\n")
    moved = spec_of(REEF.replace("reqs.txt", "reqs.txt, directory: /data/environments"))
    [listed] = await list_environments(replace(hosts.context, known=moved))
    assert (listed.state, listed.made and listed.made.path) == ("built", "/data/environments/ab12")


async def test_build_error_is_reported_and_nothing_published(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, {"event": "failed", "what": "uv cannot resolve the packages: no", "fix": "correct it"})
    assert await error_of(ShoalError, build(hosts.context)) == (
        "cannot build environment torch on c1: uv cannot resolve the packages: no\n  fix: correct it"
    )
    assert hosts.names == b""


async def test_files_bound_to_a_path_are_a_warning_and_the_environment_is_published(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, {**MADE, "bound": [["bin/fix-it", "/opt/ci/bin/python"]]})
    result = await build(hosts.context)
    [finding] = result.findings
    assert not result.failures and (finding.level, str(finding)) == (
        "warning",
        "environment torch: bin/fix-it works only where /opt/ci/bin/python is, "
        "choose another version of the package that contains it",
    )
    [listed] = await list_environments(hosts.context)
    assert listed.made == result.made[0]


@cases(
    "looks, level, words",
    ({"n1": "env missing\n", "n2": "env missing\n"}, "error", "the nodes do not see /shared/environments"),
    ({"n1": "env 3.11\n", "n2": "env missing\n"}, "warning", "the nodes do not see /shared/environments"),
    (dict.fromkeys(("n1", "n2"), "env broken\nwhy not there\n"), "error", "does not start, found not there"),
    ({"n1": "env 3.11\n", "n2": "env 3.13\n"}, "warning", "have no Python 3.11 to run it, found Python 3.13"),
)
async def test_incompatible_nodes_are_named_and_nothing_is_published_if_all_are(
    tmp_path: Path, looks: dict[str, str], level: str, words: str
) -> None:
    hosts = Hosts(tmp_path, looks=looks)
    [finding] = (await build(hosts.context)).findings
    assert finding.level == level and words in str(finding)
    assert bool(hosts.names) == (level == "warning")


def test_node_reports_why_the_environment_python_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / MARK).touch()
    python = tmp_path / "bin" / "python"
    python.symlink_to("/nowhere/python3")

    def look() -> NodeEnvironment:
        said = subprocess.run(inspect_command(str(tmp_path)), stdout=subprocess.PIPE, check=True).stdout
        return parse_inspection(said.decode())

    assert look().state == "broken" and look().why.endswith("not found")
    python.unlink()
    python.symlink_to(sys.executable)
    assert look() == NodeEnvironment(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert parse_inspection("env 3.11\narchive\ndriver 580.95.05\n") == NodeEnvironment("3.11", True, "580.95.05")
    assert parse_inspection("env missing\n") == parse_inspection("") == NodeEnvironment("missing")


@cases("name, words", ("tor", "did you mean `torch`?"), ("xyz", "known: torch"))
async def test_unknown_environment_is_rejected(tmp_path: Path, name: str, words: str) -> None:
    context = Hosts(tmp_path).context
    with pytest.raises(UsageError, match="has no environment") as error:
        await build(context, [name])
    assert words in str(error.value)
    with pytest.raises(UsageError, match="the spec has no environments"):
        await build(replace(context, known=spec_of(REEF.partition("environments")[0])))


async def test_silent_share_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(program: FakeProgram) -> int:
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(env, "NAMES_TIMEOUT_S", 0.05)
    places = env.choose_environments(Hosts(tmp_path).context, ["torch"])
    assert await error_of(CommandTimeout, env.current_environments(FakeHost("c1", {("sh",): hang}), places)) == (
        "c1: cannot read /shared/environments within 0.05 s\n  fix: check that the server of the share it is on is up"
    )


async def test_job_needs_a_built_and_current_environment(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    async with await hosts.context.connections() as fleet:
        with pytest.raises(UsageError, match="environment torch is not built yet"):
            await job_environment(hosts.context, fleet, "torch")
        await build(hosts.context)
        made = await job_environment(hosts.context, fleet, "torch")
        assert made.program == "/shared/environments/ab12/bin/python"
        await require_environment(fleet, made, ["n1", "n2"])
        hosts.looks["n2"] = "env missing\n"
        with pytest.raises(PartialFailure, match="n2 cannot use environment torch, so nothing was queued"):
            await require_environment(fleet, made, ["n1", "n2"])
        (tmp_path / "reqs.txt").write_text("six<2\n")
        with pytest.raises(UsageError, match="built from another version"):
            await job_environment(hosts.context, fleet, "torch")


def test_old_environment_in_use_or_recent_is_kept() -> None:
    stored = (("a", 9999, False), ("b", 9999, True), ("c", 5, False), ("d", 9999, False), ("now", 5, True))
    assert explain_kept([StoredEnvironment(*one) for one in stored], {"now"}, {"a": "17"}) == {
        "a": "job 17 uses it",
        "b": "a process uses it",
        "c": "built or used less than 10 minutes ago",
    }


@cases("words", ("a1", "b2"), ("a1", "b2", "torch"), ("a1", "b2", "", "c3"), ("a1", "b2", "nsys", "c3"))
def test_job_comment_with_an_environment_round_trips(words: tuple[str, ...]) -> None:
    assert JobComment.parse(str(JobComment(*words))) == JobComment(*words)


def test_batch_script_puts_the_environment_first_on_the_path() -> None:
    job = ResolvedJob(JobSpec(script="train.py", python="/e/ab12/bin/python"), "main", 1, 0, 1, 1)
    script = sbatch_script(job, JobPaths("reef", "/jobs", "c0de", "11b", ".", "/e/ab12"))
    assert "#SBATCH --comment=shoal:c0de/11b@ab12\n" in script
    assert "\nexport VIRTUAL_ENV=/e/ab12 PATH=/e/ab12/bin:$PATH\n" in script
    assert script.count("/e/ab12/bin/python") == 3  # two programs of Shoal's own, and the script
    assert "VIRTUAL_ENV" not in sbatch_script(job, JobPaths("reef", "/jobs", "c0de", "11b"))


def test_environment_screens_show_state_and_cleanup() -> None:
    link = "/shared/environments/torch"
    made = BuiltEnvironment.of({**MADE, "name": "torch", "torch": "2.13.0", "cuda": "13.0", "link": link})
    text = screen_text(show_built, BuildResult("reef", (made,), ("torch",), {"torch": ("n1", "n2")}))
    assert "torch: built; 1 package, Python 3.11, torch 2.13.0 for CUDA 13.0; /shared/environments/torch" in text
    assert "copied to n[1-2]" in text
    text = screen_text(
        show_list,
        [EnvironmentState("torch", "built", "shared", made, link), EnvironmentState("sea", "not built", "local")],
    )
    assert "2.13.0 cuda 13.0" in text and "\ntorch is in /shared/environments/torch\n" in text
    assert "`shoal env build sea` builds what is missing" in text
    text = screen_text(show_cleaned, CleanResult("reef", {"c1": ("ab",)}, {"cd": "a process uses it"}), False)
    assert text == "removed ab from c1\nkept cd: a process uses it\n"
    assert screen_text(show_cleaned, CleanResult("reef"), True) == "nothing to clean\n"


# ---- services in `status`


def status_with(**more: Any) -> ClusterStatus:
    return ClusterStatus("reef", "c1", "22.05.8", (), (), (), **more)


async def test_clock_offsets_are_relative_to_the_controller_and_skip_silent_hosts() -> None:
    class Answering:
        def __init__(self, offset: float) -> None:
            self.offset = offset

        async def facts(self, ask: object) -> Any:
            if self.offset > 99:
                raise CommandTimeout("n2", "it")
            container = {CONTAINER_MARKS[0]: FileFact(there=True)} if self.offset == 2.5 else {}
            return host_facts("n1", "10.0.0.1", clock_offset=self.offset, files=container)

    class Hosts:
        async def agent(self, name: str) -> Answering:
            return Answering({"c1": 2.5, "n1": 2.25, "n2": 100.0}[name])

    found = await clocks(Hosts(), ["c1", "n1", "n2"], "c1")  # type: ignore[arg-type]
    assert found == Clocks({"n1": -0.25}, ("c1",))
    assert await clocks(Hosts(), ["n1"], "c1") == Clocks()  # type: ignore[arg-type]
    text = screen_text(show_services, status_with(clocks=Clocks({"n1": 0.02, "n2": -3.21}, ("n1",))))
    assert text == "\nclocks: within 0.02 s of c1's, n2 -3.2 s; n1: containers, on their machine's clock\n"
    assert screen_text(show_services, status_with(clocks=Clocks())) == screen_text(show_services, status_with()) == ""


async def test_tracking_server_is_probed_from_the_controller() -> None:
    spec = spec_of(REEF + "tracking: mlflow\n")
    told = b'{"uri": "http://10.0.0.1:5000", "username": "jobs"}\nsecret\n'
    for answer, well in ((b"200\n", True), (b"<urlopen error refused>\n", False)):
        host = FakeHost(Target("c1"), {login.ADDRESS_COMMAND: told, ("python3",): answer})
        health = await tracking_health(host, spec)
        assert health and (health.uri, health.well) == ("http://10.0.0.1:5000", well)
        assert ("responds" in screen_text(show_services, status_with(tracking=health))) == well
        assert "secret" not in repr(health)
    assert await tracking_health(FakeHost(Target("c1"), {}), spec) == TrackingHealth(
        "mlflow", "", False, "not set up yet; run `shoal up`"
    )
    assert await tracking_health(FakeHost(Target("c1"), {}), spec_of(REEF)) is None


# ---- ui


class Tunnel(FakeHost):
    async def forward(self, address: str, port: int, near: int = 0) -> int:
        self.to = (address, port)
        return near or 4711

    async def wait_closed(self) -> None:
        return None


async def opened(more: str, host: FakeHost, **options: Any) -> list[WebPage]:
    pages: list[WebPage] = []
    context = Context(spec_of(REEF + more), connector=FakeConnector(host))
    with pytest.raises(ShoalError) as error:
        await ui(context, "mlflow", pages.append, **options)
    assert pages or "tracking server" in str(error.value), error.value
    return pages


UNIT = mlflow.unit(mlflow.MlflowServer("c1", "10.0.0.1", 5050, "sqlite", "/a")).encode()


@cases(
    "stored, user, password",
    (b"secret\n", "admin", "secret"),
    (mlflow.user_login("ann").replace("@PASSWORD@", "hers").encode(), "ann", "hers"),
)
async def test_page_url_is_local_and_the_password_shown_on_request(stored: bytes, user: str, password: str) -> None:
    answers = {("cat", mlflow.UNIT): UNIT, login.LOGIN_COMMAND: stored, ("python3",): b"200\n"}
    host = Tunnel(Target("c1"), answers)
    assert await opened("tracking: mlflow\n", host) == [WebPage("mlflow", "http://127.0.0.1:4711", user)]
    assert host.to == ("10.0.0.1", 5050)
    [page] = await opened("tracking: mlflow\n", host, port=99, show_password=True)
    assert (page.url, page.user, page.password) == ("http://127.0.0.1:99", user, password)


async def test_stopped_or_missing_server_is_reported_before_a_tunnel_opens() -> None:
    host = Tunnel(Target("c1"), {("cat", mlflow.UNIT): UNIT, ("python3",): b"Connection refused\n"})
    context = Context(spec_of(REEF + "tracking: mlflow\n"), connector=FakeConnector(host))
    assert await error_of(ShoalError, ui(context, "mlflow", lambda page: pytest.fail("no page"))) == (
        "the tracking server on c1 does not answer: Connection refused\n"
        "  fix: run `shoal up`; `shoal ssh c1 journalctl -u shoal-mlflow` shows why"
    )
    for more in ("tracking: mlflow\n", ""):
        assert await opened(more, Tunnel(Target("c1"), {})) == []


async def test_external_server_needs_no_tunnel_and_an_unknown_page_is_rejected() -> None:
    context = Context(spec_of(REEF + "tracking: {url: https://t.example.org}\n"), connector=FakeConnector())
    pages: list[WebPage] = []
    await ui(context, "mlflow", pages.append)
    assert pages == [WebPage("mlflow", "https://t.example.org")]
    with pytest.raises(UsageError, match="there is no page 'grafana'"):
        await ui(context, "grafana", pages.append)
