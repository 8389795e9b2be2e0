"""run, jobs, logs and cancel over a cluster in memory: which commands run on which host, in which order."""

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.specs import TWO_NODES
from tests.unit.jobs.job_clusters import job

import shoal
from shoal.errors import PartialFailure, SlurmError, UsageError
from shoal.hosts.api import Result, Target
from shoal.hosts.local import LocalHost
from shoal.jobs.launchers import is_profiler_missing
from shoal.jobs.logs import LogLine
from shoal.jobs.model import job_from_options
from shoal.jobs.record import OWNERS_COMMAND
from shoal.slurm.state import JOB_RECORD
from shoal.spec.loader import load_text
from shoal.storage.stage import PROGRAM
from shoal.verbs import logs as logs_verb
from shoal.verbs.context import Context
from shoal.verbs.job import Job
from shoal.verbs.jobs import cancel, jobs
from shoal.verbs.logs import follow, logs, wait_for_tasks
from shoal.verbs.run import dry_run, run
from shoal.verbs.spec_cache import CachedSpec
from shoal.verbs.submission import SUBMIT
from shoal_simulators.fake_host import Call, FakeConnector, FakeHost

SPEC = TWO_NODES
NODE = "NodeName={} CPUTot=4 CPUAlloc=0 RealMemory=14700 Gres=gpu:t4:2 Partitions=main State=IDLE Version=22.05.8\n"
PARTITION = "PartitionName=main Default=YES Nodes=n[1-2] State=UP MaxTime=UNLIMITED MaxNodes=UNLIMITED\n"
RECORD = "JobId=17 JobName=train UserId=root(0) JobState={} Reason=None Restarts=0 ExitCode={} TimeLimit=UNLIMITED"
RECORD += " NodeList=n[1-2] BatchHost=n1 NumNodes=2 WorkDir=/jobs Comment={}\n"
END = {"rank": 3, "node": "n2", "restart": 0, "start": 1.0, "end": 2.0, "status": 1}


class Reef:
    """A controller and two nodes, each with its own disk, or with one that they share."""

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.disks: dict[str, dict[str, bytes]] = {}
        self.states = ["FAILED"]
        self.files: dict[str, str] = {}
        self.old: list[str] = []
        self.comment = "(null)"
        self.record = RECORD
        self.partition = PARTITION
        self.slurmctld = "active"
        self.sbatch: bytes | Result = b"17;reef\n"
        self.submitted: dict[str, str] = {}
        self.remembered = 1000
        """The number of queries after which slurmctld has no record of the job."""
        self.ended = ""
        """The records of ended jobs in slurmctld's file."""
        self.accounted: bytes | Result = b""
        """Those in slurmdbd."""
        controller = {
            ("scontrol", "--version"): b"slurm-wlm 22.05.8\n",
            ("scontrol",): self._scontrol,
            OWNERS_COMMAND: b"17 0\n",
            ("systemctl", "show"): lambda call: f"LoadState=loaded\nActiveState={self.slurmctld}\n".encode(),
            ("sh",): self._shell,
            ("scancel",): b"",
            ("sacct",): lambda call: self.accounted,
        }
        self.controller = FakeHost(Target("c1"), controller)
        self.nodes = {name: FakeHost(Target(name), self._node(name)) for name in ("n1", "n2")}
        self.context = Context(
            load_text(SPEC, "shoal.yaml"), connector=FakeConnector(self.controller, *self.nodes.values())
        )

    def _shell(self, call: Call) -> bytes | Result:
        if "jobcomp" in call.argv[2]:
            a_day_ago = "2026-11-14T12:00:00\n" if "date" in call.argv[2] else ""
            return f"{a_day_ago}{self.ended}".encode()
        return self._submit(call) if "sbatch" in call.argv[2] else b""  # it has no tracking server

    def _submit(self, call: Call) -> bytes | Result:
        assert "sbatch" in call.argv[2] and not call.root, "the job is the login user's, not root's"
        variables, _, self.submitted["script"] = call.stdin.decode().partition("\n\n")
        self.submitted.update(line.split("=", 1) for line in variables.splitlines())
        return self.sbatch

    def _scontrol(self, call: Call) -> bytes | Result:
        if call.argv[-1] == "node":
            return (NODE.format("n1") + NODE.format("n2")).encode()
        if call.argv[-1] == "partition":
            return self.partition.encode()
        self.remembered -= 1
        if call.argv[-1] not in ("17", "job") or self.remembered < 0:
            return Result(1, stderr=b"slurm_load_jobs error: Invalid job id specified\n")
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return self.record.format(state, "1:0" if state == "FAILED" else "0:0", self.comment).encode()

    def _node(self, name: str) -> dict[tuple[str, ...], Any]:
        disk = self.disks.setdefault("all" if self.shared else name, {})

        def shell(call: Call) -> bytes | Result:
            verb, *words = call.argv[4:] or [""]
            if ': > "$1"' in call.argv[2]:
                disk[verb] = b""
            if call.stdin:
                disk[words[0]] = call.stdin
                return b""
            if verb != "inspect":
                return b""
            root, code, lib = words
            found = [name if not self.shared else "one", "shared" if f"{root}/.shared" in disk else ""]
            found += ["old"] if name in self.old else []
            found += ["code" if f"{root}/code/{code}.tar" in disk else "", "lib" if f"{root}/lib/{lib}" in disk else ""]
            return "\n".join(found).encode()

        async def python(program: Any) -> int:
            if "progress" in program.call.argv:
                await program.print(b'{"step": 12, "loss": 0.5}\n')
                return 0
            await program.print(self.files.get(name, "").encode())
            if program.call.argv[-1] == "follow":
                await program.readline()
            return 0

        return {
            ("sh",): shell,
            ("env",): b"",
            ("python3",): python,
        }

    def sent(self) -> dict[str, list[str]]:
        return {
            name: sorted(path for path in disk if not path.endswith(".shared")) for name, disk in self.disks.items()
        }


