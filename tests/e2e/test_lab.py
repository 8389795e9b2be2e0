"""Ordinary users in a lab: their own login and nothing else. They train as themselves, and not at others' cost.

The lab has the first guide's layout: a desktop that computes and exports the share, a server, WireGuard, accounting,
MLflow, an environment, a rented machine and a rented container. The clients are unprivileged processes on this machine:
another user id, without groups, and without root's files. The tests share the cluster and run in this order.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.cluster import LIMIT, NOBODY, ON_DEBIAN_12, Cluster, login_keys
from tests.e2e.delivery_checks import (
    check_jobs_without_a_share,
    check_operator_who_is_a_user,
    check_root_on_the_share_of_a_node,
)
from tests.e2e.lab_checks import (
    INDEX,
    check_environments,
    check_job_after_the_loss_of_a_node,
    check_owners,
    check_rented_nodes,
    check_runs_in_mlflow,
    check_training,
    give_wheels,
)
from tests.e2e.shoal_server import CAPTURED, finish, users_program
from tests.e2e.simulated_clouds import Cloud, renting
from tests.e2e.submission_checks import check_files_and_options
from tests.e2e.torch_env import give_torch
from tests.e2e.tracking_checks import give_mlflow
from tests.e2e.user_command_checks import (
    check_commands_inside_jobs,
    check_jobs_in_the_foreground,
    check_operators_commands,
    check_shoal_on_the_hosts,
    check_usage,
    check_validation,
)

COVERS = (
    "verbs/joined_cluster verbs/spec_cache verbs/own_jobs verbs/run_user verbs/cost verbs/ui verbs/usage roles/users "
    "roles/user_program roles/client roles/node_logins remote/user_program.sh cloud/service cli"
)
pytestmark = pytest.mark.sandbox

SPEC = """\
cluster: st-guide
network: wireguard
controller: {provider: sandbox, memory: 4G, compute: true}
providers:
  acme: {kind: sandbox, url: "URL-OF-sandbox", key: "env:SANDBOX_KEY"}
  runpod: {url: "URL-OF-runpod", key: "env:RUNPOD_KEY"}
budget: {per_hour: 5}
nodesets:
  fish: {provider: sandbox, count: 1, memory: 2G}
  vms: {provider: acme, type: cpu, max: 1, cpus: 1, memory: 1G, idle: 30m, weight: 10}
  pods: {provider: runpod, type: NVIDIA A40, region: EU-RO-1, max: 1, cpus: 1, memory: 1G, gpus: 1, idle: 30m}
partitions:
  main: {nodesets: [controller, fish], default: true}
  cloud: {nodesets: [controller, fish, vms]}
  pods: {nodesets: [pods]}
storage:
  /data: {kind: nfs}
environments:
  tools: {requirements: tools.txt}
accounting: true
users:
  alice: {uid: 2001, keys: ["file:KEYS/alice.pub"]}
  bob: {uid: 2002, keys: ["file:KEYS/bob.pub"]}
# A node that is gone is given up sooner than in five minutes.
slurm: {options: {SlurmdTimeout: 30}}
"""
CLOUDS = (Cloud("sandbox", "sk-lab-0123456789abcdef"), Cloud("runpod", "rp-lab-0123456789abcdef"))
ROOT = "/shared/shoal-jobs"

SCRIPT = """\
import os, pathlib, time
import shoal.train
rank = os.environ["RANK"]
print("rank", rank, "of", os.environ["WORLD_SIZE"], "is", os.getuid(), flush=True)
pathlib.Path(os.environ["SHOAL_JOB_DIR"], f"made-by-{rank}").write_text("result")
if os.environ.get("WAIT"):
    time.sleep(3600)
