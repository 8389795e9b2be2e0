"""Rendezvous: rank 0 listens, the other ranks connect, and missing ranks are named.

Not torch's TCPStore alone: with 3 of 4 ranks missing it says after 15 s "1/4 clients joined", torchrun only
RendezvousTimeoutError; neither names a rank, and both need a port that is known to be free (torch 2.13).

Each rank announces itself (rank, node, world size) and keeps the connection open. When all are connected, rank 0
answers with the address of the store: the one the rank has connected to, so it is known to work.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shoal.train.address_exchange import AddressExchange, Endpoint, open_listener
from shoal.train.env import Env
from shoal.train.errors import RendezvousError
from shoal.train.file_io import parse_json_object
from shoal.train.interfaces import is_loopback, plain_address
from shoal.train.rendezvous_errors import FailedAttempt, missing_ranks, rank_zero_unreachable, world_sizes_differ

MAX_LINE_BYTES = 65_536
CONNECT_TIMEOUT_S = 2.0
"""For one address: a host that drops packets must not use up the time for the others."""


@dataclass(frozen=True)
class Rendezvous:
    """What a rank knows once all ranks are connected."""

    store_address: str
    store_port: int
    own_address: str
    """This rank's address on the network between the nodes."""
    listener: socket.socket | None = None
    """Rank 0's socket for the store, listening already."""


@dataclass
class RendezvousTimer:
    """How long a rank waits, and when it reports what it waits for."""

    timeout: float
    report_after: float
    write: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr, flush=True))
    started: float = field(default_factory=time.monotonic)
    reported: bool = False

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def expired(self) -> bool:
        return self.elapsed >= self.timeout

    def report_once(self, error: Callable[[], RendezvousError]) -> None:
        """Print what is wrong, once, after `report_after` seconds."""
        if not self.reported and self.elapsed >= self.report_after:
            self.reported = True
            self.write(f"shoal: still waiting (up to {self.timeout:g} s). {error()}")


def join_rendezvous(
    env: Env, exchange: AddressExchange, own_addresses: Callable[[], list[str]], timer: RendezvousTimer
) -> Rendezvous:
    """Wait until every rank of the job is connected. RendezvousError names the missing ranks and the reason."""
    if env.rank == 0:
        return _RankZero(env, exchange, own_addresses(), timer).run()
    return _connect(env, exchange, timer)


@dataclass
class _Connection:
    """A connection to rank 0; that of a rank once its hello has arrived."""

    sock: socket.socket
    received: bytes = b""
    hello: dict[str, Any] = field(default_factory=dict)

    @property
    def process(self) -> str:
        return f"process {self.hello['pid']} on {self.hello['node']}"

    def send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):
            self.sock.settimeout(CONNECT_TIMEOUT_S)
            self.sock.sendall(json.dumps(message).encode() + b"\n")