@pytest.fixture
def reef() -> Reef:
    return Reef()


async def test_submitted_script_equals_the_dry_run(reef: Reef, tree: Path) -> None:
    shown = await dry_run(reef.context, job(nodes=2), tree)
    assert all(host.calls == [] for host in reef.nodes.values()), "a dry run touches no node"
    submitted = await run(reef.context, job(nodes=2), tree)
    assert reef.submitted["script"] == shown.script == submitted.script
    assert (submitted.id, submitted.world_size, submitted.code) == ("17", 4, shown.tree.hash)


@cases("shares", False, True)
async def test_job_needs_only_the_cached_spec(reef: Reef, tree: Path, shares: bool) -> None:
    members = reef.context.members
    context = replace(reef.context, known=CachedSpec("reef", members, shares), file=tree / "no-such-file.yaml")
    submitted = await run(context, job(nodes=2), tree)
    assert (PROGRAM in submitted.script) is shares


async def test_every_node_gets_the_bundle_once(reef: Reef, tree: Path) -> None:
    first = await run(reef.context, job(nodes=2), tree)
    paths = [f"/var/lib/shoal/jobs/reef/code/{first.code}.tar", *[p for p in reef.sent()["n1"] if "/reef/lib/" in p]]
    assert reef.sent() == {"n1": sorted(paths), "n2": sorted(paths)} and first.sent > 0
    assert (await run(reef.context, job(nodes=2), tree)).sent == 0


async def test_shared_storage_gets_a_single_bundle_and_jobs_use_the_shared_directory(tree: Path) -> None:
    reef = Reef(shared=True)
    own = await run(Reef().context, job(nodes=2, directory="/shared"), tree)
    both = await run(reef.context, job(nodes=2, directory="/shared"), tree)
    assert both.sent * 2 == own.sent and (own.shared, both.shared) == (False, True)
    assert "/shared/.shared" in reef.disks["all"]
    assert "[ -e /shared/.shared ] && export SHOAL_STORE_DIR=$SHOAL_JOB_DIR\n" in both.script


