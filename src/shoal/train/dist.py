"""Brings the ranks together: `init()` at the start of a script, `shutdown()` at its end.

The steps, each explained when it fails: read the launcher's variables (env), meet (rendezvous), choose the interface
that leads to rank 0, prove that every rank has a GPU of its own (binding), start torch's process group.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from shoal.train.addresses import master_addresses, own_addresses
from shoal.train.binding import Binding, prove_binding
from shoal.train.boards import Board, FileBoard, PortBoard, StoreBoard
from shoal.train.contract import SHOAL_INTERFACE, SHOAL_STORE_DIR
from shoal.train.env import Env, read_env
from shoal.train.errors import EnvError, RendezvousError
from shoal.train.explain import reachability
from shoal.train.interfaces import interface_of, local_addresses, settings_for
from shoal.train.proving import begin as begin_proof
from shoal.train.rendezvous import Meeting, Patience, meet

log = logging.getLogger("shoal.train")

EXPLAIN_AFTER = 8.0
"""Seconds of waiting before a rank says what it waits for. What it then looks up takes a few more."""


GLOO_THREAD = "pt_gloo_runloop"
"""What torch calls the threads that do Gloo's collectives."""


@dataclass(frozen=True)
class Dist:
    """The job, once all ranks have met."""

    env: Env
    device: torch.device
    backend: str
    interface: str
    """The network interface that NCCL and Gloo use; empty for a single process."""
    binding: Binding | None
    """Which rank has which GPU; None where the proof was not wanted."""
    store: Any = dataclasses.field(repr=False, default=None)
    """torch's key-value store of the job."""


_current: Dist | None = None

_group: Any = None
"""The process group, held beyond its end. Where a DDP model is the last to hold it, freeing the model waits for Gloo's
threads with Python's lock held, and one of them may be waiting for that lock: a job that is done would never end."""


def init(
    timeout: float = 180.0,
    *,
    explain_after: float = EXPLAIN_AFTER,
    collective_timeout: float = 600.0,
    backend: str = "",
    prove: bool = True,
    environ: MutableMapping[str, str] = os.environ,
) -> Dist:
    """Bring all ranks of the job together, under whatever launcher started them. A second call returns the first's.

    Ranks may come late (a cold import over the network takes a minute), so `timeout` is long; but after
    `explain_after` seconds it is said who is missing and why. `collective_timeout` is torch's, for each collective.
    """
    global _current, _group
    if _current is not None:
        return _current
    env = read_env(environ)
    patience = Patience(timeout, explain_after)
    set_threads(env, environ)
    begin_proof(environ)
    meeting = _meet(env, environ, patience)
    store = _open_store(env, meeting, patience)
    interface = use_interface(env, meeting, environ)
    binding = prove_binding(env, torch_dist.PrefixStore("shoal", store), environ) if prove else None
    if binding and env.rank == 0:
        print(binding, file=sys.stderr, flush=True)
    device = choose_device(env)
    backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    torch_dist.init_process_group(
        backend,
        store=torch_dist.PrefixStore("torch", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=collective_timeout),
        device_id=device if device.type == "cuda" else None,
    )
    _group = torch_dist.group.WORLD
    atexit.register(let_threads_rest)
    if meeting:
        env = dataclasses.replace(env, master_address=meeting.store_address, master_port=meeting.store_port)
    _current = Dist(env, device, backend, interface, binding, store)
    return _current


def shutdown(patience: float = 10.0) -> None:
    """End the process group. Rank 0 holds the store, so it waits a moment for the others to be done with it."""
    global _current
    dist, _current = _current, None
    if dist is None:
        return
    torch_dist.destroy_process_group()
    gone = dist.store.add("shoal/gone", 1)
    end = time.monotonic() + patience
    while dist.env.rank == 0 and gone < dist.env.world_size and time.monotonic() < end:
        time.sleep(0.01)
        gone = dist.store.add("shoal/gone", 0)


def let_threads_rest(patience: float = 1.0) -> None:
    """Wait until Gloo's threads have put their last collective away. For the end of a process.

    A thread that frees a tensor of Python's while Python ends is stopped where C++ does not allow that, and the process
    aborts. On a busy machine it may not have had its turn since the collective was done.
    """
    end, calm = time.monotonic() + patience, 0
    while calm < 2 and time.monotonic() < end:
        calm = 0 if _gloo_is_busy() else calm + 1
        time.sleep(0.002)  # lets go of Python's lock, for which one of them may be waiting


