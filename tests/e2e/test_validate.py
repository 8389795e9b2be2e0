"""`shoal validate` by an ordinary user, over WireGuard: every row with the real tools, and real faults that it finds.

The tests share one cluster and run in the order of this file.
"""

import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.cluster import ON_DEBIAN_12, Cluster, login_keys, running
from tests.e2e.test_lab import Client, joined_clients
from tests.e2e.torch_env import give_torch

COVERS = "validation verbs/validate remote/validation"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, ON_DEBIAN_12]

SPEC = """\
cluster: j-validate
network: wireguard
controller: {provider: sandbox, memory: 1G}
nodesets:
  fish: {provider: sandbox, count: 3, memory: 1G}
accounting: true
mpi: openmpi
storage:
  /data: {kind: nfs}
users:
  alice: {uid: 2001, keys: ["file:KEYS/alice.pub"]}
"""
TWO = ("--quick", "-w", "fish[1-2]")
OTHER_MPI = "#!/bin/sh\nprintf 'HYDRA build details:\\n    Version: 4.1\\n'\n"
SLOW_LINK = "tc qdisc add dev shoal0 root tbf rate 20mbit burst 64kb latency 50ms"
Lab = tuple[Cluster, Client]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    place = tmp_path_factory.mktemp("validate")
    with login_keys("alice") as keys, running(place, SPEC.replace("KEYS", str(keys))) as made:
        yield made, joined_clients(made, keys, "alice")[0]


def rows(result: Any) -> dict[tuple[str, str], Any]:
    return {(row["launcher"], row["test"]): row for row in result["rows"]}


def test_rows_without_torch_are_not_run(lab: Lab) -> None:
    _, alice = lab
    result = alice.json("validate", *TWO, "--launcher", "srun,torchrun", status=None)
    table = rows(result)
    for launcher, test in (("srun", "all-reduce"), ("torchrun", "cpu"), ("torchrun", "all-reduce")):
        row = table[launcher, test]
        assert (row["status"], row["package"]) == ("not run", "torch"), row
    assert table["srun", "cpu"]["status"] == "passed" and not result["complete"]


def test_user_validates_two_nodes_with_every_launcher(lab: Lab) -> None:
    cluster, alice = lab
    export = f"PYTHONPATH={give_torch(cluster.name)}"
    result = alice.json("validate", *TWO, "--export", export, status=None)
    table = rows(result)
    assert {key: row["status"] for key, row in table.items() if row["status"] != "passed"} == {}, result
    assert set(table) == {
        *(("srun", test) for test in ("cpu", "mpirun", "all-reduce gloo", "links", "hpl", "stream")),
        *(("srun", test) for test in ("fio /data", "fio /shared", "fio scratch")),
        *(("torchrun", test) for test in ("cpu", "all-reduce gloo")),
        *(("srun --mpi=pmix", test) for test in ("cpu", "mpi all-reduce", "mpi ping-pong")),
        *(("mpirun", test) for test in ("cpu", "all-reduce gloo", "mpi all-reduce", "mpi ping-pong")),
    }
    assert all(size["wrong"] == 0 and size["busbw"] > 0 for row in result["rows"] for size in row["sizes"])
    assert {program["path"] for program in result["mpiruns"]} == {"/usr/bin/mpirun"}
    assert all("Open MPI" in program["version"] and program["pmix"] for program in result["mpiruns"])
    variables = {entry["launcher"]: entry["variables"] for entry in result["environments"]}
    assert all(entry["GLOO_SOCKET_IFNAME"] == "shoal0" for entry in variables.values())
    assert {*table["srun", "hpl"]["by_node"]} == {"fish1", "fish2"}
    # The machine is shared: how fast it is now says nothing about the next run.
    assert all("slow" in finding["what"] for finding in result["findings"]), result["findings"]
    assert "PD" not in cluster.on("controller", "squeue", "-h", "-o", "%t")


def test_results_are_kept_for_the_user_alone(lab: Lab) -> None:
    cluster, alice = lab
    runs = alice.json("validate", "--since", "1d")["runs"]
    assert len(runs) == 2 and runs[-1]["nodes"] == ["fish1", "fish2"]
    path = "/home/alice/.local/state/shoal/validate/j-validate.jsonl"
    assert cluster.on("controller", "sh", "-c", f"stat -c %a:%U {path}").split() == ["600:alice"]
    assert "fish[1-2]" in alice.shoal("validate", "--since", "1d").stdout


def test_faults_of_a_node_fail_its_rows(lab: Lab) -> None:
    cluster, alice = lab
    cluster.on("fish2", "sh", "-c", "cp /usr/bin/hpcc /root && rm /usr/bin/hpcc")
    other_mpi = "/usr/local/bin/mpirun"
    cluster.on("fish2", "sh", "-c", f'printf %s "$0" > {other_mpi} && chmod 755 {other_mpi}', OTHER_MPI)
    cluster.on("fish2", "sh", "-c", "mv /usr/bin/fio /usr/bin/fio.real && ln -s /bin/false /usr/bin/fio")
    result = alice.json("validate", *TWO, status=1)
    table = rows(result)
    assert (table["srun", "hpl"]["status"], table["srun", "hpl"]["package"]) == ("not run", "hpcc")
    assert "fish2" in table["srun", "hpl"]["detail"]
    assert table["srun", "mpirun"]["status"] == "failed" and "not Open MPI" in table["srun", "mpirun"]["detail"]
    assert table["srun", "fio scratch"]["status"] == "failed" and "fish2" in table["srun", "fio scratch"]["detail"]
    assert table["mpirun", "mpi all-reduce"]["status"] == "not run", "the launcher needs Open MPI on every node"
    assert table["srun --mpi=pmix", "mpi all-reduce"]["status"] == "passed", "srun does without mpirun"
    cluster.on(
        "fish2", "sh", "-c", "mv /root/hpcc /usr/bin/; mv /usr/bin/fio.real /usr/bin/fio; rm /usr/local/bin/mpirun"
    )


def test_slow_node_is_isolated(lab: Lab) -> None:
    cluster, alice = lab
    cluster.on("fish3", "sh", "-c", SLOW_LINK)
    result = alice.json("validate", "--quick", "--launcher", "srun", status=1)
    slow = {finding["host"] for finding in result["findings"] if finding["what"].startswith("slow in every pair")}
    assert slow == {"fish3"}, result["findings"]
    cluster.on("fish3", "tc", "qdisc", "del", "dev", "shoal0", "root")


def test_ctrl_c_leaves_no_job(lab: Lab) -> None:
    cluster, alice = lab
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    begun = alice.begin("validate", "--quick", start_new_session=True, **streams)
    cluster.wait("a job is queued", lambda: "validate" in cluster.on("controller", "squeue", "-h", "-o", "%j"))
    begun.send_signal(signal.SIGINT)
    output = begun.communicate(timeout=120)[0]
    assert begun.returncode == 130 and "its jobs are cancelled" in output, output
    cluster.wait("no job is left", lambda: not cluster.on("controller", "squeue", "-h").strip())