async def test_nothing_is_submitted_when_a_node_cannot_get_the_bundle(reef: Reef, tree: Path) -> None:
    reef.nodes["n2"].unreachable = True
    with pytest.raises(PartialFailure) as caught:
        await run(reef.context, job(), tree)
    assert caught.value.message == (
        "cannot send the code to n2, so nothing was queued: n2: does not answer within 10 s"
    )
    assert reef.submitted == {}


async def test_nothing_is_sent_when_the_job_cannot_run(reef: Reef, tree: Path) -> None:
    for wrong in (job(nodes=3), job(gpus_per_node=9), job("nope.py")):
        with pytest.raises(UsageError):
            await run(reef.context, wrong, tree)
    assert reef.sent() == {"n1": [], "n2": []}


async def test_sbatch_error_is_reported(reef: Reef, tree: Path) -> None:
    reef.sbatch = Result(1, stderr=b"sbatch: error: Invalid qos\n")
    with pytest.raises(SlurmError) as caught:
        await run(reef.context, job(), tree)
    assert str(caught.value) == ("sbatch rejected the job: Invalid qos\n  fix: `shoal run --dry-run` shows the script")


@cases(
    "options, told",
    ({"qos": "high"}, "--qos"),
    ({"account": "lab"}, "--account"),
    ({"account": "a", "qos": "b"}, "--account and --qos"),
)
async def test_option_that_needs_accounting_is_rejected_with_the_fix(
    reef: Reef, tree: Path, options: dict[str, str], told: str
) -> None:
    for verb in (run, dry_run):
        with pytest.raises(UsageError) as caught:
            await verb(reef.context, job(**options), tree)
        assert caught.value.message == (f"the cluster has no accounting, so Slurm would ignore {told}")
        assert caught.value.hint == "put `accounting: true` into the file and run `shoal up`, or leave it out"
    assert reef.sent() == {"n1": [], "n2": []} and reef.submitted == {}
    context = replace(reef.context, known=load_text(SPEC + "accounting: true\n", "shoal.yaml"))
    script = (await run(context, job(**options), tree)).script
    assert all(f"#SBATCH --{name}={value}\n" in script for name, value in options.items())


async def test_each_submission_has_a_unique_number_kept_by_slurm(reef: Reef, tree: Path) -> None:
    numbers = set()
    for _ in range(3):
        await run(reef.context, job(), tree, environ={})
        numbers.add(reef.submitted["SHOAL_SUBMISSION"])
    assert len(numbers) == 3 and set(reef.submitted) == {"SHOAL_SUBMISSION", "script"}
    assert "SHOAL_RUN_ID=reef-$SHOAL_JOB${SHOAL_SUBMISSION:+-$SHOAL_SUBMISSION}\n" in reef.submitted["script"]


async def test_tracking_password_is_in_no_argument_and_no_script(reef: Reef, tree: Path) -> None:
    secrets = {"MLFLOW_TRACKING_USERNAME": "ann", "MLFLOW_TRACKING_PASSWORD": "hunter2 '$x"}
    submitted = await run(reef.context, job(tracking_uri="http://mlflow:5000"), tree, environ={**secrets, "OTHER": "x"})
    assert {name: reef.submitted[name] for name in secrets} == secrets and "OTHER" not in reef.submitted
    assert "export SHOAL_TRACKING_URI=http://mlflow:5000\n" in submitted.script
    told = [word for host in (reef.controller, *reef.nodes.values()) for argv in host.argvs for word in argv]
    assert not any("hunter2" in text for text in (*told, reef.submitted["script"], repr(submitted)))


async def test_job_without_a_tracker_gets_no_tracking_password(reef: Reef, tree: Path) -> None:
    await run(reef.context, job(), tree, environ={"MLFLOW_TRACKING_PASSWORD": "hunter2"})
    assert set(reef.submitted) == {"SHOAL_SUBMISSION", "script"}


async def test_multi_line_password_is_rejected_and_not_shown(reef: Reef, tree: Path) -> None:
    with pytest.raises(UsageError, match="MLFLOW_TRACKING_TOKEN is not a single line of text") as caught:
        await run(reef.context, job(tracking_uri="http://m"), tree, environ={"MLFLOW_TRACKING_TOKEN": "hunter2\n\nx"})
    assert "hunter2" not in str(caught.value) and reef.controller.calls == []


