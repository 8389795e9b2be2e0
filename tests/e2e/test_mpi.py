"""A user's MPI programs on two nodes, over WireGuard and beside a bridge like Docker's: under srun with PMIx, and under
the real mpirun of the distribution.

The tests share one cluster and run in the order of this file.
"""

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import Cluster, login_keys, running
from tests.e2e.test_lab import Client, joined_clients
from tests.e2e.test_wireguard import DDP
from tests.e2e.torch_env import give_torch

COVERS = "jobs/mpi_failure jobs/launchers roles/plugins"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]

SPEC = """\
cluster: j-mpi
network: wireguard
controller: {provider: sandbox, memory: 1G}
nodesets:
  fish: {provider: sandbox, count: 2, memory: 1G}
accounting: true
users:
  alice: {uid: 2001, keys: ["file:KEYS/alice.pub"]}
"""
NODES = ("fish1", "fish2")
BYTES = 20 << 20
# Every rank sends to the next; the last one of a node sends to another node. One-sided messages may take another way.
RING = f"""\
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {{
    int rank, size, sum, put = -1;
    char *out = calloc({BYTES}, 1), *in = calloc({BYTES}, 1), name[MPI_MAX_PROCESSOR_NAME];
    MPI_Win window;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Get_processor_name(name, &sum);
    MPI_Sendrecv(out, {BYTES}, MPI_CHAR, (rank + 1) % size, 0, in, {BYTES}, MPI_CHAR, (rank + size - 1) % size, 0,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Win_create(&put, sizeof put, sizeof put, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
    MPI_Win_fence(0, window);
    MPI_Put(&rank, 1, MPI_INT, (rank + 1) % size, 0, 1, MPI_INT, window);
    MPI_Win_fence(0, window);
    MPI_Win_free(&window);
    printf("rank %d of %d on %s, sum %d, from %d\\n", rank, size, name, sum, put);
    MPI_Finalize();
    return 0;
}}
"""
# As Docker makes it, with the link of a container: the same address on every host.
BRIDGE = """\
ip link add docker0 type bridge && ip address add 172.17.0.1/16 dev docker0 && ip link set docker0 up
ip link add veth1 type veth peer name veth2 && ip link set veth1 master docker0 up && ip link set veth2 up
"""
WARNED = """\
import os, signal, time
def end(number, frame):
    print("warned", os.environ["RANK"], flush=True)
    raise SystemExit(0)
signal.signal(signal.SIGUSR1, end)
print("started", os.environ["RANK"], flush=True)
time.sleep(600)
"""
FAIL = """\
import os, time
if os.environ["RANK"] == "3":
    raise ValueError("bad data in shard 7")
time.sleep(600)
"""
PLACE = """\
from shoal.train.env import read_env
env = read_env()
print(env.rank, env.local_rank, env.node_rank, env.world_size, env.local_world_size, env.launcher, env.node)
"""
FOUR = ("-N2", "--ntasks-per-node", "2")
Lab = tuple[Cluster, Client]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    place = tmp_path_factory.mktemp("mpi")
    with login_keys("alice") as keys, running(place, SPEC.replace("KEYS", str(keys))) as made:
        [alice] = joined_clients(made, keys, "alice")
        for name, text in {"warned.py": WARNED, "fail.py": FAIL, "place.py": PLACE, "ddp.py": DDP}.items():
            (alice.tree / name).write_text(text)
        for node in NODES:
            made.on(node, "sh", "-c", BRIDGE)
        yield made, alice


@pytest.fixture(scope="module")
def mpi(lab: Lab) -> Lab:
    """Open MPI on the nodes, and a program that was compiled there."""
    cluster, alice = lab
    cluster.install({"fish1": "openmpi-bin libopenmpi-dev gcc libc6-dev", "fish2": "openmpi-bin"})
    cluster.on("fish1", "sh", "-c", 'printf %s "$0" > /shared/ring.c && mpicc -o /shared/ring /shared/ring.c', RING)
    program = cluster.provider.cache / f"sandbox/{cluster.name}/shared/ring"
    (alice.tree / "ring").write_bytes(program.read_bytes())
    (alice.tree / "ring").chmod(0o755)
    return lab