class _RankZero:
    """Rank 0: accepts the connections of the other ranks."""

    def __init__(self, env: Env, exchange: AddressExchange, own_addresses: list[str], timer: RendezvousTimer) -> None:
        self.env, self.exchange, self.timer = env, exchange, timer
        host = "127.0.0.1" if env.node_count == 1 else ""
        self.own_addresses = own_addresses
        self.nonce = secrets.token_hex(8) if exchange.has_nonce else ""
        self.server = exchange.listen(host)
        self.store_listener = open_listener(host)
        self.connected: dict[int, _Connection] = {}
        self.disconnected: dict[int, str] = {}
        """Ranks that were connected and have ended."""

    def run(self) -> Rendezvous:
        port = self.server.getsockname()[1]
        self.exchange.publish([Endpoint(address, port, self.nonce) for address in self.own_addresses])
        with selectors.DefaultSelector() as selector, self.server:
            self.server.setblocking(False)
            selector.register(self.server, selectors.EVENT_READ)
            try:
                while len(self.connected) < self.env.world_size - 1:
                    self._serve(selector)
                    self.timer.report_once(self._missing_ranks_error)
                    if self.timer.expired:
                        raise self._missing_ranks_error()
                return self._finish()
            except RendezvousError as error:
                self.store_listener.close()
                for connection in self.connected.values():
                    connection.send({"abort": [error.what, error.found, error.fix]})
                raise
            finally:
                self.exchange.clear()
                for key in list(selector.get_map().values()):
                    if isinstance(key.data, _Connection):
                        key.data.sock.close()

    def _serve(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(timeout=0.2):
            if key.data is None:
                with suppress(OSError):
                    sock, _ = self.server.accept()
                    sock.setblocking(False)
                    selector.register(sock, selectors.EVENT_READ, _Connection(sock))
            elif not self._receive(key.data):
                selector.unregister(key.fileobj)
                key.data.sock.close()

    def _receive(self, connection: _Connection) -> bool:
        """Read from a connection; False when it is closed or not one of this job."""
        try:
            data = connection.sock.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        rank = connection.hello.get("rank")
        if not data:
            if rank is not None and self.connected.get(rank) is connection:
                del self.connected[rank]
                self.disconnected[rank] = connection.process
            return False
        connection.received += data
        if rank is not None:
            return True
        if b"\n" not in connection.received:
            return len(connection.received) < MAX_LINE_BYTES
        return self._accept_rank(connection)

    def _accept_rank(self, connection: _Connection) -> bool:
        hello = parse_json_object(connection.received.partition(b"\n")[0])
        if hello.get("shoal") != self.env.key or hello.get("nonce") != self.nonce:
            connection.send({"refused": "not this job"})
            return False
        connection.hello = hello
        rank, world_size = int(hello["rank"]), int(hello["world_size"])
        connection.send({"welcome": self.nonce})
        if world_size != self.env.world_size:
            self.connected[rank] = connection
            raise world_sizes_differ(self.env, rank, hello["node"], world_size)
        previous = self.connected.get(rank)
        if rank == 0 or (previous and previous.process != connection.process):
            self.connected[-1] = connection  # the abort is sent to it too
            first = previous.process if previous else f"this process on {self.env.node}"
            raise RendezvousError(
                f"two processes have rank {rank}",
                found=f"{first} and {connection.process}",
                fix="export no RANK in a batch script, and start the script once: each task of srun has a SLURM_PROCID",
            )
        self.connected[rank] = connection
        self.disconnected.pop(rank, None)
        connection.sock.setblocking(False)
        return True

    def _missing_ranks_error(self) -> RendezvousError:
        nodes = {rank: str(connection.hello["node"]) for rank, connection in self.connected.items()}
        reports = self.exchange.failure_reports()
        return missing_ranks(self.env, nodes, self.disconnected, reports, self.timer.elapsed)

    def _finish(self) -> Rendezvous:
        """Send each rank the store's address: the one by which it has reached rank 0."""
        port = self.store_listener.getsockname()[1]
        connections = self.connected.values()
        reached_by = [plain_address(connection.sock.getsockname()[0]) for connection in connections]
        own_address = next(
            (address for address in (*reached_by, *self.own_addresses) if not is_loopback(address)), "127.0.0.1"
        )
        for connection, address in zip(connections, reached_by, strict=True):
            connection.send({"go": [address, port, own_address]})
        return Rendezvous(own_address, port, own_address, self.store_listener)


def _connect(env: Env, exchange: AddressExchange, timer: RendezvousTimer) -> Rendezvous:
    """Any other rank: find rank 0, connect, and wait until all ranks are there."""
    pause = 0.02
    attempts: list[FailedAttempt] = []

    def unreachable() -> RendezvousError:
        return rank_zero_unreachable(env, exchange.description, attempts, timer.elapsed)

    while not timer.expired:
        attempts = []
        for endpoint in exchange.endpoints():
            if any(attempt.address == endpoint.address and attempt.unreachable for attempt in attempts):
                continue
            outcome = _try_endpoint(env, endpoint, timer)
            if isinstance(outcome, Rendezvous):
                return outcome
            attempts.append(outcome)
            timer.report_once(unreachable)
            if timer.expired:
                break
        if attempts and timer.elapsed > timer.report_after / 2:
            exchange.report_failure(env.rank, "; ".join(dict.fromkeys(str(attempt) for attempt in attempts)))
        timer.report_once(unreachable)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)
    raise unreachable()


def _try_endpoint(env: Env, endpoint: Endpoint, timer: RendezvousTimer) -> Rendezvous | FailedAttempt:
    """Connect to one endpoint and wait for rank 0 there. A FailedAttempt gives the reason."""

    def failure(reason: str, *, unreachable: bool = False) -> FailedAttempt:
        return FailedAttempt(endpoint.address, endpoint.port, reason, unreachable)

    hello = {
        "shoal": env.key,
        "nonce": endpoint.nonce,
        "rank": env.rank,
        "world_size": env.world_size,
        "node": env.node,
        "pid": os.getpid(),
    }
    try:
        sock = socket.create_connection((endpoint.address, endpoint.port), timeout=CONNECT_TIMEOUT_S)
    except TimeoutError:
        return failure(f"no answer within {CONNECT_TIMEOUT_S:g} s", unreachable=True)
    except ConnectionRefusedError:
        return failure("connection refused")
    except OSError as error:
        return failure(error.strerror or str(error), unreachable=True)
    with sock, sock.makefile("rb") as lines:
        try:
            sock.sendall(json.dumps(hello).encode() + b"\n")
            reply = parse_json_object(lines.readline(MAX_LINE_BYTES))
            if reply.get("welcome") != endpoint.nonce:
                return failure("another job's port")
            # From here on rank 0 enforces the timeout: it answers, unless it has ended.
            sock.settimeout(timer.timeout + 10)
            message = parse_json_object(lines.readline(MAX_LINE_BYTES))
        except (OSError, ValueError):
            return failure("the connection broke")
        if "abort" in message:
            what, evidence, fix = message["abort"]
            raise RendezvousError(what, found=evidence, fix=fix)
        if "go" not in message:
            return failure("rank 0 closed the connection")
        address, port, cluster_address = message["go"]
        own_address = plain_address(sock.getsockname()[0])
    # A rank on rank 0's node may have connected over loopback: the other nodes know both by rank 0's address.
    return Rendezvous(address, port, cluster_address if is_loopback(own_address) else own_address)