def test_secrets_reach_sbatch_and_its_job(tmp_path: Path) -> None:
    """The shell line for real, with a program in place of sbatch that prints its input."""
    (tmp_path / "sbatch").write_text('#!/bin/sh\nenv > "$0.env"; cat > "$0.script"; echo "$*"\n')
    (tmp_path / "sbatch").chmod(0o755)
    script = "#!/bin/bash\n\necho 'a\\b'\n"
    stdin = f"MLFLOW_TRACKING_PASSWORD=p'w $x\\\nSHOAL_SUBMISSION=ab\n\n{script}"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", SUBMIT], input=stdin, capture_output=True, text=True, env=env)
    assert (done.stdout, done.stderr) == ("--parsable\n", "") and (tmp_path / "sbatch.script").read_text() == script
    assert "MLFLOW_TRACKING_PASSWORD=p'w $x\\\n" in (tmp_path / "sbatch.env").read_text()


@cases("verb", "run", "dry_run", "jobs", "logs", "follow", "cancel")
async def test_stopped_slurmctld_is_reported_at_once(reef: Reef, tree: Path, verb: str) -> None:
    """Slurm's commands would wait for it; here they would do so for ever."""
    reef.slurmctld = "failed"

    async def never(program: Any) -> int:
        await asyncio.Event().wait()
        return 1

    reef.controller.answers = {**reef.controller.answers, ("scontrol",): never}
    verbs = {
        "run": lambda: run(reef.context, job(), tree),
        "dry_run": lambda: dry_run(reef.context, job(), tree),
        "jobs": lambda: jobs(reef.context),
        "logs": lambda: logs(reef.context, "17"),
        "follow": lambda: follow(reef.context, "17", print),
        "cancel": lambda: cancel(reef.context, ["17"]),
    }
    with pytest.raises(SlurmError) as caught:
        await asyncio.wait_for(verbs[verb](), 60)
    assert caught.value.message == "slurmctld does not run on c1 (failed)"
    assert caught.value.hint == "run `shoal up`; its log: `shoal ssh c1 journalctl -u slurmctld`"
    assert all(call.killed for call in reef.controller.calls if call.argv[:2] == ("scontrol", "-o"))


async def test_controller_without_slurm_is_reported(reef: Reef, tree: Path) -> None:
    reef.slurmctld = "inactive"
    reef.controller.answers = {("systemctl",): b"inactive\n"}
    for verb in (run(reef.context, job(), tree), cancel(reef.context, ["7"]), logs(reef.context, "7")):
        with pytest.raises(SlurmError, match="c1 has no Slurm yet"):
            await verb


MISSING = {
    "torch": "--profile torch needs torch, which is missing in python3 on n2",
    "nsys": "--profile nsys needs nsys, which is missing on n2",
    "line": "--profile line needs kernprof, which is missing in python3 on n2",
}


@cases("profiler", *MISSING)
async def test_missing_profiler_is_reported_before_submission(reef: Reef, tree: Path, profiler: str) -> None:
    for name, answer in (("n1", b""), ("n2", b"missing\n")):
        reef.nodes[name].answers = {**reef.nodes[name].answers, ("env",): answer}
    with pytest.raises(UsageError) as caught:
        await run(reef.context, job(profile=profiler), tree)
    assert caught.value.message == MISSING[profiler]
    assert caught.value.hint.endswith("choose other nodes with --nodelist, or leave out --profile")
    assert reef.submitted == {} and reef.sent() == {"n1": [], "n2": []}
    submitted = await run(reef.context, job(profile=profiler, nodelist="n1"), tree)
    assert submitted.traces == "/var/lib/shoal/jobs/reef/17/profile"
    assert f"export SHOAL_PROFILE={profiler}\n" in submitted.script


async def test_python_profiler_is_rejected_for_other_programs(tree: Path) -> None:
    (tree / "go").write_text("#!/bin/sh\n")
    (tree / "go").chmod(0o755)
    with pytest.raises(UsageError, match="--profile line reads Python, and go is no Python script"):
        await run(Reef().context, job("go", profile="line"), tree)


