"""Jobs on a real cluster: a controller and two nodes with two simulated GPUs each. The scripts need no torch."""

import re
from collections.abc import Iterator

import pytest
from tests.e2e.cluster import ON_DEBIAN_12
from tests.e2e.job_scripts import Jobs
from tests.e2e.standing import Standing

from shoal.verbs.context import open_context
from shoal.verbs.job import Job

COVERS = (
    "jobs verbs/run verbs/unsent_files verbs/jobs verbs/logs verbs/fetch verbs/job verbs/submission "
    "verbs/run_user train/launcher_variables.py train/env.py train/gpu_binding.py remote/job_directory.py "
    "remote/job_start.sh remote/job_end.sh remote/task_prolog.sh remote/log_reader.py"
)
GROUP = "reef"
pytestmark = pytest.mark.sandbox
PLACE = "/var/lib/shoal/jobs/st-reef"
LEFT = "/shared/turns /shared/end-of-plain /tmp/gpu-jobs /tmp/all-* /tmp/mine-* /usr/local/bin/nsys"
"""What the scripts leave outside of their jobs' directories."""


@pytest.fixture(scope="module")
def cluster(standing: Standing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    made = standing.view(Jobs)
    made.give_tree(tmp_path_factory.mktemp("jobs"))
    yield made
    for node in ("fish1", "fish2"):
        made.on(node, "sh", "-c", f"rm -rf {LEFT}")


def test_ranks_run_per_gpu_on_two_nodes_and_their_output_is_shown(cluster: Jobs) -> None:
    done = cluster.shoal("run", "--wait", "-N2", "hello.py", "two words", "$HOME")
    lines = done.stdout.splitlines()
    for rank in range(4):
        node, local = f"fish{rank // 2 + 1}", rank % 2
        assert f"[{rank}] hello {rank} {local} 4 0,1 {node} ['two words', '$HOME']" in lines
    byes = [line for line in lines if "] bye " in line]
    assert sorted(line[:3] for line in byes) == ["[0]", "[1]", "[2]", "[3]"]
    assert len({line.split(" ", 2)[2] for line in byes}) == 1, "one address and port for all"
    assert "completed" in done.stderr


def test_output_of_two_nodes_is_shown_in_time_order(cluster: Jobs) -> None:
    """The ranks take turns, the last one first."""
    job = cluster.submit("-N2", "turns.py")
    followed = cluster.shoal("logs", "--follow", job).stdout.splitlines()
    in_turn = [f"turn {turn} of {rank}" for turn in range(2) for rank in (3, 2, 1, 0)]
    assert cluster.lines(job) == in_turn
    for rank in range(4):
        mine = [line for line in followed if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] turn {turn} of {rank}" for turn in range(2)], "each once, as they came"


def test_lines_keep_their_node_on_shared_storage(cluster: Jobs) -> None:
    result = cluster.json("run", "--wait", "-N2", "--directory", "/shared/jobs", "hello.py")
    assert {(line["rank"], line["node"]) for line in result["lines"] if line["rank"] >= 0} == {
        (rank, f"fish{rank // 2 + 1}") for rank in range(4)
    }


def test_bundle_is_sent_once_without_ignored_files(cluster: Jobs) -> None:
    options = ("run", "--wait", "--nodelist", "fish1", "hello.py")
    bundle = f"{PLACE}/code/{cluster.json(*options)['code']}.tar"
    before = cluster.on("fish1", "stat", "-c", "%i", bundle)
    result = cluster.json(*options)
    assert result["record"]["state"] == "COMPLETED"
    assert cluster.on("fish1", "stat", "-c", "%i", bundle) == before
    tree = cluster.on("fish1", "ls", "-A", f"{PLACE}/{result['id']}/tree").split()
    assert "hello.py" in tree and "secret.txt" not in tree


def test_dry_run_prints_the_submitted_batch_script(cluster: Jobs) -> None:
    options = ("-N2", "--time", "10", "--launcher", "spawn", "--export", "NOTE=it's $5", "hello.py", "a b")
    shown = cluster.shoal("run", "--dry-run", *options).stdout
    job = cluster.submit(*options)
    assert cluster.on("controller", "scontrol", "write", "batch_script", job, "-").rstrip() == shown.rstrip()
    cluster.shoal("logs", "--follow", job)


@pytest.mark.parametrize(("launcher", "ranks"), [("spawn", 4), ("python", 1)])
def test_script_runs_under_every_launcher(cluster: Jobs, launcher: str, ranks: int) -> None:
    nodes = ("-N2",) if ranks > 1 else ()
    result = cluster.json("run", "--wait", "--launcher", launcher, *nodes, "hello.py")
    hellos = sorted(line["text"] for line in result["lines"] if line["text"].startswith("hello"))
    assert hellos == [f"hello {r} {r % 2} {ranks} 0,1 fish{r // 2 + 1} []" for r in range(ranks)]


@pytest.mark.parametrize(("launcher", "ranks"), [("srun", 4), ("spawn", 4), ("python", 1)])
def test_training_library_is_importable_and_reads_its_rank(cluster: Jobs, launcher: str, ranks: int) -> None:
    nodes = ("-N2",) if ranks > 1 else ()
    result = cluster.json("run", "--wait", "--launcher", launcher, *nodes, "place.py")
    a_node = min(2, ranks)
    output = {"python": "srun"}.get(launcher, launcher)
    assert sorted(line["text"] for line in result["lines"]) == [
        f"{r} {r % 2} {r // 2} {ranks} {a_node} {output} fish{r // 2 + 1}" for r in range(ranks)
    ]


def test_ranks_come_from_pmix(cluster: Jobs) -> None:
    if "pmix" not in cluster.on("controller", "sh", "-c", "srun --mpi=list 2>&1"):
        pytest.skip("this Slurm has no PMIx plugin")
    result = cluster.json("run", "--wait", "--launcher", "pmix", "-N2", "hello.py", status=None)
    hellos = [line["text"] for line in result["lines"] if line["text"].startswith("hello")]
    assert len(hellos) == 4, result["reason"]


def test_shell_script_runs_as_a_job(cluster: Jobs) -> None:
    result = cluster.json("run", "--wait", "--gpus-per-node", "0", "go.sh")
    assert [line["text"] for line in result["lines"]] == ["from a shell 0"]


def test_jobs_on_a_node_get_different_gpus(cluster: Jobs) -> None:
    options = ("--gpus-per-node", "1", "--nodelist", "fish1", "gpu.py")
    first, second = cluster.submit(*options), cluster.submit(*options)
    for job in (first, second):
        cluster.shoal("logs", "-f", job)
    assert sorted(cluster.lines(first) + cluster.lines(second)) == ["0", "1"]


def test_logs_can_be_limited_to_a_rank(cluster: Jobs) -> None:
    job = cluster.submit("-N2", "hello.py")
    cluster.shoal("logs", "-f", job)
    assert [line.split()[0] for line in cluster.lines(job, "--rank", "3")] == ["hello", "bye"]
    assert len(cluster.lines(job)) == 8


def test_failed_script_is_explained_by_the_first_failed_rank(cluster: Jobs) -> None:
    done = cluster.shoal("run", "--wait", "-N2", "fail.py", status=1)
    assert "rank 2 on fish2 failed first, with exit status 1: ValueError: bad data in shard 7" in done.stderr
    assert "Traceback (most recent call last):" in done.stderr
    assert "ValueError: bad data in shard 7" in cluster.shoal("jobs").stdout


def test_missing_python_on_the_nodes_is_explained(cluster: Jobs) -> None:
    done = cluster.shoal("run", "--wait", "--python", "/nope/python", "hello.py", status=1)
    assert "no rank of the job has started" in done.stderr and "/nope/python" in done.stderr
    for more in (("--output", "/tmp/mine-%j.log"), ("--error", "/tmp/mine-%j.err")):
        done = cluster.shoal("run", "--wait", *more, "--python", "/nope/python", "hello.py", status=1)
        assert "no rank of the job has started" in done.stderr and "/nope/python" in done.stderr


def test_impossible_requests_are_rejected_before_submission(cluster: Jobs) -> None:
    before = cluster.on("controller", "squeue", "-h", "-o", "%i")
    for arguments, output in (
        (("-N3", "hello.py"), "the job asks for 3 nodes; partition main has 2 (fish[1-2])"),
        (("--gpus-per-node", "8", "hello.py"), "no node it may use has more than 2"),
        (("--partition", "mian", "hello.py"), "did you mean `main`?"),
        (("nope.py",), "there is no nope.py"),
        (("secret.txt",), "git ignores secret.txt"),
    ):
        assert output in cluster.shoal("run", *arguments, status=2).stderr
    assert cluster.on("controller", "squeue", "-h", "-o", "%i") == before


def test_cancel_ends_a_running_job(cluster: Jobs) -> None:
    job = cluster.submit("slow.py", "1500")
    cluster.wait("it runs", lambda: cluster.lines(job) == ["started"] * 2)
    assert cluster.shoal("cancel", job).stdout == f"cancelled {job}\n"
    cluster.wait("it has ended", lambda: cluster.state(job) == "")
    assert "cancelled" in cluster.shoal("jobs").stdout
    assert cluster.shoal("cancel", job).stdout == f"already ended: {job}\n"


def test_array_and_dependency_options_reach_sbatch(cluster: Jobs) -> None:
    first = cluster.submit("--array", "0-1%1", "--gpus-per-node", "1", "--job-name", "many", "hello.py")
    second = cluster.submit("--dependency", "singleton", "--job-name", "many", "hello.py")
    third = cluster.submit("--dependency", f"afterok:{second}", "hello.py")
    assert cluster.shoal("logs", "-f", third).stdout.count("hello") == 2
    assert [line.split()[0] for line in cluster.lines(f"{first}_1")] == ["hello", "bye"]
    assert "is an array" in cluster.shoal("logs", first, status=2).stderr
    rejected = cluster.shoal("run", "--dependency", f"afterok:{third}:99999", "hello.py", status=2).stderr
    assert f"--dependency afterok:{third}:99999: there is no job 99999" in rejected
    assert [line.split()[0] for line in cluster.shoal("jobs", second).stdout.splitlines()] == ["job", second]


def test_wait_for_an_array_shows_how_each_task_ended(cluster: Jobs) -> None:
    (cluster.tree / "odd.py").write_text("import os, sys\nsys.exit(int(os.environ['SLURM_ARRAY_TASK_ID']) % 2)\n")
    done = cluster.shoal("run", "--wait", "--array", "0-1", "--gpus-per-node", "0", "odd.py", status=1)
    assert re.search(r"✓ job \d+_0: completed", done.stderr) and re.search(r"✗ job \d+_1: failed", done.stderr)
    assert "failed first, with exit status 1" in " ".join(done.stdout.split())


@ON_DEBIAN_12  # Slurm 24.11 makes the directory
def test_missing_directory_for_the_output_is_explained(cluster: Jobs) -> None:
    output = ("--output", "/tmp/none/%j.log")
    done = cluster.shoal("run", "--wait", *output, "--nodelist", "fish1", "hello.py", status=1)
    assert "fish1 could not open the file for its output, /tmp/none/" in done.stderr


def test_other_sbatch_options_are_accepted(cluster: Jobs) -> None:
    options = ("--nodelist", "fish2", "--exclusive", "--mem", "200M", "--time", "5", "--signal", "USR2@30")
    more = ("--output", "/tmp/all-%j.log", "--error", "/tmp/all-%j.err", "--cpus-per-task", "1", "--no-requeue")
    result = cluster.json("run", "--wait", *options, *more, "hello.py")
    assert result["record"]["nodes"] == "fish2" and result["record"]["time_limit"] == "00:05:00"
    assert sum("hello 0 0 2" in line["text"] for line in result["lines"]) == 1, "the file repeats the rank's log"
    printed = cluster.on("fish2", "cat", f"/tmp/all-{result['id']}.log")
    assert "0: hello 0 0 2" in printed and "1: hello 1 1 2" in printed


def test_tracked_job_gets_its_run_and_keeps_the_password_private(cluster: Jobs) -> None:
    arguments = (
        "--tracking-uri",
        "http://mlflow:5000",
        "--experiment",
        "it's $5",
        "--launcher",
        "python",
        "tracked.py",
    )
    cluster.env["MLFLOW_TRACKING_PASSWORD"] = "hunter2 '$x"
    try:
        result = cluster.json("run", "--wait", *arguments)
    finally:
        del cluster.env["MLFLOW_TRACKING_PASSWORD"]
    [line] = [line["text"] for line in result["lines"] if line["rank"] == 0]
    uri, experiment, code, run, password = line.split("|")
    assert (uri, experiment, code, password) == ("http://mlflow:5000", "it's $5", result["code"], "hunter2 '$x")
    assert run.startswith(f"{cluster.name}-{result['id']}-")
    job_text = cluster.on("controller", "scontrol", "-dd", "show", "job", result["id"])
    script = cluster.on("controller", "scontrol", "write", "batch_script", result["id"], "-")
    assert f"Comment=shoal:{code}/" in job_text and "hunter2" not in job_text + script


def test_jobs_shows_training_progress(cluster: Jobs) -> None:
    job = cluster.submit("--launcher", "python", "trains.py")
    try:
        far = rf"^{job} .*step \d+/1000, loss [0-9.e-]+, [0-9.]+ samples/s, .* left"
        cluster.wait("it says so", lambda: bool(re.search(far, cluster.shoal("jobs").stdout, re.MULTILINE)))
    finally:
        cluster.shoal("cancel", job)


def test_missing_profiler_is_reported_before_submission(cluster: Jobs) -> None:
    for profiler, needs in (
        ("nsys", "nsys, which is missing on"),
        ("line", "kernprof, which is missing in python3 on"),
    ):
        output = cluster.shoal("run", "--profile", profiler, "hello.py", status=2).stderr
        assert f"--profile {profiler} needs {needs} fish[1-2]" in output


def test_profile_report_is_kept_beside_the_logs_and_its_path_shown(cluster: Jobs) -> None:
    """A stand-in for nsys on both nodes: what counts here is where things lie."""
    fake = '#!/bin/sh\nshift 5; out=${1#--output=}; echo trace > "${out%\\%q*}$RANK.0.nsys-rep"; shift; exec "$@"\n'
    for node in ("fish1", "fish2"):
        cluster.on(node, "sh", "-c", 'printf %s "$0" > /usr/local/bin/nsys; chmod 755 /usr/local/bin/nsys', fake)
    result = cluster.json("run", "--wait", "-N2", "--profile", "nsys", "hello.py")
    assert result["traces"] == f"{PLACE}/{result['id']}/profile"
    for rank, node in enumerate(("fish1", "fish1", "fish2", "fish2")):
        trace = f"{result['traces']}/rank-{rank}.0.nsys-rep"
        assert f"shoal: --profile nsys: {node}:{trace}" in [line["text"] for line in result["lines"]]
        assert cluster.on(node, "cat", trace) == "trace\n"
    assert f"profile in {result['traces']}" in cluster.shoal("jobs").stdout


def test_directory_of_an_earlier_job_with_the_same_id_is_moved_aside(cluster: Jobs) -> None:
    """As on a host that was lent to a cluster which was built again, and counts from 1 again."""
    job = cluster.submit("-N2", "--sbatch=--hold", "hello.py")
    old = f"mkdir -p {PLACE}/{job}/tree && echo 'print(\"old code\")' > {PLACE}/{job}/tree/hello.py"
    for node in ("fish1", "fish2"):
        cluster.on(node, "sh", "-c", old)
    cluster.on("controller", "scontrol", "release", job)
    cluster.shoal("logs", "--follow", job)
    said = cluster.lines(job)
    assert sum(line.startswith("hello") for line in said) == 4 and "old code" not in said
    for node in ("fish1", "fish2"):
        assert "old code" in cluster.on(node, "sh", "-c", f"cat {PLACE}/{job}.before-*/tree/hello.py")


def test_next_job_removes_old_unused_bundles(cluster: Jobs) -> None:
    code = f"{PLACE}/code"
    crowd = f"for n in $(seq 30); do touch -d '30 days ago' {code}/0$n.tar; done"
    for node in ("fish1", "fish2"):
        cluster.on(node, "sh", "-c", crowd)
    cluster.json("run", "--wait", "hello.py")
    for node in ("fish1", "fish2"):
        left = cluster.on(node, "ls", code).split()
        assert 20 <= len(left) < 30 and cluster.json("run", "--dry-run", "hello.py")["code"] + ".tar" in left
        cluster.on(node, "sh", "-c", f"rm -f {code}/0*.tar")


def test_job_can_be_submitted_from_python(cluster: Jobs) -> None:
    job = Job("hello.py", nodes=2, context=open_context(cluster.file), tree=cluster.tree).submit()
    assert job.wait().state == "COMPLETED"
    assert [line.text.split()[0] for line in job.logs(rank=1)] == ["hello", "bye"]
    assert job.reason() is None


def test_failed_node_is_named_as_the_reason(cluster: Jobs) -> None:
    job = cluster.submit("--nodelist", "fish2", "--no-requeue", "slow.py", "1500")
    cluster.wait("it runs", lambda: cluster.lines(job) == ["started"] * 2)
    cluster.on("controller", "scontrol", "update", "nodename=fish2", "state=down", "reason=test")
    try:
        cluster.wait("it has ended", lambda: cluster.state(job) == "")
        reason = cluster.json("logs", job)["reason"]
        assert (reason["kind"], reason["text"]) == ("node failure", "a node of the job failed: fish2")
    finally:  # its slurmd may have registered again by itself
        cluster.on("controller", "scontrol", "update", "nodename=fish2", "state=resume", status=None)
    cluster.wait("fish2 is back", lambda: cluster.states()["fish2"] == {"IDLE"})


def test_stopped_slurmctld_is_reported_at_once(cluster: Jobs) -> None:
    cluster.on("controller", "systemctl", "stop", "slurmctld")
    try:
        for arguments in (("run", "hello.py"), ("jobs",), ("logs", "1"), ("cancel", "1")):
            output = cluster.shoal(*arguments, status=1).stderr
            # Slurm's own commands would wait for half a minute, and say something else.
            assert "slurmctld does not run on controller (inactive)" in output and "fix: run `shoal up`" in output
    finally:
        cluster.on("controller", "systemctl", "start", "slurmctld")
    cluster.wait("it is back", lambda: cluster.states() == {"fish1": {"IDLE"}, "fish2": {"IDLE"}})


def test_warned_job_saves_and_is_requeued_or_is_left_alone_until_its_end(cluster: Jobs) -> None:
    """The warning of a node that is released; --signal sends it to the batch script as well."""
    options = ("--launcher", "python", "--gpus-per-node", "0")
    saves, plain = cluster.submit(*options, "as_lightning.py"), cluster.submit(*options, "plain.py")
    cluster.wait("one runs", lambda: cluster.lines(saves) == ["turn 0 from 0"])
    cluster.wait("the other runs", lambda: cluster.lines(plain) == ["started"])
    for job in (saves, plain):
        cluster.on("controller", "scancel", "--batch", "--signal=USR1", job)
    cluster.wait("one is queued again", lambda: cluster.state(saves) == "PENDING")
    assert cluster.state(plain) == "RUNNING"
    cluster.on("fish1", "touch", "/shared/end-of-plain")
    cluster.wait("the other has ended", lambda: cluster.state(plain) == "")
    assert cluster.lines(plain) == ["started", "at its end"]
    cluster.wait("one has had its second turn", lambda: cluster.has_ended(saves))
    assert cluster.lines(saves) == ["turn 0 from 0", "turn 1 from 7"]


@pytest.mark.matrix
def test_job_ends_when_ranks_died_with_their_slurmstepd(cluster: Jobs) -> None:
    """With it killed first, nobody tells srun of the rank. Slurm alone lets the job run until its time limit."""
    small = ("--gpus-per-node", "0", "--cpus-per-task", "1")
    job = cluster.submit("-N2", *small, "--no-requeue", "plain.py", "--forever")
    cluster.wait("both ranks run", lambda: cluster.lines(job) == ["started"] * 2)
    kill = f"pkill -9 -f 'slurmstepd: .{job}[.]0'; pkill -9 -f '[p]lain.py --forever'"
    cluster.on("fish2", "sh", "-c", kill)
    cluster.wait("it has ended", lambda: cluster.state(job) == "")
    reason = cluster.json("logs", job)["reason"]
    assert (reason["kind"], reason["node"]) == ("node failure", "fish2"), reason
    assert reason["text"].startswith("ranks of the job are gone: rank 1 on fish2: killed with its slurmstepd")


def test_job_is_warned_before_its_time_limit_and_the_limit_is_the_reason(cluster: Jobs) -> None:
    """Another job meanwhile asks for a second turn, and gets it."""
    again = cluster.submit("--nodelist", "fish1", "again.py")
    job = cluster.submit("--nodelist", "fish2", "--time", "9", "--signal", "USR1@10", "--no-requeue", "slow.py", "1500")
    # Slurm warns up to a minute too early: at once in a job of one minute, so the script listens before it is one.
    cluster.wait("the script listens", lambda: cluster.lines(job) == ["started"] * 2)
    cluster.on("controller", "scontrol", "update", f"JobId={job}", "TimeLimit=1")
    cluster.wait("it has ended", lambda: cluster.state(job) == "")
    result = cluster.json("logs", job)
    assert [line["text"] for line in result["lines"] if line["rank"] == 0][:2] == ["started", "warned"]
    assert result["reason"]["text"] == (
        "the job reached its time limit of 00:01:00; it was warned before, and did not ask to be queued again"
    )
    cluster.wait("the other one has had its second turn", lambda: cluster.has_ended(again))
    assert cluster.lines(again, "--rank", "0") == ["turn 0 False", "turn 1 True"]
