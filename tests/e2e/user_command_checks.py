"""Checks of an ordinary user's commands on a running cluster: inside their jobs, and with the `shoal` of its hosts."""

import json
import re
import shlex
import signal
import subprocess
from functools import partial
from typing import Any, Protocol

from tests.e2e.cluster import LIMIT, Cluster
from tests.e2e.shoal_server import CAPTURED

PROGRAM = "/usr/local/bin/shoal"
OPERATORS = (
    "check",
    "plan",
    "up",
    "down",
    "restore",
    "reap",
    "try lambda",
    "keys rotate munge",
    "node drain fish1",
    "bench links",
)


class Person(Protocol):
    """A user at their own machine, who has joined the cluster."""

    user: str

    def shoal(self, *words: str, status: int | None = 0) -> subprocess.CompletedProcess[str]: ...

    def json(self, *words: str, status: int | None = 0) -> Any: ...

    def run(self, *words: str) -> str: ...


def check_commands_inside_jobs(cluster: Cluster, alice: Person, bob: Person, uid: int) -> None:
    """`exec` and `ssh` are steps of the user's own job, and of nobody else's."""
    job = alice.run("-N2", "--export", "WAIT=1")
    cluster.wait("the job runs", lambda: len(alice.json("logs", job)["lines"]) == 2)
    shown = alice.json("exec", "--job", job, "--", "sh", "-c", "id -u; echo $SLURM_JOB_ID")
    [group] = shown["groups"]
    assert len(group["hosts"]) == 2 and group["stdout"] == f"{uid}\n{job}\n" and not shown["failures"]
    [failed] = alice.json("exec", "-w", group["hosts"][0], "--", "sh", "-c", "echo no >&2; exit 3", status=3)["groups"]
    assert (failed["hosts"], failed["stderr"]) == ([group["hosts"][0]], "no\n")
    line = alice.json("ssh", "--job", job)["command"]
    assert line[0] == "ssh" and f"srun --jobid={job} " in line[-1] and "--pty" in line[-1]
    assert "is no running job" in bob.shoal("exec", "--job", job, "--", "id", status=2).stderr
    [node] = [name for name in group["hosts"] if name != "controller"]  # there everybody may log in
    assert "you have no running job" in bob.shoal("ssh", node, status=2).stderr
    alice.shoal("cancel", job)


def check_validation(alice: Person, nodes: str) -> None:
    """A quick validation of two nodes: what needs no tool passes, what needs one names it, and the result is kept."""
    result = alice.json("validate", "--quick", "--launcher", "srun", "-w", nodes, status=None)
    rows = {row["test"]: row for row in result["rows"]}
    assert {test: rows[test]["status"] for test in ("cpu", "links")} == {"cpu": "passed", "links": "passed"}, rows
    missing = {row["package"] for row in rows.values() if row["status"] == "not run" and row["package"]}
    assert missing == {"torch", "hpcc", "fio"} and not result["complete"], rows
    assert {name for pair in rows["links"]["pairs"] for name in (pair["first"], pair["second"])} == set(
        nodes.split(",")
    )
    [kept] = alice.json("validate", "--since", "1d")["runs"]
    assert kept["time"] == result["time"]


