"""Errors of the rendezvous: which ranks are missing, on which nodes, and whether those can be reached."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shoal.train.env import Env
from shoal.train.errors import RendezvousError
from shoal.train.interfaces import interface_of, is_loopback, source_address

PROBE_PORTS = (6818, 22)
"""slurmd and sshd: a host of the cluster answers on one of them, if only with "connection refused"."""
PROBE_TIMEOUT_S = 1.5
SHOWN_RANKS = 8

_NETWORK_FIX = (
    "let the nodes reach each other on all ports: a firewall between them is the usual cause.\n"
    "SHOAL_NODE_ADDRS=name=address,... names the addresses to use, SHOAL_INTERFACE the interface."
)


@dataclass(frozen=True)
class FailedAttempt:
    """One failed attempt to reach rank 0."""

    address: str
    port: int
    reason: str
    unreachable: bool = False
    """The address does not answer at all: its other ports need not be tried."""

    def __str__(self) -> str:
        return f"{self.address} port {self.port}: {self.reason}"


def missing_ranks(
    env: Env,
    connected: Mapping[int, str],
    disconnected: Mapping[int, str],
    reports: Mapping[int, str],
    elapsed: float,
) -> RendezvousError:
    """Rank 0's error: the ranks it waits for, and what is known of their nodes. `connected` gives nodes by rank."""
    missing = [rank for rank in range(1, env.world_size) if rank not in connected]
    nodes: dict[str, list[int]] = {}
    for rank in missing:
        nodes.setdefault(_node_of(env, rank, connected), []).append(rank)
    reachable = check_reachability([name for name in nodes if name and name != env.node], env)
    lines = []
    unnamed_node = f"a node that {env.launcher} chose" + (f" (of {', '.join(env.nodes)})" if env.nodes else "")
    for name, ranks in nodes.items():
        lines.append(f"{_list_ranks(ranks)} on {name or unnamed_node}: missing{reachable.get(name, '')}")
        lines += [f"  rank {rank} reports: {reports[rank]}" for rank in ranks if rank in reports]
        ended_ranks = [rank for rank in ranks if rank in disconnected]
        lines += [f"  rank {rank} was connected and ended ({disconnected[rank]})" for rank in ended_ranks]
    network = any("does not answer" in text for text in reachable.values()) or bool(reports)
    return RendezvousError(
        f"rank 0 on {env.node} waited {elapsed:.0f} s for {len(missing)} of {env.world_size} ranks",
        found="\n".join(lines),
        fix=_NETWORK_FIX if network else _launcher_fix(env, missing),
    )


def rank_zero_unreachable(
    env: Env, description: str, attempts: Sequence[FailedAttempt], elapsed: float
) -> RendezvousError:
    """The error of another rank: where it looked for rank 0, and what came back."""
    zero = env.node_of(0) or env.master_address
    lines = []
    if not attempts:
        reachable = check_reachability([zero], env).get(zero, "") if zero != env.node else ""
        lines.append(f"rank 0 has not written its address to {description}{reachable}")
    for address in dict.fromkeys(attempt.address for attempt in attempts):
        lines.append(_summarize([attempt for attempt in attempts if attempt.address == address]) + _route(address))
    network = any(attempt.unreachable for attempt in attempts)
    return RendezvousError(
        f"rank {env.rank} on {env.node} waited {elapsed:.0f} s and did not reach rank 0 on {zero}",
        found="\n".join(lines),
        fix=_NETWORK_FIX if network else "read rank 0's log: it has ended, or has not called init() yet",
    )


def world_sizes_differ(env: Env, rank: int, node: str, world_size: int) -> RendezvousError:
    fixes = {
        "torchrun": "give every torchrun the same --nnodes and --nproc-per-node",
        "env": "set the same WORLD_SIZE for every rank",
        "spawn": "start the same number of processes on every node",
    }
    return RendezvousError(
        "the ranks have different world sizes",
        found=f"{env.world_size} on rank 0 ({env.node}), {world_size} on rank {rank} ({node})",
        fix=fixes.get(env.launcher, "start all ranks with one command: one srun, one mpirun"),
    )


def check_reachability(nodes: Sequence[str], env: Env) -> dict[str, str]:
    """For each node whether its host answers, as the end of a sentence. All in parallel."""
    if not nodes:
        return {}
    with ThreadPoolExecutor(max_workers=min(len(nodes), 32)) as pool:
        return dict(zip(nodes, pool.map(lambda name: _probe(name, env), nodes), strict=True))


def _probe(name: str, env: Env) -> str:
    addresses = env.addresses_of(name)
    if not addresses:
        return f"; {name} resolves to no address but loopback here: check /etc/hosts"
    for address in addresses[:2]:  # each takes up to 3 s
        for port in PROBE_PORTS:
            try:
                socket.create_connection((address, port), timeout=PROBE_TIMEOUT_S).close()
            except ConnectionRefusedError:
                pass
            except OSError:
                continue
            return f"; the host answers ({address}), the process does not"
    return f"; the host does not answer ({', '.join(addresses)})"


def _node_of(env: Env, rank: int, connected: Mapping[int, str]) -> str:
    """The node of a missing rank: as Slurm placed it, or that of the ranks of the same node."""
    node = env.node_of(rank)
    if node:
        return node
    first = rank - rank % env.local_world_size
    if first <= env.rank < first + env.local_world_size:
        return env.node
    return next((connected[near] for near in range(first, first + env.local_world_size) if near in connected), "")


def _launcher_fix(env: Env, missing: Sequence[int]) -> str:
    check = {
        "srun": f"srun starts {env.world_size} tasks (--ntasks, --ntasks-per-node)",
        "torchrun": "torchrun runs on every node, with the same --nnodes",
        "mpirun": f"mpirun starts {env.world_size} processes (-n)",
        "spawn": "every node starts its processes",
    }.get(env.launcher, f"WORLD_SIZE={env.world_size} is right, and every rank is started")
    return f"read the log of rank {missing[0]}: it has failed, or has not called init() yet; check that {check}"


def _summarize(attempts: Sequence[FailedAttempt]) -> str:
    """The attempts on one address."""
    if len(attempts) == 1:
        return str(attempts[0])
    reasons = Counter(attempt.reason for attempt in attempts)
    counts = ", ".join(f"{reason}: {count}" for reason, count in reasons.items())
    return f"{attempts[0].address}: rank 0 is on none of {len(attempts)} ports ({counts})"


def _route(address: str) -> str:
    if is_loopback(address):
        return ""
    local_address = source_address(address)
    if not local_address:
        return "; no route to it from here"
    return f"; route: {interface_of(local_address) or 'an unknown interface'} from {local_address}"


def _list_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
    return f"ranks {', '.join(map(str, ranks[:SHOWN_RANKS]))}{more}"
