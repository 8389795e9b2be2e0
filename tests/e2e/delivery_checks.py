"""How code reaches the nodes and where it runs from, checked on a cluster of two nodes with two users."""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.cluster import LIMIT, Cluster
from tests.e2e.shoal_server import ROOTS_PROGRAM
from tests.e2e.simulated_clouds import shown

from shoal.jobs.record import USER_JOBS_DIRECTORY

SCRIPT = """\
import json, os, pathlib, time
import shoal.train
rank, turn = os.environ["RANK"], os.environ.get("SLURM_RESTART_COUNT", "0")
place = pathlib.Path(os.environ["SHOAL_JOB_DIR"])
print("rank", rank, "turn", turn, "is", os.getuid(), "in", place.parent, flush=True)
if rank == "0":
    (place / "progress.json").write_text(json.dumps({"step": 7, "updated": time.time()}) + "\\n")
if os.environ.get("WAIT") and turn == "0":
    time.sleep(3600)
print("end of", rank, flush=True)
"""


def check_jobs_without_a_share(cluster: Cluster, alice: Any, bob: Any) -> None:
    """A job on two nodes, its progress and logs, its requeue, an array; and what another user sees of it."""
    (alice.tree / "far.py").write_text(SCRIPT)
    root = f"{USER_JOBS_DIRECTORY}/alice"
    run = ("run", "--directory", root)

    def lines(job: str) -> list[str]:
        return sorted(line["text"] for line in alice.json("logs", job, status=None)["lines"] if line["rank"] >= 0)

    job = str(alice.json(*run, "-N2", "--export", "WAIT=1", "far.py")["id"])
    first = [f"rank {rank} turn 0 is 2001 in {root}" for rank in (0, 1)]
    cluster.wait("both ranks run", lambda: lines(job) == first)
    [view] = [view for view in alice.json("jobs")["jobs"] if view["record"]["id"] == job]
    assert view["progress"]["step"] == 7
    assert f"job {job} belongs to alice" in bob.shoal("logs", job, status=2).stderr
    cluster.on("controller", "scontrol", "requeue", job)
    second = [f"rank {rank} turn 1 is 2001 in {root}" for rank in (0, 1)]
    cluster.wait("it has left its nodes", lambda: int(shown(cluster, job)["Restarts"]) > 0)
    cluster.wait("it starts again", lambda: cluster.starts_soon(job))
    # Followed between its turns, a job may be taken for ended: `logs -f` then ends too early.
    cluster.wait("both ranks run again", lambda: {*second} <= {*lines(job)})
    printed = alice.shoal("logs", "-f", job).stdout.splitlines()
    said = sorted([*first, *second, "end of 0", "end of 1"])
    assert sorted(line.partition("] ")[2] for line in printed if line.startswith(("[0", "[1"))) == said, printed
    assert lines(job) == said and alice.state(job) == "COMPLETED"
    for host in ("controller", "fish1"):
        assert cluster.on(host, "stat", "-c", "%U %a", root) == "alice 700\n"
        assert set(cluster.on(host, "find", root, "-printf", r"%u\n").split()) == {"alice"}
    array = str(alice.json(*run, "--array", "0-1", "far.py")["id"])
    for task in (f"{array}_0", f"{array}_1"):
        assert "end of 0" in alice.shoal("logs", "-f", task).stdout


ROOT_SCRIPT = """\
import os, pathlib, time
rank, place = os.environ["RANK"], pathlib.Path(os.environ["SHOAL_JOB_DIR"])
print("rank", rank, "is", os.getuid(), "in", place.parent, "with", os.environ["PYTHONPATH"], flush=True)
checkpoint = place / "checkpoints/step-1"
checkpoint.mkdir(parents=True, exist_ok=True)
(checkpoint / rank).write_text(rank)
while len(os.listdir(checkpoint)) < 2:
    time.sleep(0.1)
"""
EVIL = "import pathlib; pathlib.Path('/var/owned').touch()"


def check_root_on_the_share_of_a_node(cluster: Cluster, tree: Path) -> None:
    """Root's job on a share that one of its nodes exports: both nodes write there, and no code comes from there."""
    (tree / "root.py").write_text(ROOT_SCRIPT)
    run = ("run", "--json", "--wait", "-N2", "--directory", "/data/jobs", "root.py")
    for turn in range(2):
        begun = cluster.background(run[0], *run[1:], cwd=tree, stderr=subprocess.PIPE)
        out, errors = begun.communicate(timeout=LIMIT)
        assert begun.returncode == 0, f"{out}\n{errors}"
        shown = {line["text"] for line in json.loads(out)["lines"] if line["rank"] >= 0}
        assert all(f"rank {rank} is 0 in /data/jobs with /var/lib/shoal/" in str(shown) for rank in (0, 1))
        if turn == 0:  # a user puts other code wherever there could be some
            plant = (
                f"cd /data/jobs; echo {shlex.quote(EVIL)} > /tmp/evil.py; mkdir -p code lib;"
                " for place in code/* lib/*/programs */tree lib; do cp /tmp/evil.py $place/start.py; done;"
                " for file in $(find . -name '*.py'); do cp /tmp/evil.py $file; done; ls -R"
            )
            as_bob = f"setpriv --reuid=bob --regid=bob --init-groups sh -c {shlex.quote(plant)}"
            cluster.ssh("fish1", as_bob)
    for host in ("controller", "fish1"):
        assert cluster.on(host, "sh", "-c", "ls /var/owned 2> /dev/null || true") == ""
        root = f"{USER_JOBS_DIRECTORY}/root"
        assert cluster.on(host, "stat", "-c", "%U %a", root) == "root 700\n"


OPERATOR_SPEC = """\
cluster: {name}
controller: {{host: {{name: controller, address: {controller}}}, user: alice, identity: {key}, compute: true}}
nodesets:
  fish: {{hosts: [{{name: fish1, address: {fish1}}}], user: alice, identity: {key}}}
"""


def check_operator_who_is_a_user(cluster: Cluster, key: Path, tree: Path) -> None:
    """With the operator's file and sudo, jobs are those of the user who logs in, and not root's."""
    addresses = {name: target.address for name, target in cluster.instances().items()}
    file = tree / "operator.yaml"
    file.write_text(OPERATOR_SPEC.format(name=cluster.name, key=key, **addresses))
    (tree / "who.py").write_text("import os\nprint(os.getuid(), os.environ['SHOAL_JOB_DIR'])\n")
    sudoers = "/etc/sudoers.d/alice"
    try:
        for host in addresses:
            cluster.on(host, "sh", "-c", f"echo 'alice ALL=(ALL) NOPASSWD: ALL' > {sudoers}")
        line = ("run", "-f", str(file), "--json", "--wait", "who.py")
        done = ROOTS_PROGRAM.run(*line, cwd=tree, env=cluster.env, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        shown = [line["text"] for line in result["lines"] if line["rank"] >= 0]
        assert shown == [f"2001 /shared/shoal-jobs/alice/{result['id']}"]
    finally:
        for host in addresses:
            cluster.on(host, "rm", "-f", sudoers)
