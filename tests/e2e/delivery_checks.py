"""How the code of users' jobs reaches the nodes without a share, checked on a cluster of two nodes with two users."""

from __future__ import annotations

from typing import Protocol

from tests.e2e.cluster import Cluster

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


class User(Protocol):
    """Somebody who has joined the cluster."""

    def json(self, *words: str, status: int | None = 0) -> dict[str, object]: ...


def check_jobs_without_a_share(cluster: Cluster, alice: User, bob: User) -> None:
    """A job on two nodes, its progress and logs, its requeue, an array; and what another user sees of it."""
    (alice.tree / "far.py").write_text(SCRIPT)  # type: ignore[attr-defined]
    root = f"{USER_JOBS_DIRECTORY}/alice"
    run = ("run", "--directory", root)

    def lines(job: str, user: User = alice) -> list[str]:
        shown = user.json("logs", job, status=None)["lines"]
        assert isinstance(shown, list)
        return sorted(line["text"] for line in shown if line["rank"] >= 0)

    job = str(alice.json(*run, "-N2", "--export", "WAIT=1", "far.py")["id"])
    first = [f"rank {rank} turn 0 is 2001 in {root}" for rank in (0, 1)]
    cluster.wait("both ranks run", lambda: lines(job) == first)
    [view] = [view for view in alice.json("jobs")["jobs"] if view["record"]["id"] == job]  # type: ignore[attr-defined]
    assert view["progress"]["step"] == 7
    assert lines(job, bob) == []
    cluster.on("controller", "scontrol", "requeue", job)
    cluster.on("controller", "scontrol", "update", f"jobid={job}", "StartTime=now")
    done = alice.json("logs", "-f", job)
    second = [f"rank {rank} turn 1 is 2001 in {root}" for rank in (0, 1)]
    assert sorted(line["text"] for line in done["lines"] if line["rank"] >= 0) == sorted(  # type: ignore[attr-defined]
        [*first, *second, "end of 0", "end of 1"]
    )
    for host in ("controller", "fish1"):
        assert cluster.on(host, "stat", "-c", "%U %a", root) == "alice 700\n"
        assert set(cluster.on(host, "find", root, "-printf", r"%u\n").split()) == {"alice"}
    array = str(alice.json(*run, "--array", "0-1", "far.py")["id"])
    for task in (f"{array}_0", f"{array}_1"):
        assert alice.json("logs", "-f", task)["record"]["state"] == "COMPLETED"  # type: ignore[index]
        assert "end of 0" in lines(task)