async def test_profiler_check_uses_the_python_and_variables_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "kernprof.py").write_text("")
    async with LocalHost(Target("n1"), through_sudo=False) as host:
        python = sys.executable
        assert not await is_profiler_missing(
            host, job(profile="line", python=python, export={"PYTHONPATH": str(tmp_path)})
        )
        assert await is_profiler_missing(
            host, job(profile="line", python="/usr/bin/python3", export={"PYTHONPATH": ""})
        )
        assert not await is_profiler_missing(host, job(profile="line", python="/no/such/python"))
        assert await is_profiler_missing(host, job(profile="nsys", export={"PATH": "/usr/bin:/bin"}))


async def test_old_bundles_are_removed_after_submission_only_where_they_pile_up(reef: Reef, tree: Path) -> None:
    reef.old = ["n2"]
    await run(reef.context, job(), tree)
    cleaned = {name: [call for call in host.calls if "clean_code" in call.argv] for name, host in reef.nodes.items()}
    assert cleaned["n1"] == [] and len(cleaned["n2"]) == 1
    assert cleaned["n2"][0].argv[5:] == ("/var/lib/shoal/jobs/reef", "20", "7", "")
    reef.states = ["RUNNING"]
    reef.comment = "shoal:c0de/11b"
    await run(reef.context, job(), tree)
    trees = reef.nodes["n2"].calls[-1]
    assert trees.argv[-1] == "17" and not trees.root, "each user's trees by himself"
    assert set(reef.nodes["n2"].calls[-2].argv[-1].split()) == {"c0de", "11b"}


@pytest.fixture
def failed() -> Reef:
    reef = Reef()
    reef.files = {
        "n1": "rank-0.0.log\t1.0 a\nrank-0.0.log\t3.0 c\n",
        "n2": f"rank-3.0.log\t2.0 ValueError: bad\nrank-3.0.end\t{json.dumps(END)}\n",
    }
    return reef


async def test_logs_are_merged_and_the_failure_explained(failed: Reef) -> None:
    result = await logs(failed.context, "17")
    assert [(line.rank, line.text) for line in result.lines] == [(0, "a"), (3, "ValueError: bad"), (0, "c")]
    assert result.reason is not None
    assert result.reason.text == "rank 3 on n2 failed first, with exit status 1: ValueError: bad"


async def test_logs_of_an_unreachable_node_are_skipped_and_the_others_shown(failed: Reef) -> None:
    failed.nodes["n2"].unreachable = True
    result = await logs(failed.context, "17")
    assert [line.text for line in result.lines] == ["a", "c"] and list(result.failures) == ["n2"]


async def test_logs_of_a_job_unknown_to_slurm_are_shown(failed: Reef) -> None:
    result = await logs(failed.context, "18")
    assert len(result.lines) == 3 and result.record is None
    assert "/var/lib/shoal/jobs/reef/18" in failed.nodes["n1"].calls[0].argv
    failed.files = {}
    with pytest.raises(UsageError, match="there is no job 18"):
        await logs(failed.context, "18")
    with pytest.raises(UsageError, match="there is no job 18"):
        await follow(failed.context, "18", print)


async def test_follow_of_a_job_unknown_to_slurm_reuses_the_connections(failed: Reef) -> None:
    seen: list[LogLine] = []
    result = await follow(failed.context, "18", seen.append)
    assert [line.text for line in seen] == ["a", "ValueError: bad", "c"] and result.record is None
    assert len([call for call in failed.controller.calls if "show" in call.argv]) == 1, "Slurm is asked once"
    assert len(failed.nodes["n1"].calls) == 1


