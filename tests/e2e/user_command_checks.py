"""Checks of an ordinary user's commands on a running cluster: inside their jobs, and with the `shoal` of its hosts."""

import json
import re
import shlex
import signal
import subprocess
from typing import Any, Protocol

from tests.e2e.cluster import LIMIT, Cluster

from shoal.jobs.record import USER_JOBS_DIRECTORY

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
    assert "[0] 42" in on_host("mkfifo open && shoal run --now answer.py <> open").splitlines()
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
    """`run --now`: the output comes here, the status is the job's, and Ctrl-C cancels it. For a user and for root."""
    (alice.tree / "fail.py").write_text("print('half', end='')\nraise SystemExit(3)\n")
    for place in ((), ("--directory", f"{USER_JOBS_DIRECTORY}/{alice.user}")):  # on the share, and on each node
        done = alice.shoal("run", "--now", "-N2", *place, "train.py")
        assert sorted(done.stdout.splitlines()) == [f"[{rank}] rank {rank} of 2 is {uid}" for rank in (0, 1)]
        job = _number_of(done.stderr)
        alice.jobs.append(job)
        cluster.wait("it is recorded", lambda job=job: alice.state(job) == "COMPLETED")
        assert len(alice.json("logs", job)["lines"]) == 2
    failed = alice.shoal("run", "--now", "fail.py", status=3)
    assert failed.stdout == "[0] half\n" and "ended with status 3" in failed.stderr
    assert "--now cannot have --array" in alice.shoal("run", "--now", "--array", "0-1", "fail.py", status=2).stderr

    with alice.begin("run", "--now", "--export", "WAIT=1", "train.py", stdout=subprocess.PIPE) as watched:
        assert watched.stdout is not None and watched.stdout.readline() == f"[0] rank 0 of 1 is {uid}\n"
        watched.send_signal(signal.SIGINT)
        assert watched.wait(LIMIT) == 130
    rows = cluster.on("controller", "squeue", "-h", "-t", "all", "--sort=-i", "-u", alice.user, "-o", "%T").split()
    assert rows[0] in ("CANCELLED", "COMPLETING"), rows

    line = ("run", "--now", "--job-name", "root", "-N2", "train.py")
    output, messages = cluster.background(*line, stderr=subprocess.PIPE, cwd=alice.tree).communicate(timeout=LIMIT)
    assert sorted(output.splitlines()) == [f"[{rank}] rank {rank} of 2 is 0" for rank in (0, 1)], messages


def _number_of(text: str) -> str:
    match = re.search(r"job (\d+) runs on", text)
    assert match, text
    return match[1]


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
