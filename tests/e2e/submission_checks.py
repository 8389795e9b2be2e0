"""What an ordinary user sends with a job and gets back from it, checked on a cluster of two nodes."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.cluster import IMAGE, LIMIT, Cluster

from shoal.hostlist import expand
from shoal.jobs.record import USER_JOBS_DIRECTORY
from shoal.verbs.node_files import READER_NAME

READ = """\
import os, pathlib
pathlib.Path("out").mkdir(exist_ok=True)
pathlib.Path("out", os.environ["RANK"]).write_text("from rank " + os.environ["RANK"])
if os.environ["RANK"] == "0":
    pathlib.Path("out/latest").symlink_to("0")
    pathlib.Path("out/shadow").symlink_to("/etc/shadow")
print(len(open("data/words.bin", "rb").read()))
"""
BAR = """\
import os, sys, time
for step in range(1000):
    sys.stderr.write(f"\\rstep {step}")
sys.stderr.flush()
while not os.path.exists(os.path.join(os.environ["SHOAL_JOB_DIR"], "go")):
    time.sleep(0.1)
sys.stderr.write("\\rstep 1000\\n")
"""


def make_tree(alice: Any, name: str) -> Path:
    """A repository of the user's whose data git ignores, as nanoGPT has it."""
    tree: Path = alice.home / name
    (tree / "data").mkdir(parents=True)
    (tree / "read.py").write_text(READ)
    (tree / ".gitignore").write_text("*.bin\n/out/\n")
    (tree / "data/words.bin").write_bytes(b"x" * 4096)
    (tree / "mnt").symlink_to("/mnt/data")
    subprocess.run(["git", "-C", str(tree), "init", "-q"], check=True, timeout=LIMIT)
    owner = alice.tree.stat()
    for path in (tree, *tree.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
    return tree


def check_files_and_options(cluster: Cluster, alice: Any) -> None:
    """Files that git ignores, options of sbatch, and results, on the share and on the nodes."""
    work, alice.tree = alice.tree, make_tree(alice, "nano")
    try:
        check_ignored_files(alice)
        check_sbatch_options(cluster, alice)
        check_results(cluster, alice)
        check_limits_and_numbers(cluster, alice)
        check_progress_bars(cluster, alice)
    finally:
        shutil.rmtree(alice.tree)
        alice.tree = work


def check_ignored_files(alice: Any) -> None:
    shown = alice.shoal("run", "--wait", "read.py", status=1).stderr
    assert ".gitignore kept 1 file (4.0 KiB) from being sent: data/words.bin" in shown
    assert "links that leave the tree" in shown and "mnt -> /mnt/data" in shown
    assert ".gitignore kept it from being sent" in shown and "shoal run --include data/words.bin" in shown
    assert ".gitignore kept it from being sent" in alice.shoal("jobs").stdout
    done = alice.shoal("run", "--wait", "--include", "*.bin", "read.py")
    assert "[0] 4096" in done.stdout and "; `shoal fetch " in done.stderr


def check_sbatch_options(cluster: Cluster, alice: Any) -> None:
    words = ("--sbatch", "--mem-per-cpu=50", "--sbatch", "--ntasks=2 --nice=7", "-N2", "--include", "data")
    done = alice.json("run", "--wait", *words, "read.py")
    assert done["world_size"] == 2 and done["record"]["state"] == "COMPLETED"
    record = cluster.on("controller", "scontrol", "show", "job", done["id"])
    assert "Nice=7" in record and "MinMemoryCPU=50M" in record and "NumTasks=2" in record
    unknown = alice.shoal("run", "--sbatch", "--unheard-of=1", "read.py", status=1).stderr
    assert "sbatch rejected the job" in unknown and "--unheard-of=1" in unknown
    absent = alice.shoal("run", "--sbatch", "--cores-per-socket=999", "read.py", status=1).stderr
    assert "sbatch rejected the job" in absent and "node configuration is not available" in absent
    own = alice.shoal("run", "--sbatch", "--time=5", "read.py", status=2).stderr
    assert "`shoal run` has this option itself" in own and "leave out --sbatch: --time=5" in own


def check_limits_and_numbers(cluster: Cluster, alice: Any) -> None:
    """Times, dependencies and arrays as sbatch has them, jobs by their numbers, and one that Slurm rejected."""
    done = alice.json("run", "--wait", "--time", "1:30", "--signal", "USR1@10", "--include", "data", "read.py")
    assert "TimeLimit=00:02:00" in cluster.on("controller", "scontrol", "show", "job", done["id"]), "Slurm rounds"
    [view] = alice.json("jobs", done["id"])["jobs"]
    assert view["record"]["id"] == done["id"]
    absent = alice.shoal("run", "--dependency", "afterok:99999", "read.py", status=2).stderr
    assert "--dependency afterok:99999: there is no job 99999" in absent
    array = alice.json("run", "--wait", "--array", "0-1", "--include", "data", "read.py")
    assert [view["record"]["state"] for view in array["jobs"]] == ["COMPLETED"] * 2
    rejected = alice.shoal("run", "--constraint", "unheard-of", "read.py", status=None)
    assert rejected.returncode != 0, rejected
    submit = ("runuser", "-u", alice.user, "--", "sbatch", "-N99", "-o/dev/null", "--chdir=/tmp", "--wrap", "true")
    cluster.on("controller", *submit, status=None)
    shown = alice.shoal("jobs", "--all").stdout
    assert "SIGHUP" not in shown, shown
    assert IMAGE or " rejected " in shown, "Slurm 22.05 records such jobs"


def check_results(cluster: Cluster, alice: Any) -> None:
    for directory in ((), ("--directory", f"{USER_JOBS_DIRECTORY}/{alice.user}")):
        done = alice.json("run", "--wait", "-N2", *directory, "--include", "data/words.bin", "read.py")
        job, place = done["id"], alice.tree / f"job-{done['id']}"
        got = alice.json("fetch", job)
        assert got["to"] == place.name and [skipped["name"][-6:] for skipped in got["skipped"]] == ["shadow"]
        nodes = expand(done["record"]["nodes"]) if directory else ["", ""]
        files = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
        for rank, node in enumerate(nodes):
            result = place / node / f"tree/out/{rank}"
            assert result.read_text() == f"from rank {rank}" and result.stat().st_uid == alice.home.stat().st_uid
            assert (Path(node) / f"rank-{rank}.0.log").as_posix() in files
        assert not [name for name in files if name.endswith(("read.py", "words.bin", "shadow"))]
        again = alice.json("fetch", job)
        assert again["files"] == 0 and again["unchanged"] == len([name for name in files if "latest" not in name])
        shown = alice.shoal("fetch", job, "out/0", "--to", f"one-{job}")
        assert f"1 file (11 bytes) of job {job} in one-{job}" in shown.stdout
        assert (alice.tree / f"one-{job}/0").read_text() == "from rank 0"
    assert "has no nothing in" in alice.shoal("fetch", job, "nothing", status=2).stderr
    names = ("squeue", "-h", "-o", "%j")
    cluster.wait("no job that sends files is left", lambda: READER_NAME not in cluster.on("controller", *names))


def check_progress_bars(cluster: Cluster, alice: Any) -> None:
    """The state of an unfinished line is shown while the job runs, and the log has its last state alone."""
    (alice.tree / "bar.py").write_text(BAR)
    done = alice.json("run", "-N2", "bar.py")

    def texts() -> list[str]:
        return [line["text"] for line in alice.json("logs", done["id"])["lines"] if line["rank"] >= 0]

    cluster.wait("both bars are shown", lambda: texts() == ["step 999"] * 2)
    [view] = [view for view in alice.json("jobs")["jobs"] if view["record"]["id"] == done["id"]]
    go = f"{view['record']['work_dir']}/{done['id']}/go"
    cluster.on("controller", "runuser", "-u", alice.user, "--", "touch", go)
    shown = alice.shoal("logs", "-f", done["id"]).stdout
    assert sorted(shown.splitlines()) == ["[0] step 1000", "[1] step 1000"]
    log = f"{view['record']['work_dir']}/{done['id']}/rank-0.0.log"
    assert cluster.on("controller", "cat", log).split(" ", 1)[1] == "step 1000\n"
