"""Starts and ends the distributed job: `init()` at the start of a script, `shutdown()` at its end.

The steps, each with its own error: read the launcher's variables (env), connect the ranks (rendezvous), choose the
network interface towards rank 0, check that every rank has its own GPU (binding), start torch's process group.
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
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist

from shoal.contract import SHOAL_INTERFACE, SHOAL_STORE_DIR
from shoal.train import address_exchange
from shoal.train.address_exchange import AddressExchange
from shoal.train.env import Env, read_env
from shoal.train.errors import EnvError, RendezvousError
from shoal.train.gpu_binding import Binding, prove_binding
from shoal.train.interfaces import interface_of, local_addresses, nccl_gloo_variables
from shoal.train.proof_watch import begin_proof
from shoal.train.rank_record import open_record
from shoal.train.rendezvous import Rendezvous, RendezvousTimer, join_rendezvous
from shoal.train.rendezvous_errors import check_reachability

log = logging.getLogger("shoal.train")

T = TypeVar("T")

REPORT_AFTER_S = 8.0
"""How long a rank waits before it reports what it waits for. The probes for that report take up to 6 s more."""
SHUTDOWN_TIMEOUT_S = 10.0
GLOO_IDLE_TIMEOUT_S = 1.0
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Long, since a slow rank may be writing a large checkpoint to a busy disk."""

GLOO_THREAD = "pt_gloo_runloop"
"""The name of torch's threads for Gloo's collectives."""


@dataclass(frozen=True)
class Dist:
    """The job, once all ranks are connected."""

    env: Env
    device: torch.device
    backend: str
    interface: str
    """The network interface that NCCL and Gloo use; empty for a single process."""
    binding: Binding | None
    """Which rank has which GPU; None with `prove=False`."""
    store: Any = dataclasses.field(repr=False, default=None)
    """torch's key-value store of the job."""


_current: Dist | None = None

_group: Any = None
"""Keeps the process group alive after its end. If a DDP model held the last reference, freeing it would wait for Gloo's
threads while holding the GIL, and a thread that waits for the GIL would then hang the finished job."""


def init(
    timeout: float = 180.0,
    *,
    explain_after: float = REPORT_AFTER_S,
    collective_timeout: float = 600.0,
    backend: str = "",
    prove: bool = True,
    environ: MutableMapping[str, str] = os.environ,
) -> Dist:
    """Connect all ranks of the job, under any launcher. A second call returns the result of the first.

    Ranks may start late (a cold import over the network takes a minute), so `timeout` is long; after `explain_after`
    seconds the missing ranks are named, with the reason. `collective_timeout` is torch's, for each collective.
    """
    global _current, _group
    if _current is not None:
        return _current
    env = read_env(environ)
    open_record(environ)
    timer = RendezvousTimer(timeout, explain_after)
    set_threads(env, environ)
    begin_proof(environ)
    rendezvous: Rendezvous | None = None
    if env.world_size > 1:
        addresses = partial(address_exchange.own_addresses, env, environ.get(SHOAL_INTERFACE, ""))
        rendezvous = join_rendezvous(env, choose_exchange(env, environ, timer), addresses, timer)
    store = _open_store(env, rendezvous, timer)
    interface = use_interface(env, rendezvous, environ)
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
    atexit.register(wait_for_gloo_threads)
    if rendezvous:
        env = dataclasses.replace(env, master_address=rendezvous.store_address, master_port=rendezvous.store_port)
    _current = Dist(env, device, backend, interface, binding, store)
    return _current


def shutdown(timeout: float = SHUTDOWN_TIMEOUT_S) -> None:
    """End the process group. Rank 0 serves the store, so it waits for the other ranks, up to `timeout` seconds."""
    global _current
    dist, _current = _current, None
    if dist is None:
        return
    torch_dist.destroy_process_group()
    finished = dist.store.add("shoal/gone", 1)
    end = time.monotonic() + timeout
    while dist.env.rank == 0 and finished < dist.env.world_size and time.monotonic() < end:
        time.sleep(0.01)
        finished = dist.store.add("shoal/gone", 0)


def wait_for_gloo_threads(timeout: float = GLOO_IDLE_TIMEOUT_S) -> None:
    """Wait at the end of a process until Gloo's threads are idle.

    A thread that frees a Python tensor while the interpreter ends is stopped where C++ does not allow it, and the
    process aborts. On a busy machine a thread may not have run since its last collective.
    """
    end, idle = time.monotonic() + timeout, 0
    while idle < 2 and time.monotonic() < end:
        idle = 0 if _gloo_is_busy() else idle + 1
        time.sleep(0.002)  # releases the GIL, for which a thread may be waiting


def _gloo_is_busy() -> bool:
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == GLOO_THREAD and rest.split()[0] != "S":
                return True
    return False


