"""Measures links from a host: one program of the standard library, for Python 3.8 and later.

It reads requests from its standard input, one JSON object a line, answers each with one, and ends with its input:

    {"op": "listen", "address", "first", "last", "token"}              {"port"} or {"problem"}
    {"op": "measure", "address", "port", "token", "seconds", "pings", "many"}
                                                                       {"rtt_ms", "mbit", "mbit_many"} or {"problem"}
"""

# Hosts may have a Python as old as 3.8, where a time-out of a socket is no TimeoutError yet.
from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
from typing import Any

PEER_TIMEOUT_S = 5.0
"""For a connection, and for a reply of the peer."""
CHUNK_BYTES = 1 << 20
WARM_UP_FRACTION = 0.2
"""The start of a measurement does not count: TCP is still increasing its window."""


def main() -> None:
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=read, args=(lines,), daemon=True).start()
    while True:
        request = json.loads(lines.get())
        try:
            answer = listen(request) if request.pop("op") == "listen" else measure(request)
        except socket.timeout:
            answer = {"problem": "no answer within %g s" % PEER_TIMEOUT_S}
        except OSError as error:
            answer = {"problem": error.strerror or str(error)}
        print(json.dumps(answer), flush=True)


def read(lines: queue.Queue[str]) -> None:
    """Read requests until the operator disconnects. Then end at once, even while waiting for a peer."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def listen(request: dict[str, Any]) -> dict[str, Any]:
    """Accept connections on a free port of the range, on this address only."""
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
    """Serve peers that know the token, concurrently: a pair may use many connections."""
    while True:
        peer, _ = server.accept()
        threading.Thread(target=authenticate, args=(peer, token), daemon=True).start()


def authenticate(peer: socket.socket, token: bytes) -> None:
    with peer, contextlib.suppress(OSError):  # the peer reports it
        peer.settimeout(PEER_TIMEOUT_S)
        if receive_exactly(peer, len(token)) == token:
            serve_peer(peer)


def serve_peer(peer: socket.socket) -> None:
    """Echo each ping; then receive for as long as the peer asked, and report the bytes and the time."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pings, seconds = struct.unpack("!Id", receive_exactly(peer, 12))
    for _ in range(pings):
        peer.sendall(receive_exactly(peer, 1))
    buffer = bytearray(CHUNK_BYTES)
    if not peer.recv_into(buffer):
        return
    begin = since = time.monotonic()
    counted = 0
    while True:
        size = peer.recv_into(buffer)
        now = time.monotonic()
        if not size:
            return
        if now - begin < seconds * WARM_UP_FRACTION:
            since = now  # what arrives from here on counts
            continue
        counted += size
        if now - begin >= seconds:
            peer.sendall(struct.pack("!Qd", counted, now - since))
            while peer.recv_into(buffer):  # until the peer ends: one that still sends would lose the answer
                pass
            return


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The round trip in milliseconds, and the bandwidth in Mbit/s over one connection and over many."""
    trips, rate = measure_connection(request, request["pings"])
    result = {"rtt_ms": sorted(trips)[len(trips) // 2] * 1000, "mbit": rate}
    if request.get("many"):
        result["mbit_many"] = measure_parallel(request, request["many"])
    return result


def measure_parallel(request: dict[str, Any], many: int) -> float:
    """The bandwidth over many connections at once. On a slow link some may starve: they count as nothing."""
    rates: list[float] = []
    problems: list[OSError] = []

    def measure_one() -> None:
        try:
            rates.append(measure_connection(request, 0)[1])
        except OSError as error:
            problems.append(error)

    threads = [threading.Thread(target=measure_one, daemon=True) for _ in range(many)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not rates:
        raise problems[0]
    return sum(rates)


def measure_connection(request: dict[str, Any], pings: int) -> tuple[list[float], float]:
    """Over one connection: the round trips in seconds, and the bandwidth in Mbit/s."""
    with socket.create_connection((request["address"], request["port"]), PEER_TIMEOUT_S) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(request["token"].encode() + struct.pack("!Id", pings, request["seconds"]))
        trips = []
        for _ in range(pings):
            begin = time.perf_counter()
            peer.sendall(b".")
            receive_exactly(peer, 1)
            trips.append(time.perf_counter() - begin)
        size, seconds = send_stream(peer, request["seconds"])
        # Discard unsent data: it must not disturb the next pair.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return trips, size * 8 / seconds / 1e6


def send_stream(peer: socket.socket, seconds: float) -> tuple[int, float]:
    """Send for as long as the peer receives; the bytes and seconds that it counted."""
    data = memoryview(bytes(CHUNK_BYTES))
    peer.setblocking(False)
    end = time.monotonic() + seconds + 2 * PEER_TIMEOUT_S
    while True:
        left = end - time.monotonic()
        readable, writable, _ = select.select([peer], [peer], [], max(left, 0))
        if readable:
            peer.settimeout(PEER_TIMEOUT_S)
            counted: tuple[int, float] = struct.unpack("!Qd", receive_exactly(peer, 16))
            return counted
        if left <= 0:
            raise socket.timeout
        if writable:
            with contextlib.suppress(BlockingIOError):
                peer.send(data)


def receive_exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise OSError("the peer closed the connection")
        data += part
    return data


if __name__ == "__main__":
    main()