async def test_batch_output_is_read_from_the_paths_of_the_job(reef: Reef) -> None:
    reef.comment = "shoal:ab/cd"
    reef.record = RECORD.replace(" WorkDir", " StdErr=/tmp/17.err StdOut=/tmp/17.log WorkDir")
    reef.files = {"n1": "error@inode-7\t1.0 slurmstepd: error: execve(): /nope/python: No such file or directory\n"}
    for verb in (lambda: logs(reef.context, "17"), lambda: follow(reef.context, "17", lambda line: None)):
        reason = (await verb()).reason
        assert reason is not None and "no rank of the job has started: slurmstepd: error: execve()" in reason.text
        assert reef.nodes["n1"].argvs[-1][6:11] == ("logs", "root", "/jobs/17", "/tmp/17.log", "/tmp/17.err")
    [view] = (await jobs(reef.context)).jobs
    assert view.reason is not None and "/nope/python" in view.reason.text


JOBCOMP = (
    "JobId={id} UserId=root(0) GroupId=root(0) Name=train JobState={state} Partition=main TimeLimit=30 "
    "StartTime={day}T13:00:00 EndTime={day}T14:00:00 NodeList=n[1-2] NodeCnt=2 ProcCnt=4 WorkDir=/shared/jobs "
    "SubmitTime={day}T12:00:00 EligibleTime={day}T12:00:00 {more}DerivedExitCode=0:0 ExitCode=1:0\n"
)


def noted(number: int | str, state: str = "FAILED", day: str = "2026-11-15", more: str = "") -> str:
    return JOBCOMP.format(id=number, state=state, day=day, more=more)


async def test_job_purged_by_slurmctld_is_listed_with_its_reason_for_a_day(failed: Reef) -> None:
    failed.states = ["RUNNING"]
    failed.ended = noted(14, day="2026-11-13") + noted(15) + noted(16, "COMPLETED") + noted(17, "REQUEUED")
    views = (await jobs(failed.context)).jobs
    assert [(view.record.id, view.record.state) for view in views] == [
        *(("15", "FAILED"), ("16", "COMPLETED"), ("17", "RUNNING")),
    ]
    assert views[0].reason is not None and "ValueError: bad" in views[0].reason.text
    assert "/shared/jobs/15" in failed.nodes["n1"].argvs[-1]


async def test_login_host_has_ended_jobs_from_accounting(reef: Reef) -> None:
    reef.ended = "no-file-of-ended-jobs\n"
    row = "{}|COMPLETED|root|main|n1|1|0:0|{}T13:00:00|{}T14:00:00|01:00:00|UNLIMITED|/jobs|train".replace(
        "|", JOB_RECORD
    )
    rows = [row.format(number, day, day) for number, day in ((14, "2026-11-13"), (15, "2026-11-15"))]
    reef.accounted = ("\n".join(rows) + "\n").encode()
    assert [view.record.id for view in (await jobs(reef.context)).jobs] == ["15", "17"]
    assert [view.record.id for view in (await jobs(reef.context, ["14"])).jobs] == ["14"]
    reef.accounted = Result(1, stderr=b"Slurm accounting storage is disabled\n")
    assert [view.record.id for view in (await jobs(reef.context)).jobs] == ["17"]


async def test_newest_jobs_of_a_day_are_listed_and_all_lists_the_rest(reef: Reef) -> None:
    reef.ended = "".join(noted(number, "COMPLETED") for number in range(100, 150))
    newest = await jobs(reef.context)
    assert [view.record.id for view in newest.jobs] == [*map(str, range(130, 150)), "17"] and newest.left_out == 30
    every = await jobs(reef.context, ended=True)
    assert (len(every.jobs), every.left_out) == (51, 0)


async def test_named_jobs_are_listed_alone_whether_slurmctld_knows_them_or_not(reef: Reef) -> None:
    reef.ended = noted(3, "COMPLETED", day="2026-10-01") + noted(4, "COMPLETED")
    result = await jobs(reef.context, ["17", "3"])
    assert [view.record.id for view in result.jobs] == ["17", "3"] and result.left_out == 0
    with pytest.raises(UsageError, match=r"^there is no job 99\n"):
        await jobs(reef.context, ["3", "99"])


