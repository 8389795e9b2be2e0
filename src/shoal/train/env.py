"""The place of this process in the job: rank, node, world size, under any launcher.

`read_env` only reads variables. It resolves no names and opens no port, so it can be called before anything else.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.contract import SHOAL_NODE_ADDRS, SHOAL_RUN_ID, parse_node_addrs
from shoal.hostlist import expand
from shoal.train import launcher_variables as launchers
from shoal.train.errors import EnvError
from shoal.train.interfaces import is_address, is_loopback, resolve
from shoal.train.launcher_variables import LauncherName, VariableReader, place_tasks

log = logging.getLogger("shoal.train")


@dataclass(frozen=True)
class Env:
    """The place of one process in the job, in torchrun's terms. The defaults are those of a single process."""

    node: str
    """This process's node."""
    nodes: tuple[str, ...]
    """The names of the job's nodes, in the order of node ranks. Empty if the launcher does not name them."""
    job_id: str
    restart_count: int
    """Slurm's requeues and torchrun's restarts together."""
    key: str
    """Identifies this start of the job: the same for all ranks, and different after a requeue."""
    launcher: LauncherName = "python"
    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_address: str = "127.0.0.1"
    """Where rank 0 is: an address, or the name of its node. `init` replaces it by the address that works."""
    master_port: int = 0
    """0: the kernel chooses, and rank 0 publishes the port."""
    placement: tuple[int, ...] = ()
    """The node rank of every rank, if the launcher's variables give it."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """The nodes' addresses, if `shoal run` has set them."""

    @property
    def node_count(self) -> int:
        """The number of the job's nodes. If the launcher does not give it, all nodes have equally many ranks."""
        return len(self.nodes) or -(-self.world_size // self.local_world_size)

    def node_of(self, rank: int) -> str:
        """The name of a rank's node; empty if the launcher does not give it."""
        if len(self.nodes) == 1:
            return self.nodes[0]
        if rank < len(self.placement) and self.placement[rank] < len(self.nodes):
            return self.nodes[self.placement[rank]]
        return ""

    def addresses_of(self, node: str) -> list[str]:
        """A node's addresses on the cluster's network: configured, else resolved from its name. Never loopback."""
        address = self.addresses.get(node, node)  # Slurm's NodeAddr may be a name again
        return [address] if is_address(address) else resolve(address)


def read_env(environ: Mapping[str, str] = os.environ) -> Env:
    """This process's place in the job, from its launcher's variables. EnvError if they contradict each other."""
    launcher = launchers.find_launcher(environ)
    if launcher is None:
        return _single_process_env(environ)
    variables = VariableReader(environ, launcher)
    rank, world_size = variables.number("rank"), variables.number("world_size")
    nodes, placement = _slurm_placement(variables, world_size)
    node_name = environ.get("SLURMD_NODENAME", "")
    placed_on = placement[rank] if rank < len(placement) else 0
    node_rank = variables.number("node_rank", nodes.index(node_name) if node_name in nodes else placed_on)
    if launcher.name == "srun" and nodes and node_rank >= len(nodes):  # the address of rank 0 would be unknown
        raise variables.error(
            f"node_rank {node_rank} does not exist: Slurm lists {len(nodes)} nodes, counted from 0",
            f"{variables.describe('node_rank', node_rank)}, nodes {', '.join(nodes[:8])}",
        )
    # A launcher that does not count the ranks of a node has one node only, unless MASTER_ADDR is elsewhere.
    master = environ.get("MASTER_ADDR", "")
    single_node_size = world_size if not master or is_loopback(master) else None
    local_world_size = variables.number("local_world_size", placement.count(node_rank) or single_node_size)
    local_rank = variables.number("local_rank", rank % max(local_world_size, 1))
    if not variables.first_set(launcher.node_rank) and not placement and node_name not in nodes:
        node_rank = rank // local_world_size if local_world_size else 0
    values = {"rank": rank, "world_size": world_size, "local_rank": local_rank, "local_world_size": local_world_size}
    launchers.check_bounds(variables, values)
    launchers.check_torch_names(variables, values)
    if launcher.name == "torchrun":
        launchers.check_torchrun(variables, world_size, local_world_size)
        placement = ()  # torchrun assigns node ranks in the order in which its agents arrive
    if launcher.name == "mpirun":
        launchers.check_mpirun(environ, rank, world_size)
    node = node_name or (nodes[node_rank] if node_rank < len(nodes) else socket.gethostname())
    restarts = variables.number("restart", 0, ("SLURM_RESTART_COUNT",)) + variables.number("restart", 0)
    multi_node = world_size > local_world_size
    addresses = _node_addresses(environ)
    return Env(
        node=node,
        nodes=nodes if multi_node else (node,),
        job_id=environ.get("SLURM_JOB_ID", ""),
        restart_count=restarts,
        key=_job_key(environ, restarts),
        launcher=launcher.name,
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master_address=_master_address(master, launcher.name, nodes, addresses if multi_node else None),
        master_port=_master_port(variables),
        placement=placement if multi_node else (),
        addresses=addresses,
    )


def _single_process_env(environ: Mapping[str, str]) -> Env:
    """Plain python: one process, also in a batch script that requested several tasks and did not use srun."""
    launchers.check_single_process(environ)
    job_id, tasks = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_NTASKS", "1")
    if job_id and tasks not in ("", "1"):
        log.warning("the job has %s tasks, but this process is none of them: start it with srun", tasks)
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
    return Env(node, (node,), job_id, restarts, _job_key(environ, restarts))


def _slurm_placement(variables: VariableReader, world_size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The job's nodes and the node rank of every rank, as far as Slurm's variables give them."""
    environ = variables.environ
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    # mpirun is in the batch script, on the first node: the step of its daemons has only the other nodes.
    name = variables.first_set(names[1:] + names[:1] if variables.launcher.name == "mpirun" else names)
    if not name:
        return (), ()
    try:
        nodes = tuple(expand(environ[name]))
    except ValueError as error:
        raise variables.error("cannot read Slurm's list of nodes", f"{name}: {error}") from None
    if variables.launcher.name not in ("spawn", "srun"):
        return nodes, ()
    counts_name = variables.first_set(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if variables.launcher.name == "spawn" or not counts_name:
        if world_size % len(nodes) == 0:
            return nodes, place_tasks([world_size // len(nodes)] * len(nodes))
        if variables.launcher.name == "spawn":
            return nodes, ()
    try:
        counts = launchers.tasks_per_node(environ.get(counts_name, ""))
    except ValueError as error:
        description = f"{counts_name or 'SLURM_TASKS_PER_NODE'}: {error}"
        raise variables.error("cannot read the number of tasks per node", description) from None
    if sum(counts) != world_size or len(counts) != len(nodes):
        size = variables.describe("world_size", world_size)
        raise EnvError(
            "Slurm's variables contradict each other about the size of this step",
            found=f"{size}, {counts_name}={environ[counts_name]}, {name}={environ[name]}",
            fix="change no SLURM_* variable between srun and the script; in a container pass all of them, or none",
        )
    return nodes, place_tasks(counts, environ.get("SLURM_DISTRIBUTION", "block"))


def _node_addresses(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        return parse_node_addrs(environ.get(SHOAL_NODE_ADDRS, ""))
    except ValueError as error:
        raise EnvError(
            f"cannot read {SHOAL_NODE_ADDRS}", found=str(error), fix="leave it as `shoal run` set it, or unset it"
        ) from None


def _master_address(
    master: str, launcher: LauncherName, nodes: tuple[str, ...], addresses: Mapping[str, str] | None
) -> str:
    """Rank 0's address, or the name of its node: never a loopback address. `master` is MASTER_ADDR."""
    if addresses is None:  # all ranks are on one node
        return master if launcher == "torchrun" and master else "127.0.0.1"
    first = nodes[0] if nodes and launcher != "torchrun" else ""
    if first in addresses:
        return addresses[first]
    if master and not (is_loopback(master) and first):
        if is_loopback(master):
            raise EnvError(
                "MASTER_ADDR is a loopback address, but the ranks are on several nodes",
                found=f"MASTER_ADDR={master}",
                fix="set it to rank 0's address on the network between the nodes.\n"
                "`hostname --ip-address` gives 127.0.1.1 on Debian and Ubuntu: `hostname -I` lists the others.",
            )
        return master
    if not first:
        raise EnvError(
            f"the address of rank 0 is unknown ({launcher}, several nodes)",
            found="no MASTER_ADDR, no list of Slurm's nodes",
            fix="set MASTER_ADDR to the address of rank 0's host"
            + (": mpirun -x MASTER_ADDR" if launcher == "mpirun" else ""),
        )
    return first


def _master_port(variables: VariableReader) -> int:
    port = variables.number("master_port", 0, ("MASTER_PORT",))
    if port > 65_535:
        raise EnvError(
            "MASTER_PORT is not a valid port",
            found=f"MASTER_PORT={port}",
            fix="unset it: rank 0 then takes a free port; or set one below 65536",
        )
    return port


def _job_key(environ: Mapping[str, str], restarts: int) -> str:
    """Identifies this start of the job, from variables that are the same on all its ranks."""
    names = ["SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", SHOAL_RUN_ID, "TORCHELASTIC_RUN_ID", "SHOAL_SPAWN"]
    if not environ.get("SLURM_JOB_ID"):
        names += ["PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "MASTER_ADDR", "MASTER_PORT"]
    elif environ.get("OMPI_COMM_WORLD_RANK"):
        names.remove("SLURM_STEP_ID")  # each of mpirun's daemons is a step of its own
        names.append("PMIX_NAMESPACE")
    return "/".join([*(environ.get(name, "") for name in names), str(restarts)])


def requeue_job_id(environ: Mapping[str, str]) -> str:
    """The job id for `scontrol requeue`; empty outside Slurm.

    An array task is `12_3`: its SLURM_JOB_ID may be that of the whole array. Of a heterogeneous job the first
    component is requeued, and the others with it.
    """
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_HET_JOB_ID") or environ.get("SLURM_JOB_ID", "")
