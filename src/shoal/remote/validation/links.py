"""TCP between every two nodes, as `shoal bench links` measures it: no torch, no MPI, no program of the nodes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Any, Dict, List

from .. import link_probe
from .place import Rank, emit, rounds

MEETING_TIMEOUT_S = 60.0
PINGS = 20


class Meeting:
    """All ranks exchange values through rank 0. Who does not know the job's token is not let in."""

    def __init__(self, rank: Rank, address: str, port: int, token: str) -> None:
        self._rank = rank
        self._peers: List[Any] = []
        if rank.rank == 0:
            self._listen(port, token)
        else:
            self._peers = [self._connect(address, port)]
            self._write(self._peers[0], [token, rank.rank])

    def exchange(self, value: Any) -> List[Any]:
        """The values of all ranks, in their order."""
        if self._rank.rank == 0:
            values = [value, *(json.loads(peer.readline()) for peer in self._peers)]
            for peer in self._peers:
                self._write(peer, values)
            return values
        self._write(self._peers[0], value)
        result: List[Any] = json.loads(self._peers[0].readline())
        return result

    def close(self) -> None:
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.close()

    def _listen(self, port: int, token: str) -> None:
        by_rank: Dict[int, Any] = {}
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.settimeout(MEETING_TIMEOUT_S)
            server.bind(("", port))
            server.listen(self._rank.world)
            while len(by_rank) < self._rank.world - 1:
                stream = self._stream(server.accept()[0])
                number = self._authenticate(stream, token)
                if number > 0:
                    by_rank[number] = stream
                else:
                    stream.close()
        self._peers = [by_rank[number] for number in sorted(by_rank)]

    @staticmethod
    def _authenticate(stream: Any, token: str) -> int:
        """The rank of who has connected; -1 of a stranger."""
        try:
            greeting, number = json.loads(stream.readline(1024))
            return int(number) if greeting == token else -1
        except (ValueError, TypeError, OSError):
            return -1

    @staticmethod
    def _stream(peer: socket.socket) -> Any:
        with peer:  # the stream keeps it open
            peer.settimeout(MEETING_TIMEOUT_S)
            return peer.makefile("rwb")

    @classmethod
    def _connect(cls, address: str, port: int) -> Any:
        end = time.monotonic() + MEETING_TIMEOUT_S
        while True:
            try:
                return cls._stream(socket.create_connection((address, port), MEETING_TIMEOUT_S))
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    @staticmethod
    def _write(peer: Any, value: Any) -> None:
        peer.write(json.dumps(value).encode() + b"\n")
        peer.flush()


def measure_links(rank: Rank, options: Dict[str, Any]) -> None:
    """The row `links`: the speed from every node to every other, and back."""
    token = os.environ.get("SHOAL_SUBMISSION", "")
    meeting = Meeting(rank, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), token)
    try:
        addresses = dict(entry.split("=", 1) for entry in os.environ["SHOAL_NODE_ADDRS"].split(","))
        # A node whose address is a name: the peers resolve it as the node itself does.
        address = socket.gethostbyname(addresses.get(rank.node, rank.node))
        first, last = options["ports"]
        answer = link_probe.listen({"address": address, "first": first, "last": last, "token": token})
        places = {
            node: (address, port) for node, address, port in meeting.exchange([rank.node, address, answer["port"]])
        }
        for pairs in rounds(list(places)):
            for turn in (0, 1):
                meeting.exchange(None)
                for pair in pairs:
                    if pair[turn] == rank.node:
                        measure_link(rank, pair[1 - turn], places[pair[1 - turn]], token, options["seconds"])
        meeting.exchange(None)  # who leaves earlier ends the program that others measure
    finally:
        meeting.close()


def measure_link(rank: Rank, target: str, place: Any, token: str, seconds: float) -> None:
    request = {"address": place[0], "port": place[1], "token": token, "seconds": seconds, "pings": PINGS}
    try:
        answer = link_probe.measure(request)
    except OSError as error:  # socket.timeout of Python 3.8 is one
        emit(rank, "link-pair", pair=[rank.node, target], problem="to %s: %s" % (target, error.strerror or error))
        return
    emit(rank, "link-pair", pair=[rank.node, target], speed=answer["mbit"] / 8000, rtt_ms=answer["rtt_ms"])
