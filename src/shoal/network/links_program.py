"""What measures links from a host: one program of the standard library, for Python 3.8 and later.

It reads requests from its standard input, one JSON object a line, answers each with one, and ends with its input:

    {"op": "listen", "address", "first", "last", "token"}              {"port"} or {"problem"}
    {"op": "measure", "address", "port", "token", "seconds", "pings", "many"}
                                                                       {"rtt_ms", "mbit", "mbit_many"} or {"problem"}
"""

# Hosts may have a Python as old as 3.8, where a time-out of a socket is no TimeoutError yet.
# ruff: noqa: UP031, UP041, SIM105
from __future__ import annotations

import json
import os
import queue
import select
import socket
import struct
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # as typing has it, which takes longer to import than all the rest
    from typing import Any

PATIENCE = 5.0
"""Seconds until a connection must stand, and until the other side must have said something."""
CHUNK = 1 << 20
WARM_UP = 0.2
"""The part of the time at the beginning that does not count: TCP has to find out how fast it may be."""


def main() -> None:
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=read, args=(requests,), daemon=True).start()
    while True:
        request = json.loads(requests.get())
        try:
            answer = listen(request) if request.pop("op") == "listen" else measure(request)
        except socket.timeout:
            answer = {"problem": "no answer within %g s" % PATIENCE}
        except OSError as error:
            answer = {"problem": error.strerror or str(error)}
        print(json.dumps(answer), flush=True)


def read(requests: queue.Queue[str]) -> None:
    """Take requests until the operator goes. Then all ends, also what waits for a peer."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def listen(request: dict[str, Any]) -> dict[str, Any]:
    """Take connections on the first free port of the range, on this address alone."""
    family = socket.AF_INET6 if ":" in request["address"] else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for port in range(request["last"], request["first"] - 1, -1):
        try:
            server.bind((request["address"], port))
        except OSError as error:
            problem = error
            continue
        server.listen(64)
        token = request["token"].encode()
        threading.Thread(target=serve, args=(server, token), daemon=True).start()
        return {"port": port}
    raise problem


def serve(server: socket.socket, token: bytes) -> None:
    """Answer those who know the token, all at once: a pair may use many connections."""
    while True:
        peer, _ = server.accept()
        threading.Thread(target=greet, args=(peer, token), daemon=True).start()


def greet(peer: socket.socket, token: bytes) -> None:
    with peer:
        try:
            peer.settimeout(PATIENCE)
            if exactly(peer, len(token)) == token:
                answer(peer)
        except OSError:
            pass  # it says so at its own end


def answer(peer: socket.socket) -> None:
    """Send each ping back; then take what comes for as long as the other side said, and tell how fast it came."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pings, seconds = struct.unpack("!Id", exactly(peer, 12))
    for _ in range(pings):
        peer.sendall(exactly(peer, 1))
    room = bytearray(CHUNK)
    if not peer.recv_into(room):
        return
    begin = since = time.monotonic()
    counted = 0
    while True:
        size = peer.recv_into(room)
        now = time.monotonic()
        if not size:
            return
        if now - begin < seconds * WARM_UP:
            since = now  # what comes from here on came after it, however long it takes
            continue
        counted += size
        if now - begin >= seconds:
            peer.sendall(struct.pack("!Qd", counted, now - since))
            return


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The round trip in milliseconds, and how many million bits a second go there over one connection and over many."""
    trips, alone = flow(request, request["pings"])
    found = {"rtt_ms": sorted(trips)[len(trips) // 2] * 1000, "mbit": alone}
    if request.get("many"):
        found["mbit_many"] = together(request, request["many"])
    return found


def together(request: dict[str, Any], many: int) -> float:
    """What goes there over many connections at once. On a slow link others may starve one: it carries nothing."""
    rates: list[float] = []
    problems: list[OSError] = []

    def one() -> None:
        try:
            rates.append(flow(request, 0)[1])
        except OSError as error:
            problems.append(error)

    threads = [threading.Thread(target=one, daemon=True) for _ in range(many)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not rates:
        raise problems[0]
    return sum(rates)


def flow(request: dict[str, Any], pings: int) -> tuple[list[float], float]:
    """One connection: the round trips in seconds, then how many million bits a second went there."""
    with socket.create_connection((request["address"], request["port"]), PATIENCE) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(request["token"].encode() + struct.pack("!Id", pings, request["seconds"]))
        trips = []
        for _ in range(pings):
            begin = time.perf_counter()
            peer.sendall(b".")
            exactly(peer, 1)
            trips.append(time.perf_counter() - begin)
        size, seconds = pour(peer, request["seconds"])
        # What still waits to be sent is thrown away: the next pair must not meet it.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return trips, size * 8 / seconds / 1e6


def pour(peer: socket.socket, seconds: float) -> tuple[int, float]:
    """Send for as long as the other side listens; what it counted, and in which time."""
    data = memoryview(bytes(CHUNK))
    peer.setblocking(False)
    end = time.monotonic() + seconds + 2 * PATIENCE
    while True:
        left = end - time.monotonic()
        readable, writable, _ = select.select([peer], [peer], [], max(left, 0))
        if readable:
            peer.settimeout(PATIENCE)
            size, took = struct.unpack("!Qd", exactly(peer, 16))
            return size, took
        if left <= 0:
            raise socket.timeout
        if writable:
            try:
                peer.send(data)
            except BlockingIOError:
                pass


def exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise OSError("the other side closed the connection")
        data += part
    return data


if __name__ == "__main__":
    main()
