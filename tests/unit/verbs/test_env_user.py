"""`shoal env` of an ordinary user, over a host in memory: the cluster's environments, and the user's own."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.screens import screen_text

from shoal.cli.env_commands import _own_environment, show_list
from shoal.contract import VERSION
from shoal.environments.requirements import note_git
from shoal.errors import ShoalError, UsageError
from shoal.hosts.api import Result, Target
from shoal.jobs.record import OWNERS_COMMAND
from shoal.spec.cluster_record import RECORD_PATH, ClusterRecord, RecordShare
from shoal.spec.environments import Environment
from shoal.verbs.context import Context
from shoal.verbs.env_user import build_own, clean_own, list_user_environments, remove_own, user_job_environment
from shoal.verbs.joined_cluster import JoinedCluster, Login
from shoal_simulators.fake_host import Call, FakeConnector, FakeHost, FakeProgram

ROOT = "/data/shoal-jobs/alice"
OWN = f"{ROOT}/environments"
CLUSTER = "/shared/environments"
RECORD = ClusterRecord(
    "reef",
    VERSION,
    "c1",
    shares={"/data": RecordShare("nfs")},
    jobs="/data/shoal-jobs",
    environments={"torch": CLUSTER, "sea": CLUSTER},
    proxy={"http_proxy": "http://proxy:3128"},
)
TORCH = {"name": "torch", "id": "a" * 16, "path": "", "python": "3.11", "shoal": VERSION, "source": "s1"}
MINE = {**TORCH, "name": "mine", "id": "b" * 16, "source": "s2"}
DONE = {**MINE, "event": "done", "path": f"{OWN}/{'b' * 16}", "packages": ["six==1.16.0"], "made": True}
OWNER = re.compile(r"JobId=(\d+) .*UserId=\w+\((\d+)\)")


class Desktop:
    """The host that alice logs in to."""

    def __init__(self, record: ClusterRecord = RECORD) -> None:
        self.own: list[dict[str, Any]] = [MINE]
        self.cluster: list[dict[str, Any]] = [TORCH]
        self.unsafe: dict[str, str] = {}
        self.event: dict[str, Any] = DONE
        self.request: dict[str, Any] = {}
        self.stored = ""
        self.jobs = ""
        self.commands: list[tuple[str, ...]] = []
        self.host = FakeHost(
            Target("desktop"),
            {
                ("cat", RECORD_PATH): record.as_json().encode(),
                ("python3",): self._python,
                ("sh",): self._store,
                ("scontrol",): lambda call: self.jobs.encode(),
                OWNERS_COMMAND: lambda call: "\n".join(map(" ".join, OWNER.findall(self.jobs))).encode(),
            },
        )
        joined = JoinedCluster(record, Login("desktop", "alice"))
        self.context = Context(joined, connector=FakeConnector(self.host))

    async def _python(self, program: FakeProgram) -> int:
        text = program.call.argv[5]
        if program.call.argv[6:7] == ("environments",):
            directories = {OWN: {"real": OWN, "environments": self.own}}
            if CLUSTER not in self.unsafe:
                directories[CLUSTER] = {"real": CLUSTER, "environments": self.cluster}
            answer = {"user": "alice", "own": OWN, "directories": directories, "unsafe": self.unsafe}
        elif "job_directory.py" in text:
            answer = {"root": ROOT, "user": "alice", "code": False, "runtime": False}
        else:
            self.request = json.loads(await program.readline())
            answer = self.event
        await program.print(json.dumps(answer).encode() + b"\n")
        return 0

    def _store(self, call: Call) -> bytes | Result:
        self.commands.append(call.argv[4:])
        if call.argv[4] == "remove_name":
            self.own = [entry for entry in self.own if entry["name"] != call.argv[6]]
        return {"list": self.stored.encode(), "inspect": b"env 3.11\n"}.get(call.argv[4], b"")

    def verbs(self) -> list[str]:
        return [command[0] for command in self.commands]


@pytest.fixture
def desktop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desktop:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reqs.txt").write_text("six\n")
    return Desktop()


REQUIREMENTS = Environment(requirements="reqs.txt")


async def test_environment_is_built_in_the_users_own_directory(desktop: Desktop) -> None:
    result = await build_own(desktop.context, "mine", REQUIREMENTS)
    assert (result.fresh, result.findings, result.made[0].link) == (("mine",), (), f"{OWN}/mine")
    request = desktop.request
    assert (request["directory"], request["local"], request["place"]) == (OWN, OWN, "shared")
    assert request["proxy"] == {"http_proxy": "http://proxy:3128"}
    assert request["git_fix"].startswith("ask the operator to install git on desktop")
    assert desktop.commands[0] == ("write_link", f"{OWN}/mine", "b" * 16)


async def test_name_of_the_cluster_cannot_be_taken(desktop: Desktop) -> None:
    taken = "cluster reef has an environment sea already\n  fix: choose another name for yours"
    assert await error_of(UsageError, build_own(desktop.context, "sea", REQUIREMENTS)) == taken
    assert desktop.request == {}


async def test_environment_that_no_share_has_is_a_warning(desktop: Desktop) -> None:
    result = await build_own(Desktop(replace(RECORD, shares={})).context, "mine", REQUIREMENTS)
    [finding] = result.findings
    assert "is not on a share" in finding.what and finding.fix == "run its jobs with --nodelist c1"


async def test_failed_build_is_reported_and_not_published(desktop: Desktop) -> None:
    desktop.event = {"event": "failed", "what": "this host has no git", "fix": "ask"}
    with pytest.raises(ShoalError, match="cannot build environment mine on desktop: this host has no git"):
        await build_own(desktop.context, "mine", REQUIREMENTS)
    assert desktop.commands == []


async def test_list_shows_those_of_the_cluster_and_ones_own(desktop: Desktop) -> None:
    desktop.own.append({**TORCH, "id": "c" * 16, "shoal": ""})
    listed = await list_user_environments(desktop.context)
    assert [(entry.name, entry.owner, entry.state, entry.path) for entry in listed] == [
        ("torch", "", "built", f"{CLUSTER}/torch"),
        ("sea", "", "not built", ""),
        ("mine", "alice", "built", f"{OWN}/mine"),
        ("torch", "alice", "outdated", f"{OWN}/torch"),
    ]
    text = screen_text(show_list, listed, width=300, is_user=True)
    assert "sea is not built: ask the operator to build it" in text
    assert "torch: yours is used, not the one of the cluster; `shoal env remove torch` removes yours" in text


async def test_job_uses_ones_own_before_that_of_the_cluster(desktop: Desktop) -> None:
    async def path_of(name: str) -> str:
        return (await user_job_environment(desktop.host, RECORD, name)).program

    assert await path_of("torch") == f"{CLUSTER}/{'a' * 16}/bin/python"
    desktop.own.append({**TORCH, "id": "c" * 16})
    assert await path_of("torch") == f"{OWN}/{'c' * 16}/bin/python"
    assert await path_of("mine") == f"{OWN}/{'b' * 16}/bin/python"
    for name, words in {
        "sea": "environment sea is not built yet\n  fix: ask the operator to `shoal env build sea`",
        "mien": "there is no environment 'mien'\n  fix: did you mean `mine`?; `shoal env build mien --requirements",
    }.items():
        assert (await error_of(UsageError, path_of(name))).startswith(words)
    desktop.unsafe = {CLUSTER: f"{CLUSTER} belongs to bob"}
    desktop.own = []
    assert await error_of(UsageError, path_of("torch")) == (
        f"environment torch is not used: {CLUSTER} belongs to bob\n  fix: ask the operator to repair it"
    )


def job(number: int, user: str, comment: str = "") -> str:
    return f"JobId={number} JobName=x UserId={user}(2000) JobState=RUNNING Comment={comment}\n"


@cases(
    "jobs, kept",
    ("", {}),
    (job(17, "alice", f"shoal:c0de/11b@{'b' * 16}"), {"b" * 16: "job 17 uses it"}),
    (job(17, "alice", f"shoal:c0de/11b@{'a' * 16}"), {}),
    (job(18, "alice"), {"b" * 16: "job 18 uses it"}),
    (job(18, "bob"), {}),
)
async def test_removed_environment_stays_while_a_job_may_use_it(
    desktop: Desktop, jobs: str, kept: dict[str, str]
) -> None:
    desktop.jobs, desktop.stored = jobs, f"{'b' * 16} 5 0\n"
    result = await remove_own(desktop.context, "mine")
    assert ("remove_name", OWN, "mine") in desktop.commands
    assert result.kept == kept and result.removed == ({} if kept else {"c1": ("b" * 16,)})
    assert (("remove", OWN, "b" * 16) in desktop.commands) == (not kept)


async def test_clean_removes_what_has_no_name(desktop: Desktop) -> None:
    desktop.stored = f"{'b' * 16} 9999 0\n{'d' * 16} 9999 0\n{'e' * 16} 5 0\n"
    assert (await clean_own(desktop.context, dry_run=True)).removed == {"c1": ("d" * 16,)}
    assert "remove" not in desktop.verbs() and "sweep" not in desktop.verbs()
    result = await clean_own(desktop.context)
    assert result.removed == {"c1": ("d" * 16,)} and list(result.kept) == ["e" * 16]
    assert ("remove", OWN, "d" * 16) in desktop.commands


@cases("name, words", ("torch", "environment torch belongs to the cluster"), ("x", "you have no environment 'x'"))
async def test_only_ones_own_environment_can_be_removed(desktop: Desktop, name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        await remove_own(desktop.context, name)
    assert desktop.commands == []


@cases(
    "names, given, words",
    ([], {"requirements": "r.txt"}, "and 0 names are given"),
    (["a", "b"], {"requirements": "r.txt"}, "and 2 names are given"),
    (["a"], {}, "and no file is given"),
    (["a"], {"requirements": "r.txt", "lock": "l.txt"}, "and several files are given"),
    (["A"], {"lock": "l.txt"}, "'A': not a name for an environment"),
    (["names"], {"lock": "l.txt"}, "'names': a name that Shoal uses itself"),
    (["0123456789abcdef"], {"lock": "l.txt"}, "not a name for an environment"),
    (["a123456789abcdef"], {"lock": "l.txt"}, "a name that Shoal uses itself"),
    (["a"], {"lock": "l.txt", "python": "2.7"}, "--python '2.7': not a Python"),
)
def test_wrong_description_of_ones_own_is_rejected(names: list[str], given: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as error:
        _own_environment(names, given)
    assert words in error.value.message and error.value.hint


@cases(
    "line, needed",
    ("perch @ git+https://git.example.org/perch.git@v1", True),
    ("git+ssh://git.example.org/perch.git", True),
    ("perch-git==1.0", False),
    ("perch @ https://example.org/git+perch.whl", False),
)
def test_requirement_of_a_git_repository_is_noticed(tmp_path: Path, line: str, needed: bool) -> None:
    (tmp_path / "reqs.txt").write_text("-r more.txt\n")
    (tmp_path / "more.txt").write_text(f"six\n{line}\n")
    noted = note_git({"a": REQUIREMENTS, "b": Environment(lock="none.txt")}, tmp_path)
    assert (noted["a"].needs_git, noted["b"].needs_git) == (needed, False)