def choose_device(env: Env) -> torch.device:
    """This rank's device: the only visible GPU, else the GPU whose index is the local rank, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else env.local_rank)
    torch.cuda.set_device(device)
    return device


def set_threads(env: Env, environ: MutableMapping[str, str]) -> None:
    """Divide the CPUs among the ranks of the node: by default torch uses all of them in every rank."""
    cpus = len(os.sched_getaffinity(0))
    task_cpus = environ.get("SLURM_CPUS_PER_TASK", "") if env.launcher == "srun" else ""
    share = min(int(task_cpus), cpus) if task_cpus.isdigit() else cpus // env.local_world_size
    if not environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(share, 1))
    on_node = environ.get("SLURM_CPUS_ON_NODE", "")
    if env.launcher == "srun" and cpus == 1 and on_node.isdigit() and int(on_node) >= 2 * env.local_world_size:
        log.warning(
            "rank %d can use 1 of the job's %s CPUs on %s: since Slurm 22.05 srun ignores sbatch's --cpus-per-task;"
            " export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun",
            *(env.rank, on_node, env.node),
        )


def use_interface(env: Env, rendezvous: Rendezvous | None, environ: MutableMapping[str, str]) -> str:
    """Set the variables of NCCL and Gloo to the interface towards rank 0. What the user set stays."""
    if rendezvous is None:
        return ""
    names = {name for name, _ in local_addresses()}
    for variable in (SHOAL_INTERFACE, "GLOO_SOCKET_IFNAME"):
        name = environ.get(variable, "")
        if name and name not in names:
            raise EnvError(
                f"{variable} names an interface that {env.node} does not have, or that has no address",
                found=f"{variable}={name}; this host has {', '.join(sorted(names))}",
                fix=f"unset {variable}: the interface is then chosen by the route to rank 0",
            )
    interface = environ.get(SHOAL_INTERFACE) or interface_of(rendezvous.own_address)
    if interface:
        for name, value in nccl_gloo_variables(interface).items():
            environ.setdefault(name, value)
    return environ.get("GLOO_SOCKET_IFNAME", interface)


def choose_exchange(env: Env, environ: MutableMapping[str, str], timer: RendezvousTimer) -> AddressExchange:
    """Where rank 0 publishes its address: torchrun's store, a shared directory, or a list of ports."""
    if env.launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return address_exchange.StoreExchange(_connect_agent_store(env, timer), env.key, env.world_size)
    directory = environ.get(SHOAL_STORE_DIR, "")
    if directory:
        return address_exchange.FileExchange(Path(directory), env.key)
    return address_exchange.PortExchange(lambda: address_exchange.master_addresses(env), env.key, env.master_port)


def _connect_agent_store(env: Env, timer: RendezvousTimer) -> Any:
    address, port = env.master_address, env.master_port
    try:
        return torch_dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timer.report_after))
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {env.rank} on {env.node} cannot reach the store of torchrun's agents",
            found=f"{address} port {port}: {str(error).splitlines()[0]}{check_reachability([address], env)[address]}",
            fix="give torchrun an address that all nodes can reach: --rdzv-endpoint, and --local-addr on each node",
        ) from error


def _open_store(env: Env, rendezvous: Rendezvous | None, timer: RendezvousTimer) -> Any:
    """torch's store, on the socket that rank 0 opened before it published the address."""
    if rendezvous is None:
        return torch_dist.HashStore()
    return torch_dist.TCPStore(
        rendezvous.store_address,
        rendezvous.store_port,
        env.world_size,
        is_master=env.rank == 0,
        timeout=timedelta(seconds=timer.timeout),
        wait_for_workers=False,
        master_listen_fd=rendezvous.listener.detach() if rendezvous.listener else None,
    )


class RankGroup:
    """All ranks of the job, or only this process if torch.distributed is not initialized.

    For small messages outside of training, on a Gloo group of its own: collectives of one group must run in the same
    order on every rank, and a checkpoint that a background thread writes during the training's all-reduces would
    deadlock the job. The constructor is collective: every rank creates its groups in the same order. Use an object from
    one thread at a time.
    """

    def __init__(self, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
        self.distributed = torch_dist.is_available() and torch_dist.is_initialized()
        self.rank: int = torch_dist.get_rank() if self.distributed else 0
        self.world_size: int = torch_dist.get_world_size() if self.distributed else 1
        self.group: Any = torch_dist.new_group(backend="gloo", timeout=timeout) if self.distributed else None

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in the order of the ranks."""
        if not self.distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch_dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if not self.distributed:
            return value
        values: list[Any] = [value]
        torch_dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]  # type: ignore[no-any-return]

    def max_over_ranks(self, *numbers: int) -> tuple[int, ...]:
        """For each number its maximum over all ranks: one all-reduce of a few bytes."""
        if not self.distributed:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.int64)
        torch_dist.all_reduce(tensor, op=torch_dist.ReduceOp.MAX, group=self.group)
        return tuple(tensor.tolist())