"""


class Client:
    """A person at their own machine, who has a key and a login."""

    def __init__(self, cluster: Cluster, place: Path, user: str, key: Path) -> None:
        self.cluster, self.user, self.key = cluster, user, key
        self.jobs: list[str] = []
        """Those of `run`, in the order of their submission."""
        self.home = place / user
        self.tree = self.home / "work"
        (self.home / ".ssh").mkdir(parents=True)
        self.tree.mkdir()
        (self.tree / "train.py").write_text(SCRIPT)
        at = cluster.instances()["controller"]
        text = f"Host desktop\n    HostName {at.address}\n    Port {at.port or 22}\n    IdentityFile {key}\n"
        (self.home / ".ssh/config").write_text(text)
        for path in (self.home, *self.home.rglob("*")):
            os.chown(path, NOBODY, NOBODY)

    def begin(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Begin a command, with options of subprocess.Popen."""
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "PYTHONPATH": os.pathsep.join(PATHS)}
        return users_program().popen(*words, env=env, cwd=self.tree, **options)

    def shoal(self, *words: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = finish(self.begin(*words, **CAPTURED), LIMIT)
        said = f"{self.user}: shoal {' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert status is None or done.returncode == status, said
        return done

    def json(self, *words: str, status: int | None = 0) -> Any:
        at = 2 if words[0] == "env" else 1
        result = json.loads(self.shoal(*words[:at], "--json", *words[at:], status=status).stdout)
        if words[0] == "run":
            self.jobs.append(str(result["id"]))
        return result

    def run(self, *words: str) -> str:
        return str(self.json("run", *words, "train.py")["id"])

    def record(self, job: str) -> dict[str, Any]:
        [record] = [view["record"] for view in self.json("jobs")["jobs"] if view["record"]["id"] == job]
        return dict(record)

    def state(self, job: str) -> str:
        return str(self.record(job)["state"])


def joined_clients(cluster: Cluster, keys: Path, *users: str) -> list[Client]:
    """Users who have joined the cluster, with homes beside their keys."""
    homes = keys / "homes"
    homes.mkdir(mode=0o755)
    clients = [Client(cluster, homes, user, keys / user) for user in users]
    for client in clients:
        assert client.json("join", f"{client.user}@desktop")["cluster"] == cluster.name
    return clients


PATHS = [path for path in sys.path if path.endswith("src")]


Lab = tuple[Cluster, Client, Client]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    place = tmp_path_factory.mktemp("lab")
    (place / "tools.txt").write_text(f"{INDEX}herring==1.0\n")
    with login_keys("alice", "bob") as keys, renting(place, SPEC.replace("KEYS", str(keys)), *CLOUDS) as (made, _):
        give_wheels(made)
        alice, bob = joined_clients(made, keys, "alice", "bob")
        yield made, alice, bob


@pytest.fixture(scope="module")
def mlflow(lab: Lab) -> bool:
    """Whether the server that the operator adds is MLflow itself."""
    return give_mlflow(lab[0], "controller")


@pytest.fixture(scope="module")
def rented(lab: Lab) -> dict[str, str]:
    """The second user's jobs on nodes that are rented for them while the first works, by node."""
    _, _, bob = lab
    nodes = {"vms1": ("--partition", "cloud", "--nodelist", "vms1"), "pods1": ("--partition", "pods")}
    return {node: bob.run(*options) for node, options in nodes.items()}


def test_user_trains_on_two_nodes_and_sees_the_job(lab: Lab, rented: dict[str, str]) -> None:
    cluster, alice, _ = lab
    assert {node["name"] for node in alice.json("status")["nodes"]} == {"controller", "fish1", "vms1", "pods1"}
    done = alice.json("run", "-N2", "--wait", "train.py")
    assert {line["text"] for line in done["lines"] if line["rank"] >= 0} == {f"rank {n} of 2 is 2001" for n in (0, 1)}
    assert alice.state(done["id"]) == "COMPLETED"
    shown = [line["text"] for line in alice.json("logs", done["id"])["lines"]]
    assert "rank 1 of 2 is 2001" in shown
    owners = cluster.on("controller", "find", f"{ROOT}/alice", "-printf", r"%U\n").split()
    assert set(owners) == {"2001"}
    assert alice.record(done["id"])["work_dir"] == f"{ROOT}/alice"


def test_user_cancels_and_no_process_of_the_job_is_roots(lab: Lab) -> None:
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
    assert f"job {job} belongs to alice" in bob.shoal("logs", job, status=2).stderr
    assert alice.json("cancel", job)["cancelled"] == [job]
    cluster.wait("it has ended", lambda: alice.state(job) == "CANCELLED")


def test_second_user_can_neither_read_nor_change_nor_block_the_first(lab: Lab) -> None:
    cluster, alice, bob = lab
    as_bob = ("setpriv", "--reuid=bob", "--regid=bob", "--init-groups", "sh", "-c")
    for script in (f"ls {ROOT}/alice", f"touch {ROOT}/alice/x", f"mkdir {ROOT}/carol", f"mv {ROOT}/alice {ROOT}/old"):
        for host in ("controller", "fish1"):
            assert "Permission denied" in cluster.ssh(host, f"{' '.join(as_bob)} '{script}'").stderr
    # A directory that bob made first is not used.
    cluster.ssh("controller", f"{' '.join(as_bob)} 'mkdir -m 777 -p /shared/mine/alice'")
    refused = alice.shoal("run", "--directory", "/shared/mine", "train.py", status=2)
    assert "/shared/mine belongs to bob" in refused.stderr and "NOPASSWD" not in refused.stderr
    # Nor does Slurm believe bob that he is alice.
    for command in ("sbatch", "srun", "salloc"):
        words = ("--uid=alice", "--wrap=id") if command == "sbatch" else ("--uid=alice", "id")
        done = cluster.ssh("controller", f"cd /tmp; {' '.join(as_bob)} '{command} {' '.join(words)}'")
        assert done.returncode != 0 and "uid=" not in done.stdout, done
    assert bob.state(bob.run("--wait")) == "COMPLETED"


def test_operator_changes_the_file_while_users_work(lab: Lab, mlflow: bool) -> None:
    cluster, alice, bob = lab
    other = bob.run("--export", "WAIT=1")
    cluster.wait("the job runs", lambda: bob.state(other) == "RUNNING")
    cluster.edit("storage:\n", "tracking: mlflow\nstorage:\n  /more: {kind: nfs}\n")

    def states(array: str) -> dict[str, str]:
        records = [view["record"] for view in alice.json("jobs")["jobs"]]
        return {record["id"]: record["state"] for record in records if record["id"].startswith(f"{array}_")}

    with ThreadPoolExecutor() as pool:
        change = pool.submit(cluster.json, "up")
        array = alice.run("--array", "0-2")
        cluster.wait("the array has ended", lambda: [*states(array).values()] == ["COMPLETED"] * 3)
        assert {line["text"] for line in alice.json("logs", f"{array}_1")["lines"]} == {"rank 0 of 1 is 2001"}
        for command in ("plan", "up", "down"):
            said = alice.shoal(command, status=2).stderr
            assert "needs the operator's file" in said and "sudo" not in said
    assert change.result()["whole"]
    assert "the operator has changed cluster st-guide" in bob.shoal("status").stderr
    assert "has changed" not in bob.shoal("status").stderr
    assert bob.state(other) == "RUNNING" and bob.json("cancel", other)["cancelled"] == [other]
    check_usage(cluster, alice)


def test_users_run_in_the_environment_of_the_cluster_and_in_one_of_their_own(lab: Lab) -> None:
    check_environments(*lab)


def test_jobs_on_a_rented_machine_and_in_a_rented_container_are_their_users(lab: Lab, rented: dict[str, str]) -> None:
    cluster, _, bob = lab
    check_rented_nodes(cluster, bob, rented)


@ON_DEBIAN_12
def test_users_train_at_the_same_time_and_the_first_proves_the_script(lab: Lab) -> None:
    give_torch(lab[0].name)
    check_training(*lab)


@ON_DEBIAN_12
def test_jobs_report_to_mlflow_as_their_user_and_others_cannot_change_their_runs(lab: Lab, mlflow: bool) -> None:
    if not mlflow:
        pytest.skip("no package index has MLflow")
    check_runs_in_mlflow(*lab)


def test_jobs_without_a_share_have_their_code_on_each_node(lab: Lab) -> None:
    check_jobs_without_a_share(*lab)


def test_roots_job_on_the_share_of_a_node_runs_no_code_from_there(lab: Lab, tmp_path: Path) -> None:
    check_root_on_the_share_of_a_node(lab[0], tmp_path)


def test_jobs_of_an_operator_who_is_a_user_are_not_roots(lab: Lab, tmp_path: Path) -> None:
    cluster, alice, _ = lab
    check_operator_who_is_a_user(cluster, alice.key, tmp_path)


def test_users_send_ignored_files_and_sbatch_options_and_fetch_results(lab: Lab) -> None:
    cluster, alice, _ = lab
    check_files_and_options(cluster, alice)


def test_users_commands_work_inside_their_jobs_and_on_the_clusters_hosts(lab: Lab) -> None:
    cluster, alice, bob = lab
    check_commands_inside_jobs(cluster, alice, bob, 2001)
    check_jobs_in_the_foreground(cluster, alice, 2001)
    check_shoal_on_the_hosts(cluster, alice)
    check_operators_commands(alice)
    check_validation(alice, "controller,fish1")


@ON_DEBIAN_12
def test_job_continues_on_a_rented_machine_after_the_loss_of_a_node(lab: Lab) -> None:
    check_job_after_the_loss_of_a_node(*lab)


def test_nothing_that_users_requested_ran_as_root(lab: Lab) -> None:
    """What Slurm recorded of all jobs of this file, and the owners of what they left."""
    check_owners(*lab)
