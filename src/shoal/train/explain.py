"""Why the ranks did not meet, in words: who is missing, on which node, and whether that node can be reached."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shoal.train.env import Env
from shoal.train.errors import RendezvousError
from shoal.train.interfaces import interface_of, is_loopback, source_address

_PROBE_PORTS = (6818, 22)
"""slurmd and sshd: a host of the cluster answers at one of them, even if only with "refused"."""
_PROBE_SECONDS = 1.5

_NETWORK_FIX = (
    "let the nodes reach each other on all ports: a firewall between them is the usual cause.\n"
    "SHOAL_NODE_ADDRS=name=address,... names the addresses to use, SHOAL_INTERFACE the interface."
)


@dataclass(frozen=True)
class Attempt:
    """One try to reach rank 0 that came to nothing."""

    address: str
    port: int
    why: str
    dead: bool = False
    """Nothing at all comes back from this address: its other ports need not be tried."""

    def __str__(self) -> str:
        return f"{self.address} port {self.port}: {self.why}"


def missing_ranks(
    env: Env, here: Mapping[int, str], left: Mapping[int, str], notes: Mapping[int, str], waited: float
) -> RendezvousError:
    """Rank 0's words: whom it waits for, and what it can find out about them."""
    missing = [rank for rank in range(1, env.world_size) if rank not in here]
    nodes: dict[str, list[int]] = {}
    for rank in missing:
        nodes.setdefault(_node_of(env, rank, here), []).append(rank)
    reached = reachability([name for name in nodes if name and name != env.node], env)
    lines = []
    for name, ranks in nodes.items():
        lines.append(f"{_ranks(ranks)} {_on(env, name)} {_be(ranks)} not here{reached.get(name, '')}")
        lines += [f"  rank {rank} says: {notes[rank]}" for rank in ranks if rank in notes]
        lines += [f"  rank {rank} was here and ended ({left[rank]})" for rank in ranks if rank in left]
    cut_off = any("does not answer" in text for text in reached.values()) or bool(notes)
    return RendezvousError(
        f"rank 0 on {env.node} waited {waited:.0f} s for {len(missing)} of {env.world_size} ranks",
        found="\n".join(lines),
        fix=_NETWORK_FIX if cut_off else _absent_fix(env, missing),
    )


def rank_zero_not_found(env: Env, where: str, attempts: Sequence[Attempt], waited: float) -> RendezvousError:
    """Another rank's words: where it looked for rank 0, and what came back."""
    zero = env.node_of(0) or env.master_address
    lines = []
    if not attempts:
        reached = reachability([zero], env).get(zero, "") if zero != env.node else ""
        lines.append(f"rank 0 has not written its address to {where}{reached}")
    for address in dict.fromkeys(attempt.address for attempt in attempts):
        tried = [attempt for attempt in attempts if attempt.address == address]
        lines.append(f"{_summary(address, tried)}{_route(address)}")
    unreachable = any(attempt.dead for attempt in attempts)
    return RendezvousError(
        f"rank {env.rank} on {env.node} waited {waited:.0f} s and did not reach rank 0 on {zero}",
        found="\n".join(lines),
        fix=_NETWORK_FIX if unreachable else "look at rank 0's log: it has ended, or has not come to init() yet",
    )


def world_sizes_differ(env: Env, rank: int, node: str, world_size: int) -> RendezvousError:
    fix = {
        "torchrun": "give every torchrun the same --nnodes and --nproc-per-node",
        "env": "set the same WORLD_SIZE for every rank",
        "spawn": "start the same number of processes on every node",
    }.get(env.launcher, "start all ranks with one command: one srun, one mpirun")
    return RendezvousError(
        "the ranks do not agree on the world size",
        found=f"rank 0 on {env.node} counts {env.world_size}, rank {rank} on {node} counts {world_size}",
        fix=fix,
    )


def duplicate_rank(rank: int, first: str, second: str) -> RendezvousError:
    return RendezvousError(
        f"two processes say that they are rank {rank}",
        found=f"{first} and {second}",
        fix="export no RANK in a batch script, and start the script once: each task of srun has a SLURM_PROCID",
    )


def reachability(nodes: Sequence[str], env: Env) -> dict[str, str]:
    """For each node whether its host answers, as the end of a sentence. All at once: it takes as long as one."""
    if not nodes:
        return {}
    with ThreadPoolExecutor(max_workers=min(len(nodes), 32)) as pool:
        return dict(zip(nodes, pool.map(lambda name: _reach(name, env), nodes), strict=True))


def _reach(name: str, env: Env) -> str:
    addresses = env.addresses_of(name)
    if not addresses:
        return f"; the name {name} has no address but loopback here: is it in /etc/hosts?"
    for address in addresses[:2]:  # more would take longer than a person waits
        for port in _PROBE_PORTS:
            try:
                socket.create_connection((address, port), timeout=_PROBE_SECONDS).close()
            except ConnectionRefusedError:
                pass
            except OSError:
                continue
            return f"; the host answers ({address}): the network is there, the process is not"
    return f"; the host does not answer ({', '.join(addresses)})"


def _node_of(env: Env, rank: int, here: Mapping[int, str]) -> str:
    """The node of a missing rank: as placed by Slurm, or where the ranks beside it came from."""
    known = env.node_of(rank)
    if known:
        return known
    first = rank - rank % env.local_world_size
    if first <= env.rank < first + env.local_world_size:
        return env.node
    return next((here[near] for near in range(first, first + env.local_world_size) if near in here), "")


def _on(env: Env, name: str) -> str:
    if name:
        return f"on {name}"
    return f"on a node that {env.launcher} chose" + (f" (of {', '.join(env.nodes)})" if env.nodes else "")


def _absent_fix(env: Env, missing: Sequence[int]) -> str:
    start = {
        "srun": f"does srun start {env.world_size} tasks (--ntasks, --ntasks-per-node)?",
        "torchrun": "does torchrun run on every node, with the same --nnodes?",
        "mpirun": f"does mpirun start {env.world_size} processes (-n)?",
        "spawn": "does every node start its processes?",
    }.get(env.launcher, f"is WORLD_SIZE={env.world_size} right, and is every rank started?")
    return f"look at the log of rank {missing[0]}: it has failed, or has not come to init() yet. And {start}"


def _summary(address: str, tried: Sequence[Attempt]) -> str:
    if len(tried) == 1:
        return str(tried[0])
    reasons = Counter(attempt.why for attempt in tried)
    return (
        f"{address}: rank 0 is at none of {len(tried)} ports ("
        + ", ".join(f"{why}: {n}" for why, n in reasons.items())
        + ")"
    )


def _route(address: str) -> str:
    if is_loopback(address):
        return ""
    source = source_address(address)
    if not source:
        return "; there is no route to it from here"
    return f"; this host goes there by {interface_of(source) or 'an unknown interface'} from {source}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