def check_shoal_on_the_hosts(cluster: Cluster, alice: Person, host: str = "controller") -> None:
    """A user who is logged in needs no join, and cannot change the program."""

    def on_host(command: str, status: int = 0) -> str:
        words = ("runuser", "-l", alice.user, "-c", f"cd && {command}")
        done = cluster.ssh(host, shlex.join(words))
        assert done.returncode == status, done
        return done.stdout + done.stderr

    assert on_host("command -v shoal").strip() == PROGRAM
    state = json.loads(on_host("shoal status --json"))
    assert state["cluster"] == cluster.name and state["nodes"]
    on_host('printf \'print(6 * 7, file=open("answer", "w")); print(6 * 7)\\n\' > answer.py')
    done = json.loads(on_host("shoal run --json --wait --sbatch --nice=7 answer.py"))
    assert "42" in [line["text"] for line in done["lines"]]
    on_host(f"shoal fetch {done['id']}")
    assert on_host(f"cat job-{done['id']}/tree/answer") == "42\n"
    assert "[0] 42" in on_host("mkfifo open && shoal run --wait answer.py <> open").splitlines()
    on_host("printf 'import time\\ntime.sleep(600)\\n' > wait.py")
    job = json.loads(on_host("shoal run --json wait.py"))["id"]
    cluster.wait("the job runs", lambda: on_host(f"squeue -h -t R -o %i -j {job}").strip() == job)
    node = on_host(f"squeue -h -o %N -j {job}").strip()
    assert on_host(f"shoal ssh --job {job} {node} id -un '&&' echo '$SLURM_JOB_ID'").split() == [alice.user, job]
    # A shell needs a terminal, and `script` gives it one.
    shell = on_host(f"echo 'echo in-$((6*7)) $SLURM_JOB_ID; exit' | script -qec 'shoal ssh --job {job}' /dev/null")
    assert f"in-42 {job}" in shell
    on_host(f"shoal cancel {job}")
    owners = cluster.on(host, "find", PROGRAM, "/opt/shoal/users", "-not", "-user", "root", "-o", "-perm", "/022")
    assert not [path for path in owners.split() if cluster.on(host, "stat", "-c", "%F", path) != "symbolic link\n"]
    assert "needs the operator's file" in on_host("shoal up", status=2)
    changes = [change["what"] for change in cluster.json("plan")["changes"]]
    assert not [what for what in changes if "/opt/shoal/users" in what or "Shoal for users" in what], changes


def check_jobs_in_the_foreground(cluster: Cluster, alice: Any, uid: int) -> None:
    """`run --wait`: the output comes here. One Ctrl-C leaves the job running, two cancel it. A user, and root."""
    (alice.tree / "fail.py").write_text("print('half', end='')\nraise SystemExit(3)\n")
    failed = alice.shoal("run", "--wait", "fail.py", status=1)
    assert failed.stdout.startswith("[0] half\n") and "with exit status 3" in failed.stderr
    line = ("run", "--wait", "--job-name", "ctrl-c", "--export", "WAIT=1", "train.py")
    for begin, user_id in ((alice.begin, uid), (partial(cluster.begin, cwd=alice.tree), 0)):
        job = _check_ctrl_c(begin(*line, **CAPTURED), user_id, 1)
        assert cluster.on("controller", "squeue", "-h", "-o", "%T", "-j", job) == "RUNNING\n"
        cluster.on("controller", "scancel", job)
        job = _check_ctrl_c(begin(*line, **CAPTURED), user_id, 2)
        rows = cluster.on("controller", "squeue", "-h", "-t", "all", "-o", "%T", "-j", job).split()
        assert rows[0] in ("CANCELLED", "COMPLETING"), rows


def _check_ctrl_c(watched: subprocess.Popen[str], uid: int, presses: int) -> str:
    """Press Ctrl-C so often once the job prints; the number of the job."""
    with watched:
        assert watched.stdout is not None and watched.stderr is not None
        assert watched.stdout.readline() == f"[0] rank 0 of 1 is {uid}\n"
        watched.send_signal(signal.SIGINT)
        shown = ""
        while "Ctrl-C again now cancels job" not in shown:
            said = watched.stderr.readline()
            assert said, shown
            shown += said
        if presses == 2:
            watched.send_signal(signal.SIGINT)
        _, rest = watched.communicate(timeout=LIMIT)
        assert watched.returncode == 130
    job = re.findall(r"job (\d+)", shown)[0]
    assert "Ctrl-C leaves it running" in shown
    assert f"job {job} {'was cancelled' if presses == 2 else 'goes on'}" in rest
    return job


def check_operators_commands(alice: Person) -> None:
    """What needs root says so in one sentence, and advises no passwordless sudo."""
    for command in OPERATORS:
        message = alice.shoal(*command.split(), status=2).stderr
        assert "needs the operator's file" in message and "sudo" not in message.lower()


def check_usage(cluster: Cluster, alice: Person) -> None:
    """What Slurm's accounting says of the user."""
    cluster.wait("the usage is recorded", lambda: alice.user in _users(alice))


def _users(person: Person) -> set[str]:
    return {row["name"] for row in person.json("usage")["rows"]}
