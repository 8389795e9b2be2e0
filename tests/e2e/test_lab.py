"""Ordinary users in a lab: their own login and nothing else. They train as themselves, and not at others' cost.

The clients are unprivileged processes on this machine: another user id, without groups, and without root's files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.cluster import LIMIT, Cluster, running
from tests.e2e.delivery_checks import (
    check_jobs_without_a_share,
    check_operator_who_is_a_user,
    check_root_on_the_share_of_a_node,
)
from tests.e2e.user_command_checks import (
    check_commands_inside_jobs,
    check_operators_commands,
    check_shoal_on_the_hosts,
    check_usage,
)

pytestmark = pytest.mark.sandbox

SPEC = """\
cluster: st-lab
network: wireguard
controller: {{provider: sandbox, memory: 768M, compute: true}}
nodesets:
  fish: {{provider: sandbox, count: 1, memory: 512M}}
storage:
  /data: {{kind: nfs}}
accounting: true
users:
  alice: {{uid: 2001, keys: ["file:{keys}/alice.pub"]}}
  bob: {{uid: 2002, keys: ["file:{keys}/bob.pub"]}}
"""
ROOT = "/shared/shoal-jobs"
NOBODY = 65534
"""The client's user id on this machine. On the cluster it is alice's or bob's."""

SCRIPT = """\
import os, pathlib, time
import shoal.train
rank = os.environ["RANK"]
print("rank", rank, "of", os.environ["WORLD_SIZE"], "is", os.getuid(), flush=True)
pathlib.Path(os.environ["SHOAL_JOB_DIR"], f"made-by-{rank}").write_text("result")
if os.environ.get("WAIT"):
    time.sleep(3600)
"""

HIDE_ROOT = """\
mount --rbind "$1/.pyenv" "$2/.pyenv" 2> /dev/null; mount --rbind "$2" "$1"; cd "$3" && shift 3 && exec "$@"
"""
"""In a mount namespace of its own: root's home without root's files, for the interpreter may be in it."""


class Client:
    """A person at their own machine, who has a key and a login."""

    def __init__(self, cluster: Cluster, place: Path, user: str, key: Path) -> None:
        self.cluster, self.user, self.key = cluster, user, key
        self.home = place / user
        self.tree = self.home / "work"
        (self.home / ".ssh").mkdir(parents=True)
        self.tree.mkdir()
        (self.tree / "train.py").write_text(SCRIPT)
        address = cluster.instances()["controller"].address
        (self.home / ".ssh/config").write_text(f"Host desktop\n    HostName {address}\n    IdentityFile {key}\n")
        self.masked = place / f"{user}-root"
        (self.masked / ".pyenv").mkdir(parents=True)
        for path in (self.home, *self.home.rglob("*")):
            os.chown(path, NOBODY, NOBODY)

    def shoal(self, *words: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        hidden = ["unshare", "--mount", "sh", "-c", HIDE_ROOT, "sh", "/root", str(self.masked), str(self.tree)]
        identity = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
        environment = ["env", "-i", "PATH=/usr/bin:/bin", f"HOME={self.home}", f"PYTHONPATH={os.pathsep.join(PATHS)}"]
        line = [*hidden, *identity, *environment, sys.executable, "-m", "shoal", *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT)
        said = f"{self.user}: shoal {' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert status is None or done.returncode == status, said
        return done

    def json(self, *words: str, status: int | None = 0) -> Any:
        return json.loads(self.shoal(words[0], "--json", *words[1:], status=status).stdout)

    def run(self, *words: str) -> str:
        return str(self.json("run", *words, "train.py")["id"])

    def state(self, job: str) -> str:
        [record] = [view["record"] for view in self.json("jobs")["jobs"] if view["record"]["id"] == job]
        return str(record["state"])


PATHS = [path for path in sys.path if path.endswith("src")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Client, Client]]:
    # Not below pytest's directory, which root alone may enter.
    with tempfile.TemporaryDirectory(prefix="shoal-lab-") as name:
        place = Path(name)
        place.chmod(0o755)
        for user in ("alice", "bob"):
            key = place / user
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=LIMIT)
            os.chown(key, NOBODY, NOBODY)
        with running(tmp_path_factory.mktemp("lab"), SPEC.format(keys=place)) as made:
            homes = place / "homes"
            homes.mkdir(mode=0o755)
            yield made, Client(made, homes, "alice", place / "alice"), Client(made, homes, "bob", place / "bob")


def test_user_joins_trains_on_two_nodes_and_sees_the_job(lab: tuple[Cluster, Client, Client]) -> None:
    cluster, alice, bob = lab
    for client in (alice, bob):
        assert client.json("join", f"{client.user}@desktop")["cluster"] == "st-lab"
    assert {node["name"] for node in alice.json("status")["nodes"]} == {"controller", "fish1"}
    done = alice.json("run", "-N2", "--wait", "train.py")
    assert {line["text"] for line in done["lines"] if line["rank"] >= 0} == {f"rank {n} of 2 is 2001" for n in (0, 1)}
    assert alice.state(done["id"]) == "COMPLETED"
    shown = [line["text"] for line in alice.json("logs", done["id"])["lines"]]
    assert "rank 1 of 2 is 2001" in shown
    owners = cluster.on("controller", "find", f"{ROOT}/alice", "-printf", r"%U\n").split()
    assert set(owners) == {"2001"}
    assert f"{ROOT}/alice" in alice.json("jobs")["jobs"][0]["record"]["work_dir"]


