"""How the other ranks learn where rank 0 listens, without a port agreed on before.

Not torch's MASTER_PORT: where another program has that port, rank 0 fails at once, and the other ranks wait until that
program ends: 48 s with a timeout of 20 s (torch 2.13).

    FileExchange     a file in a directory that all nodes see (SHOAL_STORE_DIR, which `shoal run` sets)
    StoreExchange    the store of torchrun's agents, which run before the ranks
    PortExchange     neither: a list of ports derived from the job's key. Rank 0 takes the first free one, the others
                     try each; a port of another job answers that it is not this job

With the first two the kernel chooses a free port, so nothing can collide. With the third a collision costs one attempt.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from shoal.train.env import Env
from shoal.train.file_io import replace_file
from shoal.train.interfaces import is_loopback, local_addresses, source_address

PORT_RANGE = range(20_000, 32_768)
"""Below the ports that the kernel gives to outgoing connections."""
PORT_CANDIDATES = 32
"""How many ports of the list rank 0 tries."""
ROUTED_PEERS = 4
"""Other nodes whose routes are looked up; a few are enough to find the network between the nodes."""


class Endpoint(NamedTuple):
    """An address and port where rank 0 may be listening."""

    address: str
    port: int
    nonce: str = ""
    """Proves that the process that answers is the one that published the endpoint."""


class AddressExchange:
    """Where rank 0 publishes its address, and where a rank that cannot connect reports why."""

    description: str
    """The place, for an error message."""
    has_nonce = True
    """Whether only ranks of this job can read what is published, so that it may hold a nonce."""

    def listen(self, host: str) -> socket.socket:
        """Rank 0's listening socket, on a port that the other ranks can find."""
        return open_listener(host)

    def publish(self, endpoints: Sequence[Endpoint]) -> None:
        """Publish where rank 0 listens. Replaces what an earlier start left."""

    def endpoints(self) -> list[Endpoint]:
        """Where to try to reach rank 0 now; empty until it has published."""
        raise NotImplementedError

    def report_failure(self, rank: int, text: str) -> None:
        """Let rank 0 know why this rank cannot connect."""

    def failure_reports(self) -> dict[int, str]:
        """The reports of ranks that cannot connect."""
        return {}

    def clear(self) -> None:
        """Remove what was published, once all ranks are connected."""


def open_listener(host: str, port: int = 0) -> socket.socket:
    """A listening socket; for all addresses ("") also over IPv6 where the kernel has it."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server((host, port), backlog=1024)


class FileExchange(AddressExchange):
    """A file in a directory that all nodes of the job see."""

    def __init__(self, directory: Path, key: str) -> None:
        self.description = f"the directory {directory}"
        self._directory = directory
        self._name = "rendezvous-" + _digest(key)

    def publish(self, endpoints: Sequence[Endpoint]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._write(self._name, json.dumps(endpoints))

    def endpoints(self) -> list[Endpoint]:
        try:
            return _from_json((self._directory / self._name).read_text())
        except (OSError, ValueError):
            self._refresh_nfs()
            return []

    def report_failure(self, rank: int, text: str) -> None:
        with suppress(OSError):
            self._write(f"{self._name}.note{rank}", text)

    def failure_reports(self) -> dict[int, str]:
        reports: dict[int, str] = {}
        for path in self._directory.glob(f"{self._name}.note*"):
            with suppress(OSError, ValueError):
                reports[int(path.name.rpartition("note")[2])] = path.read_text()
        return reports

    def clear(self) -> None:
        for path in (self._directory / self._name, *self._directory.glob(f"{self._name}.note*")):
            path.unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> None:
        """Readable by this user only: a process that knows the nonce can join the job."""
        replace_file(self._directory / name, text.encode(), mode=0o600)

    def _refresh_nfs(self) -> None:
        """NFS caches for half a minute that a file is missing. A change by this client makes it ask the server."""
        probe = self._directory / f".look.{self._name}.{socket.gethostname()}.{os.getpid()}"
        with suppress(OSError):
            probe.touch()
            probe.unlink()


class StoreExchange(AddressExchange):
    """A key-value store that exists before the ranks: that of torchrun's agents."""

    def __init__(self, store: Any, key: str, world_size: int) -> None:
        self.description = "torchrun's store"
        self._store = store
        self._key = "shoal/" + _digest(key)
        self._ranks = range(world_size)

    def publish(self, endpoints: Sequence[Endpoint]) -> None:
        self._store.set(self._key, json.dumps(endpoints))

    def endpoints(self) -> list[Endpoint]:
        return _from_json(self._store.get(self._key) or "[]") if self._store.check([self._key]) else []

    def report_failure(self, rank: int, text: str) -> None:
        self._store.set(f"{self._key}/note{rank}", text)

    def failure_reports(self) -> dict[int, str]:
        keys = {rank: f"{self._key}/note{rank}" for rank in self._ranks}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def clear(self) -> None:
        self._store.set(self._key, "[]")


class PortExchange(AddressExchange):
    """Nothing is shared: both sides derive the same list of ports from the job's key."""

    has_nonce = False

    def __init__(self, addresses: Callable[[], Sequence[str]], key: str, first: int = 0) -> None:
        self._addresses = addresses
        self._ports = ([first] if first else []) + candidate_ports(key)
        self.description = f"its ports {self._ports[0]}, {self._ports[1]}, ..."

    def listen(self, host: str) -> socket.socket:
        for port in self._ports:
            with suppress(OSError):
                return open_listener(host, port)
        raise OSError(f"none of the ports {self._ports} is free")

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(address, port) for address in self._addresses() for port in self._ports]


def candidate_ports(key: str) -> list[int]:
    """The ports of a job: the same on every node, and different for every job."""
    digests = (hashlib.sha256(f"{key}#{turn}".encode()).digest() for turn in range(PORT_CANDIDATES))
    return list(dict.fromkeys(PORT_RANGE[int.from_bytes(digest[:4], "big") % len(PORT_RANGE)] for digest in digests))


def own_addresses(env: Env, interface: str = "") -> list[str]:
    """Addresses by which other nodes may reach this host, best first.

    SHOAL_NODE_ADDRS, the named interface, the routes to other nodes, then all others: those are harmless, since a
    process that answers there without the nonce is not taken for rank 0.
    """
    if env.node_count == 1:
        return ["127.0.0.1"]
    local = [(name, address) for name, address in local_addresses() if not address.startswith("fe80:")]
    candidates = env.addresses_of(env.node) if env.node in env.addresses else []
    candidates += [address for name, address in local if name == interface]
    peers = [node for node in env.nodes if node != env.node][:ROUTED_PEERS]
    candidates += [source_address(address) for node in peers for address in env.addresses_of(node)]
    candidates += [address for _, address in local if address == env.master_address]
    candidates += [address for _, address in local]
    return [address for address in dict.fromkeys(candidates) if address and not is_loopback(address)]


def master_addresses(env: Env) -> list[str]:
    """Where to look for rank 0 when only its name is known. On its own node loopback works too."""
    if env.node_count == 1:
        return ["127.0.0.1"]
    addresses = env.addresses_of(env.master_address)
    return [*addresses, "127.0.0.1"] if env.node == env.node_of(0) else addresses


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:20]


def _from_json(text: str | bytes) -> list[Endpoint]:
    return [Endpoint(*fields) for fields in json.loads(text)]
