"""What two users of a lab do at the same time: environments, training, jobs on rented nodes and after a lost node.

`alice` has the id 2001 and `bob` 2002. What a job prints of itself, Slurm's records and the owners of files say as whom
it ran.
"""

import json
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.documents import ROOT
from tests.e2e.cluster import Cluster
from tests.e2e.simulated_clouds import shown
from tests.e2e.torch_env import PYTHONPATH
from tests.small_wheels import small_wheel, uv_wheel

from shoal.jobs.record import USER_JOBS_DIRECTORY
from shoal.local_files import cache_dir
from shoal.sandbox.layout import Layout

IDS = {"alice": 2001, "bob": 2002}
SHARED_JOBS = "/shared/shoal-jobs"
INDEX = "--no-index\n--find-links /shared/index\n"
USES = """\
import os, sys
import herring
import shoal.train
print("uses", herring.VERSION, sys.prefix, os.getuid())
"""
TORCH = ("--export", f"PYTHONPATH={PYTHONPATH}", "--export", "OMP_NUM_THREADS=1")
"""On a machine with fewer cores than ranks, threads that wait for each other would take most of the time."""


def texts(result: dict[str, Any]) -> list[str]:
    """What the ranks of a job printed."""
    return [line["text"] for line in result["lines"] if line["rank"] >= 0]