@cases("dependency", "afterok:99", "afterany:17:99", "afterok:17,afterany:99+5")
async def test_dependency_on_an_unknown_job_is_rejected_before_anything_is_sent(
    reef: Reef, tree: Path, dependency: str
) -> None:
    with pytest.raises(UsageError, match=f"--dependency {re.escape(dependency)}: there is no job 99\n"):
        await run(reef.context, job_from_options({"script": "train.py", "dependency": dependency}), tree)
    assert not reef.submitted


@cases("dependency", "afterok:17", "afterany:3:17", "singleton", "after:17+5")
async def test_dependency_on_jobs_that_wait_run_or_have_ended_is_accepted(
    reef: Reef, tree: Path, dependency: str
) -> None:
    reef.ended = noted(3, "COMPLETED", day="2026-10-01")
    await run(reef.context, job_from_options({"script": "train.py", "dependency": dependency}), tree)
    assert f"#SBATCH --dependency={dependency}\n" in reef.submitted["script"]


async def test_tasks_of_an_array_are_shown_as_they_end() -> None:
    reef, ended = Reef(), list[str]()
    reef.record = RECORD.replace("JobId=17 ", "JobId=17 ArrayJobId=17 ArrayTaskId=1 ")
    reef.states = ["PENDING", "RUNNING", "COMPLETED"]
    reef.ended = noted("17 ArrayJobId=17 ArrayTaskId=0", "FAILED")  # slurmctld has forgotten it
    await wait_for_tasks(reef.context, "17", lambda task: ended.append(f"{task.id} {task.state}"))
    assert ended == ["17_1 COMPLETED", "17_0 FAILED"]


async def test_job_cancelled_before_its_start_is_listed_once(reef: Reef) -> None:
    reef.record = RECORD.replace(" NodeList", " StartTime=2026-11-15T14:00:00 EndTime=2026-11-15T14:00:00 NodeList")
    reef.states = ["CANCELLED"]
    reef.ended = noted(17, "CANCELLED").replace("StartTime=2026-11-15T13:00:00", "StartTime=Unknown")
    assert len((await jobs(reef.context)).jobs) == 1


async def test_reused_job_id_is_explained_only_by_its_own_logs(failed: Reef) -> None:
    failed.ended = noted(17, day="2026-11-14")
    before, now = (await jobs(failed.context)).jobs
    assert (before.reason, now.record.work_dir) == (None, "/jobs") and now.reason is not None


async def test_logs_of_a_job_purged_by_slurmctld_need_only_the_id(failed: Reef) -> None:
    failed.ended = noted(15)
    for verb in (lambda: logs(failed.context, "15"), lambda: follow(failed.context, "15", lambda line: None)):
        result = await verb()
        assert [line.text for line in result.lines] == ["a", "ValueError: bad", "c"]
        assert result.reason is not None and result.reason.node == "n2"
        assert "/shared/jobs/15" in failed.nodes["n1"].argvs[-1]
    assert (await cancel(failed.context, ["15"])).ended == ("15",)


async def test_array_purged_by_slurmctld_is_reported_with_its_tasks(failed: Reef) -> None:
    failed.ended = "".join(noted(15 + task, more=f"ArrayJobId=15 ArrayTaskId={task} ") for task in range(2))
    with pytest.raises(UsageError) as caught:
        await logs(failed.context, "15")
    assert (caught.value.message, caught.value.hint) == ("job 15 is an array", "name one of it: 15_0, 15_1")
    assert (await logs(failed.context, "15_1")).record is not None


async def test_follow_gets_the_final_state_of_a_job_purged_meanwhile(reef: Reef) -> None:
    reef.states = ["RUNNING"]
    reef.ended = noted(17, "COMPLETED")
    reef.remembered = 2
    result = await follow(reef.context, "17", lambda line: None)
    assert result.record is not None and result.record.state == "COMPLETED"


@cases("number", "", "x", "17;id", "../17", "17_", "1 2")
async def test_invalid_job_id_is_rejected_before_any_connection(reef: Reef, number: str) -> None:
    with pytest.raises(UsageError, match="is not a job"):
        await logs(reef.context, number)
    assert reef.controller.calls == []


