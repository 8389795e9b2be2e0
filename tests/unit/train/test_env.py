"""Environments as launchers really set them, and how the library reads each."""

import logging
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest
from tests.support.cases import cases

from shoal.train.env import read_env
from shoal.train.errors import EnvError
from shoal.train.launcher_variables import LAUNCHERS, place_tasks, tasks_per_node


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


SRUN = variables(
    "SLURM_CLUSTER_NAME=reef SLURM_JOB_ID=71 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 "
    "SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=gpu[01-02] "
    "SLURM_STEP_TASKS_PER_NODE=2(x2) SLURMD_NODENAME=gpu02"
)
"""What the last of four tasks on two nodes has in its environment."""
BATCH = variables(
    "SLURM_JOB_ID=71 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_JOB_NODELIST=gpu[01-02] "
    "SLURM_TASKS_PER_NODE=2(x2) SLURMD_NODENAME=gpu01"
)
"""A batch script's, before any srun."""
TORCHRUN = variables(
    "RANK=3 LOCAL_RANK=1 GROUP_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_WORLD_SIZE=2 MASTER_ADDR=gpu02 "
    "MASTER_PORT=41000 TORCHELASTIC_RUN_ID=71 TORCHELASTIC_RESTART_COUNT=1"
)
IN_ONE_TASK = SRUN | variables(
    "SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)"
)
"""One task a node: where torchrun and spawn belong."""
MPIRUN = variables(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "OMPI_COMM_WORLD_NODE_RANK=1 PMIX_RANK=3 PMIX_NAMESPACE=prterun-1"
)
HAND = variables("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500")