def try_as(cluster: Cluster, user: str, script: str, host: str = "controller") -> str:
    """What a shell command of a user prints on a host; errors too."""
    words = ("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "sh", "-c", f"exec 2>&1; {script}")
    return cluster.ssh(host, shlex.join(words)).stdout


# ---- environments


def give_wheels(cluster: Cluster) -> None:
    """An index of small packages, where all hosts see it."""
    index = Layout(cache_dir(), cluster.name).shared / "index"
    for version in ("1.0", "2.0"):
        small_wheel(index, "herring", version)
    uv_wheel(index)


def check_environments(cluster: Cluster, alice: Any, bob: Any) -> None:
    """The operator and the first user build at the same time. Both users run, and neither has the other's own."""
    (alice.tree / "mine.txt").write_text(f"{INDEX}herring==2.0\n")
    for user in (alice, bob):
        (user.tree / "uses.py").write_text(USES)
    with ThreadPoolExecutor() as pool:
        of_cluster = pool.submit(cluster.json, "env", "build", "tools")
        [mine] = alice.json("env", "build", "mine", "--requirements", "mine.txt")["made"]
        [tools] = of_cluster.result()["made"]
        own = pool.submit(alice.json, "run", "--wait", "--env", "mine", "uses.py")
        assert texts(bob.json("run", "--wait", "--env", "tools", "uses.py")) == [f"uses 1.0 {tools['path']} 2002"]
        assert texts(own.result()) == [f"uses 2.0 {mine['path']} 2001"]
    assert "there is no environment 'mine'" in bob.shoal("run", "--env", "mine", "uses.py", status=2).stderr
    for path, owner in ((mine["path"], "alice"), (tools["path"], "root")):
        assert cluster.on("controller", "find", path, "!", "-user", owner) == ""
    for script in (f"ls {mine['path']}", f"touch {mine['path']}/x", f"touch {tools['path']}/x"):
        assert "Permission denied" in try_as(cluster, "bob", script)


# ---- rented nodes


def check_rented_nodes(cluster: Cluster, bob: Any, jobs: dict[str, str]) -> None:
    """A job on a machine and one in a container, by node: each ran as its user, and what it wrote is the user's."""
    for node, job in jobs.items():
        assert "rank 0 of 1 is 2002" in bob.shoal("logs", "-f", job).stdout
        record = bob.record(job)
        assert (record["state"], record["nodes"]) == ("COMPLETED", node)
        place = f"{USER_JOBS_DIRECTORY if node.startswith('pods') else SHARED_JOBS}/bob/{job}"
        assert cluster.on("controller", "cat", f"{place}/made-by-0") == "result"
        assert set(cluster.on("controller", "find", place, "-printf", r"%u\n").split()) == {"bob"}


# ---- training and MLflow


def check_training(cluster: Cluster, alice: Any, bob: Any) -> None:
    """Both train the toy at the same time; then the first proves it on two nodes."""
    for user in (alice, bob):
        shutil.copy(ROOT / "examples/toy/train.py", user.tree / "toy.py")
        shutil.copy(ROOT / "examples/toy/curve.py", user.tree)
    with ThreadPoolExecutor() as pool:
        short = pool.submit(bob.json, "run", "--wait", *TORCH, "toy.py", "--epochs", "2")
        done = alice.json("run", "--wait", "-N2", *TORCH, "toy.py")
        assert short.result()["record"]["state"] == "COMPLETED"
    [accuracy] = re.findall(r"accuracy on 360 held-out images: (\S+)%", "\n".join(texts(done)))
    assert float(accuracy) > 97
    options = ("-n", "2", "-N2", "--cluster", cluster.name, "--parallel", "ddp", "--steps", "3", *TORCH)
    report = alice.json("prove", *options, "toy.py")
    assert report["passed"] and report["steps"] == 3, report


RUNS = """\
import base64, json, os, sys, urllib.error, urllib.request
uri, user, password = (os.environ["MLFLOW_TRACKING_" + name] for name in ("URI", "USERNAME", "PASSWORD"))

def ask(path, data=None, user=user):
    word = base64.b64encode((user + ":" + password).encode()).decode()
    head = {"Authorization": "Basic " + word, "Content-Type": "application/json"}
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(uri + "/api/2.0/mlflow/" + path, body, head)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, {}

owner, others = sys.argv[1:]
experiment = ask("experiments/get-by-name?experiment_name=" + owner)[1]["experiment"]["experiment_id"]
runs = ask("runs/search", {"experiment_ids": [experiment]})[1]["runs"]
metrics = {run["info"]["run_id"]: {metric["key"] for metric in run["data"].get("metrics", ())} for run in runs}
[id] = [id for id, names in metrics.items() if "accuracy" in names]  # a proof reports none
changes = {
    "runs/log-metric": {"run_id": id, "key": "loss", "value": 9, "timestamp": 0, "step": 0},
    "runs/set-tag": {"run_id": id, "key": "changed-by", "value": user},
    "runs/delete": {"run_id": id},
}
print(os.getuid(), user, *sorted(metrics[id] & {"loss", "accuracy"}))
print("as", others, ask("experiments/search?max_results=1", user=others)[0])
print("change", *(ask(path, data)[0] for path, data in changes.items()))
"""


def check_runs_in_mlflow(cluster: Cluster, alice: Any, bob: Any) -> None:
    """The toy's run is in the experiment of its user, with its metrics. Others read it, and cannot change it."""
    for user in (alice, bob):
        (user.tree / "runs.py").write_text(RUNS)

    def shown_to(user: Any, other: str) -> list[str]:
        return texts(user.json("run", "--wait", "runs.py", "alice", other))

    assert shown_to(bob, "alice") == ["2002 bob accuracy loss", "as alice 401", "change 403 403 403"]
    assert shown_to(alice, "bob") == ["2001 alice accuracy loss", "as bob 401", "change 200 200 200"]
    for user, other in (("alice", "bob"), ("bob", "alice")):
        assert "Permission denied" in try_as(cluster, user, f"cat /home/{other}/.mlflow/credentials")


# ---- a lost node


SAVE_EVERY, STEPS = 5, 20


def check_job_after_the_loss_of_a_node(cluster: Cluster, alice: Any, bob: Any) -> None:
    """A job on two nodes loses one without warning. It continues from its checkpoint with a rented machine instead."""
    shutil.copy(ROOT / "tests/matrix/train.py", alice.tree / "steps.py")
    cluster.wait("no job is left", lambda: cluster.on("controller", "squeue", "-h") == "")
    arguments = ("--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--pause", "1")
    job = str(alice.json("run", "-N2", "--partition", "cloud", *TORCH, "steps.py", *arguments)["id"])

    def steps(turn: int) -> list[int]:
        said = [json.loads(text) for text in texts(alice.json("logs", "--rank", "0", job)) if '"step"' in text]
        return [line["step"] for line in said if line["turn"] == turn]

    cluster.wait("it has saved", lambda: max(steps(0), default=0) > SAVE_EVERY)
    assert shown(cluster, job)["NodeList"] == "controller,fish1"
    cluster.fault("kill", "fish1")
    beside = bob.run("--partition", "cloud", "--nodelist", "vms1")
    cluster.wait("the job is queued again", lambda: int(shown(cluster, job)["Restarts"]) > 0)
    last = max(steps(0))
    cluster.wait("it starts again", lambda: cluster.starts_soon(job))
    cluster.wait("it ends", lambda: alice.state(job) == "COMPLETED")
    first = min(steps(1))
    assert first % SAVE_EVERY == 0 and 0 < first <= last + 1, "it continues from a checkpoint"
    assert {*steps(0), *steps(1)} == set(range(STEPS))
    assert alice.record(job)["nodes"] == "controller,vms1"
    assert bob.state(beside) == "COMPLETED"


# ---- as whom everything ran


def check_owners(cluster: Cluster, alice: Any, bob: Any) -> None:
    """No job of a user was root's, or another user's. Root ran what the operator submitted, and nothing else."""

    def recorded() -> dict[str, tuple[str, str, str]]:
        rows = cluster.on("controller", "sacct", "-aXnP", "-S", "now-1days", "-o", "JobID,User,UID,JobName")
        return {job: (user, uid, name) for job, user, uid, name in (row.split("|") for row in rows.splitlines())}

    cluster.wait("all jobs are recorded", lambda: {*alice.jobs, *bob.jobs} <= {*map(_number, recorded())})
    by_user: dict[str, set[str]] = {}
    for job, (user, uid, name) in recorded().items():
        by_user.setdefault(user, set()).add(name)
        assert uid == str(IDS.get(user, 0)), f"job {job} of {user}"
    of_checks = {"root", "ctrl-c"}  # check_root_on_the_share_of_a_node, check_jobs_in_the_foreground
    assert by_user.pop("root", set()) <= of_checks
    assert set(by_user) == {"alice", "bob"}
    for user in (alice, bob):
        rows = {_number(job): row[0] for job, row in recorded().items()}
        assert {rows[job] for job in user.jobs} == {user.user}
        for place in (SHARED_JOBS, USER_JOBS_DIRECTORY):
            listing = cluster.on("controller", "find", f"{place}/{user.user}", "-printf", r"%u %m %d\n").splitlines()
            strangers = cluster.on("controller", "find", f"{place}/{user.user}", "-not", "-user", user.user)
            assert listing and not strangers, strangers
            assert listing[0].split()[1] == "700"
            other = "bob" if user.user == "alice" else "alice"
            assert "Permission denied" in try_as(cluster, other, f"ls {place}/{user.user}")


def _number(job: str) -> str:
    """The number of the whole array, of a job that is a part of one."""
    return job.partition("_")[0]
