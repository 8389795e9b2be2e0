"""How the other ranks learn where rank 0 listens, without a port that everybody agreed on before.

    FileBoard     a file in a directory all nodes see (SHOAL_STORE_DIR, which `shoal run` sets)
    StoreBoard    the store of torchrun's agents, which are there before the ranks
    PortBoard     neither: a row of ports worked out from the job's name. Rank 0 takes the first free one, the others
                  knock at each; a door that belongs to another job says so

With the first two the kernel chooses a free port, so nothing can collide. With the third a collision costs one knock.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PORTS = range(20_000, 32_768)
"""Below the ports the kernel gives to outgoing connections: a door does not meet those."""
KNOCKS = 32
"""How many ports of the row rank 0 tries. All taken by others: not on a machine that works."""


@dataclass(frozen=True)
class Door:
    """A place where rank 0 may be listening."""

    address: str
    port: int
    nonce: str = ""
    """Proves that the one who answers is the one who wrote the notice."""


class Board(Protocol):
    """Where rank 0 pins up its address, and where a rank that cannot get there leaves a note."""

    where: str
    """The board, in words for an error."""
    carries_nonce: bool
    """Whether a notice reaches this job's ranks only, so that a secret word can be on it."""

    def listen(self, host: str) -> socket.socket:
        """Rank 0's door: a listening socket on a port the others can find."""

    def publish(self, doors: Sequence[Door]) -> None:
        """Say where rank 0 listens. Replaces what an earlier start left."""

    def doors(self) -> list[Door]:
        """Where to look for rank 0 just now; empty while it has said nothing."""

    def leave_note(self, rank: int, text: str) -> None:
        """Tell rank 0 why this rank cannot come."""

    def notes(self) -> dict[int, str]:
        """What the ranks that cannot come have left."""

    def clear(self) -> None:
        """Everyone has come: take the notice away."""


def open_door(host: str, port: int = 0) -> socket.socket:
    """A listening socket; for every host ("") also over IPv6 where the kernel has it."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server((host, port), backlog=1024)


class FileBoard:
    """A file in a directory that all nodes of the job see."""

    carries_nonce = True

    def __init__(self, directory: Path, key: str) -> None:
        self.where = f"the directory {directory}"
        self._directory = directory
        self._name = "rendezvous-" + hashlib.sha256(key.encode()).hexdigest()[:20]

    def listen(self, host: str) -> socket.socket:
        return open_door(host)

    def publish(self, doors: Sequence[Door]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._write(self._name, json.dumps([[door.address, door.port, door.nonce] for door in doors]))

    def doors(self) -> list[Door]:
        try:
            return [Door(*door) for door in json.loads((self._directory / self._name).read_text())]
        except (OSError, ValueError):
            self._look_again()
            return []

    def leave_note(self, rank: int, text: str) -> None:
        with suppress(OSError):
            self._write(f"{self._name}.note{rank}", text)

    def notes(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for path in self._directory.glob(f"{self._name}.note*"):
            with suppress(OSError, ValueError):
                found[int(path.name.rpartition("note")[2])] = path.read_text()
        return found

    def clear(self) -> None:
        for path in (self._directory / self._name, *self._directory.glob(f"{self._name}.note*")):
            path.unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> None:
        """Whole or not at all, and for this user only: whoever reads the nonce may join the job."""
        draft = self._directory / f".{name}.{socket.gethostname()}.{os.getpid()}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as sink:
            sink.write(text)
        draft.replace(self._directory / name)

    def _look_again(self) -> None:
        """NFS remembers for half a minute that a file is not there. A change of our own makes it ask again."""
        probe = self._directory / f".look.{self._name}.{socket.gethostname()}.{os.getpid()}"
        with suppress(OSError):
            probe.touch()
            probe.unlink()


class StoreBoard:
    """A key-value store that was there before the ranks: the one of torchrun's agents."""

    carries_nonce = True

    def __init__(self, store: Any, key: str, world_size: int) -> None:
        self.where = "torchrun's store"
        self._store = store
        self._key = "shoal/" + hashlib.sha256(key.encode()).hexdigest()[:20]
        self._ranks = range(world_size)

    def listen(self, host: str) -> socket.socket:
        return open_door(host)

    def publish(self, doors: Sequence[Door]) -> None:
        self._store.set(self._key, json.dumps([[door.address, door.port, door.nonce] for door in doors]))

    def doors(self) -> list[Door]:
        if not self._store.check([self._key]):
            return []
        return [Door(*door) for door in json.loads(self._store.get(self._key) or "[]")]

    def leave_note(self, rank: int, text: str) -> None:
        self._store.set(f"{self._key}/note{rank}", text)

    def notes(self) -> dict[int, str]:
        keys = {rank: f"{self._key}/note{rank}" for rank in self._ranks}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def clear(self) -> None:
        self._store.set(self._key, "[]")


class PortBoard:
    """Nothing is shared: both sides work out the same row of ports from the job's name."""

    carries_nonce = False

    def __init__(self, addresses: Callable[[], Sequence[str]], key: str, first: int = 0) -> None:
        self._addresses = addresses
        self._ports = ([first] if first else []) + ports_of(key)
        self.where = f"its ports {self._ports[0]}, {self._ports[1]}, ..."

    def listen(self, host: str) -> socket.socket:
        for port in self._ports:
            with suppress(OSError):
                return open_door(host, port)
        raise OSError(f"none of the ports {self._ports} is free")

    def publish(self, doors: Sequence[Door]) -> None:
        pass

    def doors(self) -> list[Door]:
        return [Door(address, port) for address in self._addresses() for port in self._ports]

    def leave_note(self, rank: int, text: str) -> None:
        pass

    def notes(self) -> dict[int, str]:
        return {}

    def clear(self) -> None:
        pass


def ports_of(key: str) -> list[int]:
    """The row of ports of a job: the same wherever it is worked out, another one for every job."""
    digests = (hashlib.sha256(f"{key}#{turn}".encode()).digest() for turn in range(KNOCKS))
    return list(dict.fromkeys(PORTS[int.from_bytes(digest[:4], "big") % len(PORTS)] for digest in digests))
