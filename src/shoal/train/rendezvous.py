"""How the ranks meet: rank 0 opens a door, the others come to it, and whoever is missing is named.

Only sockets, no torch: a job that cannot meet says why before anything large happens. Each rank announces itself (rank,
node, world size) and keeps the connection open. When all are there, rank 0 answers with the address of the store. That
address is the one the rank came by, so it is known to work, and the rank's own end of the connection is on the network
that leads to rank 0. Until then nobody is left guessing: after `explain_after` seconds rank 0 says who is missing and
whether their hosts answer, and a rank that does not get to rank 0 says what happened on the way.
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

from shoal.train.boards import Board, Door, open_door
from shoal.train.env import Env
from shoal.train.errors import RendezvousError
from shoal.train.explain import Attempt, duplicate_rank, missing_ranks, rank_zero_not_found, world_sizes_differ
from shoal.train.interfaces import is_loopback, plain

_LONGEST_LINE = 65_536
_KNOCK_SECONDS = 2.0
"""How long one address may take to answer: a host that drops packets must not use up the time for the others."""


@dataclass(frozen=True)
class Meeting:
    """All ranks are here."""

    store_address: str
    store_port: int
    own_address: str
    """This rank's address on the network between the nodes."""
    listener: socket.socket | None = None
    """Rank 0's socket for the store, listening already."""


@dataclass
class Patience:
    """How long a rank waits, and when it begins to explain."""

    timeout: float
    explain_after: float
    say: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr, flush=True))
    started: float = field(default_factory=time.monotonic)
    explained: bool = False

    @property
    def waited(self) -> float:
        return time.monotonic() - self.started

    @property
    def over(self) -> bool:
        return self.waited >= self.timeout

    def explain(self, error: Callable[[], RendezvousError]) -> None:
        """Say what is wrong, once, when it has taken long enough to be wrong."""
        if not self.explained and self.waited >= self.explain_after:
            self.explained = True
            self.say(f"shoal: still waiting (up to {self.timeout:g} s). {error()}")


def meet(env: Env, board: Board, own_addresses: Callable[[], list[str]], patience: Patience) -> Meeting:
    """Wait until every rank of the job is here. RendezvousError says who is not, and why."""
    if env.rank == 0:
        return _Host(env, board, own_addresses(), patience).receive()
    return _come(env, board, patience)


@dataclass
class _Guest:
    """A connection to rank 0's door; a rank once it has said which."""

    sock: socket.socket
    received: bytes = b""
    hello: dict[str, Any] = field(default_factory=dict)

    @property
    def who(self) -> str:
        return f"process {self.hello['pid']} on {self.hello['node']}"

    def tell(self, message: dict[str, Any]) -> None:
        with suppress(OSError):
            self.sock.settimeout(_KNOCK_SECONDS)
            self.sock.sendall(json.dumps(message).encode() + b"\n")