def sent(cluster: Cluster, interface: str) -> int:
    return int(cluster.on("fish1", "cat", f"/sys/class/net/{interface}/statistics/tx_bytes"))


def lines(alice: Client, job: str) -> list[str]:
    return sorted(line["text"] for line in alice.json("logs", job)["lines"] if line["rank"] >= 0)


def test_missing_mpirun_is_explained(lab: Lab) -> None:
    _, alice = lab
    error = alice.shoal("run", "--wait", *FOUR, "--launcher", "mpirun", "place.py", status=1).stderr
    assert "no mpirun of Open MPI on fish1,fish2" in error and "openmpi-bin" in error


@pytest.mark.parametrize(("launcher", "starts"), [("pmix", "srun "), ("mpirun", "mpirun ")])
def test_compiled_program_runs_on_two_nodes_over_the_vpn_alone(mpi: Lab, launcher: str, starts: str) -> None:
    cluster, alice = mpi
    before = sent(cluster, "shoal0"), sent(cluster, "docker0")
    result = alice.json("run", "--wait", *FOUR, "--launcher", launcher, "ring")
    assert sorted(line["text"] for line in result["lines"] if line["rank"] >= 0) == [
        f"rank {rank} of 4 on fish{rank // 2 + 1}, sum 6, from {(rank - 1) % 4}" for rank in range(4)
    ], result
    assert sent(cluster, "shoal0") - before[0] > BYTES
    assert sent(cluster, "docker0") - before[1] < 1 << 20
    script = cluster.on("controller", "scontrol", "write", "batch_script", result["id"], "-")
    [command] = [line for line in script.splitlines() if line.startswith(("srun --kill", "mpirun "))]
    assert command.startswith(starts)


def test_mpi_that_does_not_start_is_explained(mpi: Lab) -> None:
    _, alice = mpi
    job = str(alice.json("run", "--wait", *FOUR, "--launcher", "srun", "ring", status=1)["id"])
    [finding] = alice.json("doctor", "--job", job, status=1)["findings"]
    assert finding["id"] == "job-failed" and finding["what"].startswith("MPI did not start: the program was started by")
    assert "--launcher pmix" in finding["fix"] and finding["evidence"]


def test_ranks_of_mpirun_have_their_places_and_train(mpi: Lab) -> None:
    cluster, alice = mpi
    result = alice.json("run", "--wait", *FOUR, "--launcher", "mpirun", "place.py")
    assert sorted(line["text"] for line in result["lines"] if line["rank"] >= 0) == [
        f"{rank} {rank % 2} {rank // 2} 4 2 mpirun fish{rank // 2 + 1}" for rank in range(4)
    ], result
    packages = give_torch(cluster.name)
    options = ("-N2", "--launcher", "mpirun", "--export", f"PYTHONPATH={packages}")
    trained = alice.json("run", "--wait", *options, "ddp.py")
    assert {f"{node} has the same weights" for node in NODES} <= {line["text"] for line in trained["lines"]}, trained


def test_warning_reaches_the_ranks_of_mpirun(mpi: Lab) -> None:
    cluster, alice = mpi
    job = str(alice.json("run", *FOUR, "--launcher", "mpirun", "warned.py")["id"])
    started = [f"started {rank}" for rank in range(4)]
    cluster.wait("all ranks have started", lambda: lines(alice, job) == started)
    cluster.on("controller", "runuser", "-u", "alice", "--", "scancel", "--batch", "--signal=USR1", job)
    cluster.wait("the job has ended", lambda: alice.state(job) == "COMPLETED")
    assert lines(alice, job) == [*started, *(f"warned {rank}" for rank in range(4))]


def test_first_failed_rank_of_mpirun_ends_the_job_and_is_named(mpi: Lab) -> None:
    _, alice = mpi
    error = " ".join(alice.shoal("run", "--wait", *FOUR, "--launcher", "mpirun", "fail.py", status=1).stderr.split())
    assert "rank 3 on fish2 failed first, with exit status 1: ValueError: bad data in shard 7" in error