# what it is: environment, (launcher, rank, local_rank, node_rank, world_size, local_world_size, master_address, port)
PLACES: dict[str, tuple[Mapping[str, str], tuple[object, ...]]] = {
    "plain python": ({}, ("python", 0, 0, 0, 1, 1, "127.0.0.1", 0)),
    "a batch script without srun": (BATCH, ("python", 0, 0, 0, 1, 1, "127.0.0.1", 0)),
    "the shell of salloc": (BATCH | {"SLURM_STEP_ID": "4294967290"}, ("python", 0, 0, 0, 1, 1, "127.0.0.1", 0)),
    "srun": (SRUN, ("srun", 3, 1, 1, 4, 2, "gpu01", 0)),
    "srun on one node": (
        SRUN
        | {"SLURM_STEP_NODELIST": "gpu02", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_LOCALID": "3"},
        ("srun", 3, 3, 0, 4, 4, "127.0.0.1", 0),
    ),
    "srun with uneven nodes": (
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"},
        ("srun", 3, 0, 1, 4, 1, "gpu01", 0),
    ),
    "srun with addresses from shoal run": (
        SRUN | {"SHOAL_NODE_ADDRS": "gpu01=100.64.0.1,gpu02=100.64.0.2", "MASTER_ADDR": "10.9.9.9"},
        ("srun", 3, 1, 1, 4, 2, "100.64.0.1", 0),
    ),
    "srun with MASTER_ADDR from hostname --ip-address": (
        SRUN | {"MASTER_ADDR": "127.0.1.1"},
        ("srun", 3, 1, 1, 4, 2, "gpu01", 0),
    ),
    "srun with the fabric's name for the first node": (
        SRUN | {"MASTER_ADDR": "gpu01-ib"},
        ("srun", 3, 1, 1, 4, 2, "gpu01-ib", 0),
    ),
    "Pyxis with enroot's hook": (
        SRUN
        | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu01", "MASTER_PORT": "61071"}
        | {"OMP_NUM_THREADS": "1"},
        ("srun", 3, 1, 1, 4, 2, "gpu01", 61071),
    ),
    "srun --mpi=pmix": (
        SRUN | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.71.0"},
        ("srun", 3, 1, 1, 4, 2, "gpu01", 0),
    ),
    "srun --mpi=pmi2": (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, ("srun", 3, 1, 1, 4, 2, "gpu01", 0)),
    "a container that keeps few of Slurm's variables": (
        {
            name: SRUN[name]
            for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
        }
        | {"SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[01-02]"},
        ("srun", 3, 1, 1, 4, 2, "gpu01", 0),
    ),
    "torchrun": (TORCHRUN, ("torchrun", 3, 1, 1, 4, 2, "gpu02", 41000)),
    "torchrun in srun": (IN_ONE_TASK | TORCHRUN, ("torchrun", 3, 1, 1, 4, 2, "gpu02", 41000)),
    "torchrun --standalone in a batch script of many tasks": (
        BATCH
        | TORCHRUN
        | {"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"},
        ("torchrun", 1, 1, 0, 2, 2, "localhost", 41000),
    ),
    "mpirun, whose daemons sit in tasks of srun": (IN_ONE_TASK | MPIRUN, ("mpirun", 3, 1, 1, 4, 2, "gpu01", 0)),
    "mpirun in a batch script, whose daemons sit on the other nodes alone": (
        IN_ONE_TASK
        | MPIRUN
        | {"SLURM_STEP_NODELIST": "gpu02", "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
        ("mpirun", 3, 1, 1, 4, 2, "gpu01", 0),
    ),
    "srun that an MPI library took for its own mpirun": (
        SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        ("mpirun", 3, 1, 1, 4, 2, "gpu01", 0),
    ),
    "mpirun on its own": (MPIRUN | {"MASTER_ADDR": "10.0.0.1"}, ("mpirun", 3, 1, 1, 4, 2, "10.0.0.1", 0)),
    "mpirun of MPICH on one host": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        ("mpirun", 1, 1, 0, 2, 2, "127.0.0.1", 0),
    ),
    "PMIx alone": (
        {"PMIX_RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        ("pmix", 1, 1, 0, 2, 2, "127.0.0.1", 0),
    ),
    "spawn on two nodes": (
        IN_ONE_TASK
        | {"SHOAL_SPAWN": "0", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4"}
        | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu01"},
        ("spawn", 3, 1, 1, 4, 2, "gpu01", 0),
    ),
    "by hand": (HAND, ("env", 3, 1, 1, 4, 2, "10.0.0.1", 29500)),
    "by hand on one host": ({"RANK": "1", "WORLD_SIZE": "2"}, ("env", 1, 1, 0, 2, 2, "127.0.0.1", 0)),
}


@cases("case", *PLACES)
def test_rank_is_read_from_the_variables_of_its_launcher(case: str) -> None:
    environ, expected = PLACES[case]
    env = read_env(environ)
    assert (env.launcher, env.rank, env.local_rank, env.node_rank) == expected[:4]
    assert (env.world_size, env.local_world_size, env.master_address, env.master_port) == expected[4:]


# what it is: environment, the whole text of the error
CONTRADICTIONS: dict[str, tuple[Mapping[str, str], str]] = {
    "RANK exported in the batch script": (
        SRUN | {"RANK": "0"},
        "srun and the environment contradict each other about rank\n"
        "  found: RANK=0, SLURM_PROCID=3\n"
        "  fix: remove the line that exports RANK: the library reads SLURM_PROCID itself.\n"
        "       In a batch script $SLURM_PROCID is that of the script, not that of each process.",
    ),
    "WORLD_SIZE of another layout": (
        SRUN | {"WORLD_SIZE": "8"},
        "srun and the environment contradict each other about world_size\n"
        "  found: WORLD_SIZE=8, SLURM_STEP_NUM_TASKS=4\n"
        "  fix: remove the line that exports WORLD_SIZE: the library reads SLURM_STEP_NUM_TASKS itself.",
    ),
    "LOCAL_RANK under mpirun": (
        MPIRUN | {"LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1"},
        "mpirun and the environment contradict each other about local_rank\n"
        "  found: LOCAL_RANK=0, OMPI_COMM_WORLD_LOCAL_RANK=1\n"
        "  fix: remove the line that exports LOCAL_RANK: the library reads OMPI_COMM_WORLD_LOCAL_RANK itself.\n"
        "       In a batch script $OMPI_COMM_WORLD_LOCAL_RANK is that of the script, not that of each process.",
    ),
    "a rank past the end": (
        HAND | {"RANK": "4"},
        "rank 4 does not exist: world_size is 4, counted from 0\n"
        "  found: RANK=4, WORLD_SIZE=4 (from env)\n"
        "  fix: set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or none",
    ),
    "a local rank past the end": (
        TORCHRUN | {"LOCAL_RANK": "2"},
        "local_rank 2 does not exist: local_world_size is 2, counted from 0\n"
        "  found: LOCAL_RANK=2, LOCAL_WORLD_SIZE=2 (from torchrun)\n"
        "  fix: let torchrun set its variables: export none of them before or in the script",
    ),
    "more ranks on a node than in the job": (
        HAND | {"LOCAL_WORLD_SIZE": "8"},
        "a node cannot have 8 of 4 ranks\n"
        "  found: LOCAL_WORLD_SIZE=8, WORLD_SIZE=4 (from env)\n"
        "  fix: set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or none",
    ),
    "not a number": (
        SRUN | {"SLURM_LOCALID": "$SLURM_LOCALID"},
        "local_rank under srun must be a whole number\n"
        "  found: SLURM_LOCALID=$SLURM_LOCALID\n"
        "  fix: start the script with srun inside the job, and pass Slurm's variables on unchanged (containers too)",
    ),
    "a rank without a world": (
        {"RANK": "0"},
        "a launcher that sets RANK started this process, but its world_size is not in the environment\n"
        "  found: RANK=0, but no WORLD_SIZE\n"
        "  fix: set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or none",
    ),
    "rank 0 elsewhere, and nothing about this node": (
        {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"},
        "a launcher that sets RANK started this process, but its local_world_size is not in the environment\n"
        "  found: RANK=1, but no LOCAL_WORLD_SIZE\n"
        "  fix: set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or none",
    ),
    "PMIx without a size": (
        {"PMIX_RANK": "1"},
        "pmix started this process, but its world_size is not in the environment\n"
        "  found: PMIX_RANK=1, but no WORLD_SIZE\n"
        "  fix: PMIx has no variable for how many ranks there are: pass WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
    ),
    "tasks that do not add up": (
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2,1"},
        "Slurm's variables contradict each other about the size of this step\n"
        "  found: SLURM_STEP_NUM_TASKS=4, SLURM_STEP_TASKS_PER_NODE=2,1, SLURM_STEP_NODELIST=gpu[01-02]\n"
        "  fix: change no SLURM_* variable between srun and the script; in a container pass all of them, or none",
    ),
    "tasks that are no count": (
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"},
        "cannot read the number of tasks per node\n"
        "  found: SLURM_STEP_TASKS_PER_NODE: 'two' is not a count like 2 or 2(x3)\n"
        "  fix: start the script with srun inside the job, and pass Slurm's variables on unchanged (containers too)",
    ),
    "a broken nodelist": (
        SRUN | {"SLURM_STEP_NODELIST": "gpu[01-02"},
        "cannot read Slurm's list of nodes\n"
        "  found: SLURM_STEP_NODELIST: hostlist 'gpu[01-02': a bracket at character 4 has no partner\n"
        "  fix: start the script with srun inside the job, and pass Slurm's variables on unchanged (containers too)",
    ),
    "torchrun in several tasks of a node": (
        SRUN | TORCHRUN,
        "srun starts torchrun several times on a node, and each starts all ranks of the node\n"
        "  found: tasks per node: 2(x2), LOCAL_WORLD_SIZE=2\n"
        "  fix: srun --ntasks-per-node=1 torchrun --nproc-per-node=2 ...",
    ),
    "torchrun that thinks it is alone": (
        IN_ONE_TASK | TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
        "srun starts torchrun on 2 nodes, but torchrun counts 1\n"
        "  found: SLURM_STEP_NUM_NODES=2, GROUP_WORLD_SIZE=1\n"
        "  fix: torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --rdzv-id=$SLURM_JOB_ID ...",
    ),
    "torchrun's own variables changed": (
        TORCHRUN | {"WORLD_SIZE": "6"},
        "torchrun's variables contradict each other about the world size\n"
        "  found: GROUP_WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, WORLD_SIZE=6\n"
        "  fix: let torchrun set its variables: export none of them before or in the script",
    ),
    "tasks of srun in the environment of an mpirun around sbatch": (
        SRUN | MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        "the variables of both srun and mpirun are set for this process\n"
        "  found: task 3 of srun's 4, rank 0 of mpirun's 4\n"
        "  fix: start it with one of the two; sbatch --export=NONE drops the variables of an mpirun around it",
    ),
    "one task a node, each a world of its own": (
        IN_ONE_TASK | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        "the variables of both srun and mpirun are set for this process\n"
        "  found: task 1 of srun's 2, rank 0 of mpirun's 1\n"
        "  fix: start it with one of the two; sbatch --export=NONE drops the variables of an mpirun around it",
    ),
    "a node that the list does not have": (
        SRUN | {"SLURM_NODEID": "5"},
        "node_rank 5 does not exist: Slurm lists 2 nodes, counted from 0\n"
        "  found: SLURM_NODEID=5, nodes gpu01, gpu02\n"
        "  fix: start the script with srun inside the job, and pass Slurm's variables on unchanged (containers too)",
    ),
    "a port that is none": (
        HAND | {"MASTER_PORT": "99999"},
        "MASTER_PORT is not a valid port\n"
        "  found: MASTER_PORT=99999\n"
        "  fix: unset it: rank 0 then takes a free port; or set one below 65536",
    ),
    "a count of restarts that is none": (
        SRUN | {"SLURM_RESTART_COUNT": "twice"},
        "restart under srun must be a whole number\n"
        "  found: SLURM_RESTART_COUNT=twice\n"
        "  fix: start the script with srun inside the job, and pass Slurm's variables on unchanged (containers too)",
    ),
    "an address that means every host": (
        HAND | {"MASTER_ADDR": "127.0.1.1"},
        "MASTER_ADDR is a loopback address, but the ranks are on several nodes\n"
        "  found: MASTER_ADDR=127.0.1.1\n"
        "  fix: set it to rank 0's address on the network between the nodes.\n"
        "       `hostname --ip-address` gives 127.0.1.1 on Debian and Ubuntu: `hostname -I` lists the others.",
    ),
    "mpirun on several hosts without an address": (
        MPIRUN,
        "the address of rank 0 is unknown (mpirun, several nodes)\n"
        "  found: no MASTER_ADDR, no list of Slurm's nodes\n"
        "  fix: set MASTER_ADDR to the address of rank 0's host: mpirun -x MASTER_ADDR",
    ),
    "a world of several without a rank": (
        {"WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"},
        "WORLD_SIZE is set, but the rank of this process is not\n"
        "  found: WORLD_SIZE=4, no RANK, and no launcher's variables\n"
        "  fix: start it with srun, torchrun or mpirun, which set all of it; for one process unset WORLD_SIZE",
    ),
    "broken addresses": (
        SRUN | {"SHOAL_NODE_ADDRS": "gpu01"},
        "cannot read SHOAL_NODE_ADDRS\n"
        "  found: 'gpu01' is not name=address\n  fix: leave it as `shoal run` set it, or unset it",
    ),
}


@cases("case", *CONTRADICTIONS)
def test_contradicting_variables_are_rejected_with_the_fix(case: str) -> None:
    environ, text = CONTRADICTIONS[case]
    with pytest.raises(EnvError) as refusal:
        read_env(environ)
    assert str(refusal.value) == text


def test_every_launcher_has_a_case() -> None:
    met = {read_env(environ).launcher for environ, _ in PLACES.values()}
    assert met == {launcher.name for launcher in LAUNCHERS} | {"python"}


def test_batch_script_with_many_tasks_is_warned_to_use_srun(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shoal.train"):
        read_env(BATCH)
    assert "the job has 4 tasks, but this process is none of them: start it with srun" in caplog.text


def test_nodes_of_all_ranks_are_available_under_srun() -> None:
    env = read_env(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"})
    assert [env.node_of(rank) for rank in range(4)] == ["gpu01", "gpu01", "gpu01", "gpu02"]
    dealt = read_env(SRUN | {"SLURM_DISTRIBUTION": "cyclic"})
    assert [dealt.node_of(rank) for rank in range(4)] == ["gpu01", "gpu02", "gpu01", "gpu02"]


def test_node_of_another_rank_is_empty_under_torchrun() -> None:
    assert read_env(IN_ONE_TASK | TORCHRUN).node_of(0) == ""


def test_node_address_that_is_a_name_is_resolved_without_loopback() -> None:
    env = read_env(SRUN | {"SHOAL_NODE_ADDRS": "gpu01=localhost,gpu02=100.64.0.2"})
    assert (env.addresses_of("gpu01"), env.addresses_of("gpu02")) == ([], ["100.64.0.2"])


def test_node_is_the_hostname_without_slurm() -> None:
    assert read_env({}).node == socket.gethostname()


def test_each_start_of_a_job_has_its_own_key_shared_by_its_ranks() -> None:
    other_rank = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "gpu01"}
    assert read_env(SRUN).key == read_env(other_rank).key
    starts = [SRUN, SRUN | {"SLURM_RESTART_COUNT": "1"}, SRUN | {"SLURM_STEP_ID": "1"}, SRUN | {"SLURM_JOB_ID": "72"}]
    starts += [IN_ONE_TASK | TORCHRUN, IN_ONE_TASK | TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}]
    assert len({read_env(environ).key for environ in starts}) == len(starts)


def test_mpirun_ranks_share_a_key_over_different_steps() -> None:
    on_the_first_node = BATCH | MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    elsewhere = IN_ONE_TASK | MPIRUN | {"SLURM_CLUSTER_NAME": ""}
    assert read_env(on_the_first_node).key == read_env(elsewhere).key


def test_restart_counts_of_slurm_and_torchrun_add_up() -> None:
    assert read_env(IN_ONE_TASK | TORCHRUN | {"SLURM_RESTART_COUNT": "2"}).restart_count == 3


def test_reading_the_environment_does_not_import_torch() -> None:
    program = "import sys, shoal.train.env as e; e.read_env({}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@cases("text, counts", ("2(x3),1", (2, 2, 2, 1)), ("4", (4,)), ("1,2(x2)", (1, 2, 2)))
def test_slurm_tasks_per_node_are_parsed(text: str, counts: tuple[int, ...]) -> None:
    assert tasks_per_node(text) == counts


def test_cyclic_tasks_skip_full_nodes() -> None:
    assert place_tasks((3, 1), "cyclic") == (0, 1, 0, 0)