def _gloo_is_busy() -> bool:
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == GLOO_THREAD and rest.split()[0] != "S":
                return True
    return False


def choose_device(env: Env) -> torch.device:
    """This rank's device: the only GPU it sees, else the one with the number of its local rank, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else env.local_rank)
    torch.cuda.set_device(device)
    return device


def set_threads(env: Env, environ: MutableMapping[str, str]) -> None:
    """Share the CPUs among the ranks of the node: torch alone takes all of them in every rank."""
    cpus = len(os.sched_getaffinity(0))
    mine = environ.get("SLURM_CPUS_PER_TASK", "") if env.launcher == "srun" else ""
    share = min(int(mine), cpus) if mine.isdigit() else cpus // env.local_world_size
    if not environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(share, 1))
    on_node = environ.get("SLURM_CPUS_ON_NODE", "")
    if env.launcher == "srun" and cpus == 1 and on_node.isdigit() and int(on_node) >= 2 * env.local_world_size:
        log.warning(
            "rank %d may use 1 of the %s CPUs that the job has on %s: from 22.05 on srun does not take --cpus-per-task"
            " from sbatch; export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before it",
            env.rank,
            on_node,
            env.node,
        )


def use_interface(env: Env, meeting: Meeting | None, environ: MutableMapping[str, str]) -> str:
    """Set the variables of NCCL and Gloo to the interface that leads to rank 0. What the user set stays."""
    if meeting is None:
        return ""
    names = {name for name, _ in local_addresses()}
    for variable in (SHOAL_INTERFACE, "GLOO_SOCKET_IFNAME"):
        wanted = environ.get(variable, "")
        if wanted and wanted not in names:
            raise EnvError(
                f"{variable} names an interface that {env.node} does not have, or that has no address",
                found=f"{variable}={wanted}; this host has {', '.join(sorted(names))}",
                fix=f"unset {variable}: the interface is then chosen by the route to rank 0",
            )
    interface = environ.get(SHOAL_INTERFACE) or interface_of(meeting.own_address)
    if interface:
        for name, value in settings_for(interface).items():
            environ.setdefault(name, value)
    return environ.get("GLOO_SOCKET_IFNAME", interface)


def _meet(env: Env, environ: MutableMapping[str, str], patience: Patience) -> Meeting | None:
    """Meet the other ranks; None for a process that is alone."""
    if env.world_size == 1:
        return None
    interface = environ.get(SHOAL_INTERFACE, "")
    return meet(env, choose_board(env, environ, patience), lambda: own_addresses(env, interface), patience)


def choose_board(env: Env, environ: MutableMapping[str, str], patience: Patience) -> Board:
    """Where rank 0 says where it listens: torchrun's store, a shared directory, or a row of ports."""
    if env.launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return StoreBoard(_agents_store(env, patience), env.key, env.world_size)
    directory = environ.get(SHOAL_STORE_DIR, "")
    if directory:
        return FileBoard(Path(directory), env.key)
    return PortBoard(lambda: master_addresses(env), env.key, env.master_port)


def _agents_store(env: Env, patience: Patience) -> Any:
    address, port = env.master_address, env.master_port
    try:
        return torch_dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=patience.explain_after))
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {env.rank} on {env.node} does not reach the store of torchrun's agents",
            found=f"{address} port {port}: {str(error).splitlines()[0]}{reachability([address], env)[address]}",
            fix="give torchrun an address that all nodes can reach: --rdzv-endpoint, and --local-addr on each node",
        ) from error


def _open_store(env: Env, meeting: Meeting | None, patience: Patience) -> Any:
    """torch's store, on the socket that rank 0 has been listening on since before it gave the address away."""
    if meeting is None:
        return torch_dist.HashStore()
    return torch_dist.TCPStore(
        meeting.store_address,
        meeting.store_port,
        env.world_size,
        is_master=env.rank == 0,
        timeout=timedelta(seconds=patience.timeout),
        wait_for_workers=False,
        master_listen_fd=meeting.listener.detach() if meeting.listener else None,
    )