async def test_follow_ends_with_the_job(failed: Reef) -> None:
    failed.states = ["RUNNING", "RUNNING", "FAILED"]
    seen: list[LogLine] = []
    result = await follow(failed.context, "17", seen.append)
    assert [line.text for line in seen] == ["a", "ValueError: bad", "c"]
    assert result.record is not None and result.record.state == "FAILED"
    assert result.reason is not None and result.reason.rank == 3


async def test_follow_goes_on_after_a_requeue_on_a_host_that_was_away(
    failed: Reef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_verb, "REOPEN_INTERVAL_S", 0.0)
    failed.states = ["RUNNING"]
    seen: list[LogLine] = []

    def show(line: LogLine) -> None:
        seen.append(line)
        if line.text == "c":  # the node is started again, and the job with it
            failed.files["n1"] += "rank-0.1.log\t4.0 again\n"
            failed.record = failed.record.replace("Restarts=0", "Restarts=1")
            failed.nodes["n1"].lose()
        if {"again", "shoal: job 17 was queued again, restart 1"} <= {line.text for line in seen}:
            failed.states = ["COMPLETED"]

    result = await follow(failed.context, "17", show)
    texts = [line.text for line in seen if "queued again" not in line.text]
    assert texts == ["a", "ValueError: bad", "c", "again"]
    assert result.record is not None and result.record.state == "COMPLETED" and result.failures == {}


async def test_jobs_shows_progress_and_failure_reasons(failed: Reef) -> None:
    [view] = (await jobs(failed.context)).jobs
    assert view.reason is not None and view.reason.node == "n2"
    failed.states = ["RUNNING"]
    [view] = (await jobs(failed.context)).jobs
    assert (view.progress, view.reason) == ({"step": 12, "loss": 0.5}, None)


async def test_cancel_ends_running_jobs_and_reports_ended_jobs(reef: Reef) -> None:
    assert (await cancel(reef.context, ["17"])).ended == ("17",)
    assert not any(call.argv[0] == "scancel" for call in reef.controller.calls)
    reef.states = ["RUNNING"]
    assert (await cancel(reef.context, ["17"])).cancelled == ("17",)
    assert reef.controller.argvs[-1] == ("scancel", "17")
    with pytest.raises(UsageError, match="there is no job 99; nothing was cancelled"):
        await cancel(reef.context, ["17", "99"])


def test_job_can_be_submitted_from_python(failed: Reef, tree: Path) -> None:
    made = shoal.Job("train.py", ["--lr", "0.1"], nodes=2, context=failed.context, tree=tree)
    assert isinstance(made, Job)
    with pytest.raises(UsageError, match="not submitted yet"):
        made.wait()
    assert made.submit().id == "17" and made.wait().state == "FAILED"
    assert [line.text for line in made.logs(rank=0)] == ["a", "c"]
    reason = made.reason()
    assert reason is not None and reason.kind == "script"
    made.cancel()
    with pytest.raises(UsageError, match="this is job 17 already"):
        made.submit()


async def test_job_can_be_submitted_inside_a_running_event_loop(failed: Reef, tree: Path) -> None:
    made = shoal.Job("train.py", nodes=2, context=failed.context, tree=tree)
    assert (made.submit().id, made.wait().state) == ("17", "FAILED")
    made.cancel()


def test_array_from_python_is_submitted_and_cancelled_but_not_awaited(reef: Reef, tree: Path) -> None:
    made = shoal.Job("train.py", array="0-3", context=reef.context, tree=tree).submit()
    for method in ("wait", "logs", "reason"):
        with pytest.raises(UsageError) as caught:
            getattr(made, method)()
        assert caught.value.message == f"job 17 is an array, and {method}() is about one job"
        assert caught.value.hint == "`shoal jobs` shows how they are doing, `shoal logs 17_0` what one of them printed"
    made.cancel()


def test_max_size_is_in_mebibytes(tree: Path) -> None:
    (tree / "data").write_bytes(bytes(3 << 20))
    with pytest.raises(UsageError, match="MiB"):
        shoal.Job("train.py", max_size=2, context=Reef().context, tree=tree).script()
    assert shoal.Job("train.py", max_size=4, context=Reef().context, tree=tree).script()