class _Host:
    """Rank 0, at the door."""

    def __init__(self, env: Env, board: Board, own_addresses: list[str], patience: Patience) -> None:
        self.env, self.board, self.patience = env, board, patience
        host = "127.0.0.1" if env.node_count == 1 else ""
        self.own_addresses = own_addresses
        self.nonce = secrets.token_hex(8) if board.carries_nonce else ""
        self.door = board.listen(host)
        self.listener = open_door(host)
        self.guests: dict[int, _Guest] = {}
        self.left: dict[int, str] = {}
        """Ranks that came and went away again."""

    def receive(self) -> Meeting:
        port = self.door.getsockname()[1]
        self.board.publish([Door(address, port, self.nonce) for address in self.own_addresses])
        with selectors.DefaultSelector() as selector, self.door:
            self.door.setblocking(False)
            selector.register(self.door, selectors.EVENT_READ)
            try:
                while len(self.guests) < self.env.world_size - 1:
                    self._serve(selector)
                    self.patience.explain(self._missing)
                    if self.patience.over:
                        raise self._missing()
                return self._go()
            except RendezvousError as error:
                self.listener.close()
                for guest in self.guests.values():
                    guest.tell({"abort": [error.what, error.found, error.fix]})
                raise
            finally:
                self.board.clear()
                for key in list(selector.get_map().values()):
                    if isinstance(key.data, _Guest):
                        key.data.sock.close()

    def _serve(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(timeout=0.2):
            if key.data is None:
                with suppress(OSError):
                    sock, _ = self.door.accept()
                    sock.setblocking(False)
                    selector.register(sock, selectors.EVENT_READ, _Guest(sock))
            elif not self._listen_to(key.data):
                selector.unregister(key.fileobj)
                key.data.sock.close()

    def _listen_to(self, guest: _Guest) -> bool:
        """Read from a connection; False when it is over or does not belong here."""
        try:
            data = guest.sock.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        rank = guest.hello.get("rank")
        if not data:
            if rank is not None and self.guests.get(rank) is guest:
                del self.guests[rank]
                self.left[rank] = guest.who
            return False
        guest.received += data
        if rank is not None:
            return True
        if b"\n" not in guest.received:
            return len(guest.received) < _LONGEST_LINE
        return self._welcome(guest)

    def _welcome(self, guest: _Guest) -> bool:
        hello = _parsed(guest.received.partition(b"\n")[0])
        if hello.get("shoal") != self.env.key or hello.get("nonce") != self.nonce:
            guest.tell({"refused": "not this job"})
            return False
        guest.hello = hello
        rank, world_size = int(hello["rank"]), int(hello["world_size"])
        if world_size != self.env.world_size:
            guest.tell({"welcome": self.nonce})
            self.guests[rank] = guest
            raise world_sizes_differ(self.env, rank, hello["node"], world_size)
        before = self.guests.get(rank)
        if rank == 0 or (before and before.who != guest.who):
            self.guests[-1] = guest  # so that it hears of it too
            guest.tell({"welcome": self.nonce})
            raise duplicate_rank(rank, before.who if before else f"this one on {self.env.node}", guest.who)
        self.guests[rank] = guest
        self.left.pop(rank, None)
        guest.tell({"welcome": self.nonce})
        guest.sock.setblocking(False)
        return True

    def _missing(self) -> RendezvousError:
        here = {rank: str(guest.hello["node"]) for rank, guest in self.guests.items()}
        return missing_ranks(self.env, here, self.left, self.board.notes(), self.patience.waited)

    def _go(self) -> Meeting:
        """Tell each rank where the store is, by the address that it came by."""
        port = self.listener.getsockname()[1]
        came_by = {rank: plain(guest.sock.getsockname()[0]) for rank, guest in self.guests.items()}
        proved = [address for address in came_by.values() if not is_loopback(address)]
        own = (proved or [address for address in self.own_addresses if not is_loopback(address)] or ["127.0.0.1"])[0]
        for rank, guest in self.guests.items():
            guest.tell({"go": [came_by[rank], port, own]})
        return Meeting(own, port, own, self.listener)


def _come(env: Env, board: Board, patience: Patience) -> Meeting:
    """Any other rank: find the door, go in, wait for the word."""
    pause = 0.02
    attempts: list[Attempt] = []

    def lost() -> RendezvousError:
        return rank_zero_not_found(env, board.where, attempts, patience.waited)

    while not patience.over:
        attempts = []
        for door in board.doors():
            if any(attempt.address == door.address and attempt.dead for attempt in attempts):
                continue
            outcome = _knock(env, door, patience)
            if isinstance(outcome, Meeting):
                return outcome
            attempts.append(outcome)
            patience.explain(lost)
            if patience.over:
                break
        if attempts and patience.waited > patience.explain_after / 2:
            board.leave_note(env.rank, "; ".join(dict.fromkeys(str(attempt) for attempt in attempts)))
        patience.explain(lost)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)
    raise lost()


def _knock(env: Env, door: Door, patience: Patience) -> Meeting | Attempt:
    """Try one door. An Attempt says why it was not the one, or what happened behind it."""
    hello = {
        "shoal": env.key,
        "nonce": door.nonce,
        "rank": env.rank,
        "world_size": env.world_size,
        "node": env.node,
        "pid": os.getpid(),
    }
    try:
        sock = socket.create_connection((door.address, door.port), timeout=_KNOCK_SECONDS)
    except TimeoutError:
        return Attempt(door.address, door.port, f"no answer within {_KNOCK_SECONDS:g} s", dead=True)
    except ConnectionRefusedError:
        return Attempt(door.address, door.port, "refused")
    except OSError as error:
        return Attempt(door.address, door.port, error.strerror or str(error), dead=True)
    with sock, sock.makefile("rb") as lines:
        try:
            sock.sendall(json.dumps(hello).encode() + b"\n")
            answer = _parsed(lines.readline(_LONGEST_LINE))
            if answer.get("welcome") != door.nonce:
                return Attempt(door.address, door.port, "another job's port")
            # Rank 0 keeps the time from here on: it will answer, unless it is gone.
            sock.settimeout(patience.timeout + 10)
            word = _parsed(lines.readline(_LONGEST_LINE))
        except (OSError, ValueError):
            return Attempt(door.address, door.port, "the connection broke")
        if "abort" in word:
            what, found, fix = word["abort"]
            raise RendezvousError(what, found=found, fix=fix)
        if "go" not in word:
            return Attempt(door.address, door.port, "rank 0 went away")
        address, port, cluster_address = word["go"]
        own = plain(sock.getsockname()[0])
    # A rank beside rank 0 may have come over loopback: the other nodes know both of them by rank 0's address.
    return Meeting(address, port, cluster_address if is_loopback(own) else own)


def _parsed(line: bytes) -> dict[str, Any]:
    """A line of the other side as a message; empty for anything that is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