def test_user_cancels_and_no_process_of_the_job_is_roots(lab: tuple[Cluster, Client, Client]) -> None:
    cluster, alice, bob = lab
    job = alice.run("-N2", "--export", "WAIT=1")
    cluster.wait("the job runs", lambda: len(alice.json("logs", job)["lines"]) == 2)
    for host in ("controller", "fish1"):
        pids = cluster.on(host, "scontrol", "listpids", job).splitlines()[1:]
        numbers = [line.split()[0] for line in pids if line.split()[0] != "-1"]
        assert numbers
        owners = cluster.on(host, "ps", "-o", "user:20=,comm=", "-p", ",".join(numbers))
        assert {line.split()[0] for line in owners.splitlines() if "slurmstepd" not in line} == {"alice"}
    assert "scancel failed" in bob.shoal("cancel", job, status=1).stderr
    assert bob.json("logs", job)["lines"] == []
    assert alice.json("cancel", job)["cancelled"] == [job]
    cluster.wait("it has ended", lambda: alice.state(job) == "CANCELLED")


def test_second_user_can_neither_read_nor_change_nor_block_the_first(lab: tuple[Cluster, Client, Client]) -> None:
    cluster, alice, bob = lab
    as_bob = ("setpriv", "--reuid=bob", "--regid=bob", "--init-groups", "sh", "-c")
    for script in (f"ls {ROOT}/alice", f"touch {ROOT}/alice/x", f"mkdir {ROOT}/carol", f"mv {ROOT}/alice {ROOT}/old"):
        for host in ("controller", "fish1"):
            assert "Permission denied" in cluster.ssh(host, f"{' '.join(as_bob)} '{script}'").stderr
    # A directory that bob made first is not used.
    cluster.ssh("controller", f"{' '.join(as_bob)} 'mkdir -m 777 -p /shared/mine/alice'")
    refused = alice.shoal("run", "--directory", "/shared/mine", "train.py", status=2)
    assert "/shared/mine belongs to bob" in refused.stderr and "NOPASSWD" not in refused.stderr
    assert bob.state(bob.run("--wait")) == "COMPLETED"


def test_array_of_a_user_runs_beside_the_job_of_another(lab: tuple[Cluster, Client, Client]) -> None:
    cluster, alice, bob = lab
    other = bob.run("--export", "WAIT=1")
    array = alice.run("--array", "0-2")

    def states() -> dict[str, str]:
        records = [view["record"] for view in alice.json("jobs")["jobs"]]
        return {record["id"]: record["state"] for record in records if record["id"].startswith(f"{array}_")}

    cluster.wait("the array has ended", lambda: set(states().values()) == {"COMPLETED"} and len(states()) == 3)
    assert {line["text"] for line in alice.json("logs", f"{array}_1")["lines"]} == {"rank 0 of 1 is 2001"}
    assert bob.json("cancel", other)["cancelled"] == [other]
    check_usage(cluster, alice)


def test_commands_that_need_root_say_so_and_changes_of_the_cluster_are_noticed(
    lab: tuple[Cluster, Client, Client],
) -> None:
    cluster, alice, _ = lab
    for command in ("plan", "up", "down"):
        said = alice.shoal(command, status=2).stderr
        assert "needs the operator's file" in said and "sudo" not in said
    cluster.edit("storage:\n", "storage:\n  /more: {kind: nfs}\n")
    cluster.shoal("up")
    assert "the operator has changed cluster st-lab" in alice.shoal("status").stderr
    assert "has changed" not in alice.shoal("status").stderr


def test_jobs_without_a_share_have_their_code_on_each_node(lab: tuple[Cluster, Client, Client]) -> None:
    check_jobs_without_a_share(*lab)


def test_roots_job_on_the_share_of_a_node_runs_no_code_from_there(
    lab: tuple[Cluster, Client, Client], tmp_path: Path
) -> None:
    check_root_on_the_share_of_a_node(lab[0], tmp_path)


def test_jobs_of_an_operator_who_is_a_user_are_not_roots(lab: tuple[Cluster, Client, Client], tmp_path: Path) -> None:
    cluster, alice, _ = lab
    check_operator_who_is_a_user(cluster, alice.key, tmp_path)


def test_users_commands_work_inside_their_jobs_and_on_the_clusters_hosts(lab: tuple[Cluster, Client, Client]) -> None:
    cluster, alice, bob = lab
    check_commands_inside_jobs(cluster, alice, bob, 2001)
    check_shoal_on_the_hosts(cluster, alice)
    check_operators_commands(alice)
