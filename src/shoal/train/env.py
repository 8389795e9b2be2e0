"""Where this process stands in the job: rank, node, world size, whoever launched it.

`read_env` only reads variables. It asks no name server and opens no port, so it can be called before anything else.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.train.contract import SHOAL_NODE_ADDRS, SHOAL_RUN_ID, parse_node_addrs
from shoal.train.contradictions import (
    check_alone,
    check_bounds,
    check_mpirun,
    check_node_rank,
    check_torch_names,
    check_torchrun,
)
from shoal.train.errors import EnvError
from shoal.train.interfaces import is_address, is_loopback, resolve
from shoal.train.launchers import Launcher, LauncherName, Variables, find_launcher
from shoal.train.nodes import expand_nodelist, place_tasks, tasks_per_node

log = logging.getLogger("shoal.train")


@dataclass(frozen=True)
class Env:
    """One process's place in the job, in torchrun's words."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    nodes: tuple[str, ...]
    """The names of the job's nodes, in the order of node ranks. Empty where the launcher does not name them."""
    master_address: str
    """Where rank 0 is: an address, or the name of its node. `init` puts the address in that was found to work."""
    master_port: int
    """0: rank 0 lets the kernel choose, and tells the others."""
    launcher: LauncherName
    job_id: str
    restart_count: int
    """Slurm's requeues and torchrun's restarts together."""
    step_id: str = ""
    key: str = ""
    """Names this start of this job: the same for all its ranks, another one after a requeue."""
    node: str = ""
    """This process's node."""
    placement: tuple[int, ...] = ()
    """The node rank of every rank, where the launcher lets us know it."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """The nodes' addresses, where `shoal run` told them."""

    @property
    def node_count(self) -> int:
        """How many nodes the job runs on; a launcher that does not say is taken to fill every node alike."""
        return len(self.nodes) or -(-self.world_size // self.local_world_size)

    def node_of(self, rank: int) -> str:
        """The name of the node a rank is on, empty where only its launcher knows."""
        if len(self.nodes) == 1:
            return self.nodes[0]
        if rank < len(self.placement) and self.placement[rank] < len(self.nodes):
            return self.nodes[self.placement[rank]]
        return ""

    def addresses_of(self, node: str) -> list[str]:
        """A node's addresses on the cluster's network: as told, else as its name resolves. Never loopback."""
        told = self.addresses.get(node, node)  # Slurm's NodeAddr may be a name again
        return [told] if is_address(told) else resolve(told)


def read_env(environ: Mapping[str, str] = os.environ) -> Env:
    """This process's place in the job, from its launcher's variables. EnvError where they contradict each other."""
    launcher = find_launcher(environ)
    if launcher is None:
        return _alone(environ)
    read = Variables(environ, launcher)
    rank = read.number("rank", launcher.rank)
    world_size = read.number("world_size", launcher.world_size)
    nodes, placement = _slurm_places(read, world_size)
    node_rank = read.number("node_rank", launcher.node_rank, _node_rank(environ, nodes, placement, rank))
    if launcher.name == "srun":
        check_node_rank(read, node_rank, nodes)
    on_this_node = placement.count(node_rank) if placement else None
    local_world_size = read.number(
        "local_world_size", launcher.local_world_size, on_this_node or _all_here(read, world_size)
    )
    local_rank = read.number("local_rank", launcher.local_rank, rank % max(local_world_size, 1))
    if not read.source(launcher.node_rank) and not placement and environ.get("SLURMD_NODENAME") not in nodes:
        node_rank = rank // local_world_size if local_world_size else 0
    check_bounds(read, rank, world_size, local_rank, local_world_size)
    check_torch_names(read, {"rank": rank, "world_size": world_size, "local_rank": local_rank})
    if launcher.name == "torchrun":
        check_torchrun(environ, world_size, local_world_size)
        placement = ()  # torchrun gives out node ranks as its agents arrive, in no order that Slurm knows
    if launcher.name == "mpirun":
        check_mpirun(environ, rank, world_size)
    node = environ.get("SLURMD_NODENAME") or (nodes[node_rank] if node_rank < len(nodes) else socket.gethostname())
    restarts = read.number("restart", ("SLURM_RESTART_COUNT",), 0) + read.number("restart", launcher.restart, 0)
    spread = world_size > local_world_size
    addresses = _node_addresses(environ)
    return Env(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        nodes=nodes if spread else (node,),
        master_address=_master_address(environ, launcher, nodes, addresses if spread else None),
        master_port=_master_port(read),
        launcher=launcher.name,
        job_id=environ.get("SLURM_JOB_ID", ""),
        restart_count=restarts,
        step_id=environ.get("SLURM_STEP_ID", ""),
        key=_key(environ, restarts),
        node=node,
        placement=placement if spread else (),
        addresses=addresses,
    )


def _alone(environ: Mapping[str, str]) -> Env:
    """Plain python: one process, also in a batch script that asked for several tasks and did not use srun."""
    check_alone(environ)
    tasks = environ.get("SLURM_NTASKS", "1")
    if environ.get("SLURM_JOB_ID") and tasks not in ("", "1"):
        log.warning("the job has %s tasks, and this is one process outside of them: start it with srun", tasks)
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
    return Env(
        rank=0,
        local_rank=0,
        node_rank=0,
        world_size=1,
        local_world_size=1,
        nodes=(node,),
        master_address="127.0.0.1",
        master_port=0,
        launcher="python",
        job_id=environ.get("SLURM_JOB_ID", ""),
        restart_count=restarts,
        key=_key(environ, restarts),
        node=node,
    )


def _slurm_places(read: Variables, world_size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The job's nodes and the node rank of every rank, as far as Slurm's variables tell."""
    environ = read.environ
    name = read.source(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    if not name:
        return (), ()
    try:
        nodes = expand_nodelist(environ[name])
    except ValueError as error:
        raise EnvError(
            "Slurm's list of nodes cannot be read", found=f"{name}: {error}", fix=read.launcher.fix
        ) from None
    if read.launcher.name == "spawn":
        return nodes, place_tasks((world_size // len(nodes),) * len(nodes)) if world_size % len(nodes) == 0 else ()
    if read.launcher.name != "srun":
        return nodes, ()
    counts_name = read.source(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if not counts_name and world_size % len(nodes) == 0:
        return nodes, place_tasks((world_size // len(nodes),) * len(nodes))
    try:
        counts = tasks_per_node(environ.get(counts_name, ""))
    except ValueError as error:
        raise EnvError(
            "the tasks of each node cannot be read",
            found=f"{counts_name or 'SLURM_TASKS_PER_NODE'}: {error}",
            fix=read.launcher.fix,
        ) from None
    if sum(counts) != world_size or len(counts) != len(nodes):
        raise EnvError(
            "Slurm's variables contradict each other about the size of this step",
            found=f"{read.shown(read.launcher.world_size, world_size)}, {counts_name}={environ[counts_name]},"
            f" {name}={environ[name]}",
            fix="change no SLURM_* variable between srun and the script; in a container pass all of them, or none",
        )
    return nodes, place_tasks(counts, environ.get("SLURM_DISTRIBUTION", "block"))


def _all_here(read: Variables, world_size: int) -> int | None:
    """A launcher that does not count the ranks of a node has one node only, unless rank 0 is said to be elsewhere."""
    master = read.environ.get("MASTER_ADDR", "")
    return world_size if not master or is_loopback(master) else None


def _node_rank(environ: Mapping[str, str], nodes: tuple[str, ...], placement: tuple[int, ...], rank: int) -> int:
    """For a launcher that has no node rank of its own."""
    here = environ.get("SLURMD_NODENAME", "")
    if here in nodes:
        return nodes.index(here)
    return placement[rank] if rank < len(placement) else 0


def _node_addresses(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        return parse_node_addrs(environ.get(SHOAL_NODE_ADDRS, ""))
    except ValueError as error:
        raise EnvError(
            f"{SHOAL_NODE_ADDRS} cannot be read", found=str(error), fix="leave it as `shoal run` set it, or unset it"
        ) from None


def _master_address(
    environ: Mapping[str, str], launcher: Launcher, nodes: tuple[str, ...], known: Mapping[str, str] | None
) -> str:
    """Rank 0's address, or the name of its node: never one that means "this host" on every node."""
    given = environ.get("MASTER_ADDR", "")
    if known is None:  # all ranks are on one node
        return given if launcher.name == "torchrun" and given else "127.0.0.1"
    first = nodes[0] if nodes and launcher.name != "torchrun" else ""
    if first in known:
        return known[first]
    if given and not (is_loopback(given) and first):
        if is_loopback(given):
            raise EnvError(
                "MASTER_ADDR means this host on every node, and the ranks are on several",
                found=f"MASTER_ADDR={given}",
                fix="set it to rank 0's address on the network between the nodes.\n"
                "`hostname --ip-address` gives 127.0.1.1 on Debian and Ubuntu: `hostname -I` lists the others.",
            )
        return given
    if not first:
        raise EnvError(
            f"nothing says where rank 0 is ({launcher.name}, several nodes)",
            found="no MASTER_ADDR, no list of Slurm's nodes",
            fix="set MASTER_ADDR to the address of rank 0's host"
            + (": mpirun -x MASTER_ADDR" if launcher.name == "mpirun" else ""),
        )
    return first


def _master_port(read: Variables) -> int:
    port = read.number("master_port", ("MASTER_PORT",), 0)
    if port > 65_535:
        raise EnvError(
            "MASTER_PORT is no port",
            found=f"MASTER_PORT={port}",
            fix="unset it: the ranks then agree on a port that is free; or set one below 65536",
        )
    return port


def _key(environ: Mapping[str, str], restarts: int) -> str:
    """One name for this start of this job, from what all its ranks are told alike."""
    names: tuple[str, ...] = (
        "SLURM_CLUSTER_NAME",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        SHOAL_RUN_ID,
        "TORCHELASTIC_RUN_ID",
        "SHOAL_SPAWN",
    )
    if not environ.get("SLURM_JOB_ID"):
        names += ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "MASTER_ADDR", "MASTER_PORT")
    elif environ.get("OMPI_COMM_WORLD_RANK"):
        names = tuple(name for name in names if name != "SLURM_STEP_ID")  # its daemons sit in steps of their own
        names += ("PMIX_NAMESPACE",)
    return "/".join([*(environ.get(name, "") for name in names), str(restarts)])
