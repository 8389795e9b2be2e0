"""The measuring program, run twice on this machine."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shoal.remote import program_text
from shoal.remote.link_probe import authenticate

TOKEN = "0123456789abcdef"


class Player:
    """A running program, spoken to as `shoal bench links` does."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", program_text("link_probe")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> Any:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def listen(self, address: str = "127.0.0.1", first: int = 39000, last: int = 39999) -> Any:
        return self.ask(op="listen", address=address, first=first, last=last, token=TOKEN)

    def measure(self, port: int, address: str = "127.0.0.1", token: str = TOKEN, **more: int) -> Any:
        return self.ask(op="measure", address=address, port=port, token=token, seconds=0.2, pings=3, **more)

    def close(self) -> int:
        self.process.stdin.close()
        status = self.process.wait(timeout=60)
        self.process.stdout.close()
        return status


@pytest.fixture
def players() -> Iterator[tuple[Player, Player]]:
    pair = Player(), Player()
    yield pair
    for player in pair:
        player.process.kill()
        if player.process.stdin and not player.process.stdin.closed:
            player.close()


def test_answer_reaches_a_peer_that_still_sends(players: tuple[Player, Player]) -> None:
    with socket.create_connection(("127.0.0.1", players[0].listen()["port"]), timeout=10) as peer:
        peer.sendall(TOKEN.encode() + struct.pack("!Id", 0, 0.01))
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            peer.sendall(bytes(1 << 16))
        counted, seconds = struct.unpack("!Qd", peer.recv(16, socket.MSG_WAITALL))
        assert counted > 0 and seconds > 0


def test_link_has_a_round_trip_time_and_a_bandwidth(players: tuple[Player, Player]) -> None:
    one, other = players
    port = one.listen()["port"]
    for _ in range(2):  # it serves again
        found = other.measure(port)
        assert found["rtt_ms"] > 0 and found["mbit"] > 1, found


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_program_listens_on_ipv6(players: tuple[Player, Player]) -> None:
    one, other = players
    assert other.measure(one.listen(address="::1")["port"], address="::1")["mbit"] > 1


def test_taken_port_is_skipped(players: tuple[Player, Player]) -> None:
    one, other = players
    first = one.listen()["port"]
    assert other.listen(last=first)["port"] < first


def test_listen_error_is_reported(players: tuple[Player, Player]) -> None:
    answer = players[0].listen(address="192.0.2.1", first=39000, last=39001)
    assert answer == {"problem": "Cannot assign requested address"}


def test_refused_connection_and_wrong_token_are_reported(players: tuple[Player, Player]) -> None:
    one, other = players
    with socket.create_server(("127.0.0.1", 0)) as free:
        unused = free.getsockname()[1]
    assert other.measure(unused) == {"problem": "Connection refused"}
    port = one.listen()["port"]
    assert "problem" in other.measure(port, token=TOKEN[::-1]) and other.measure(port)["mbit"] > 1


def test_parallel_connections_are_measured_as_a_single_rate(players: tuple[Player, Player]) -> None:
    one, other = players
    found = other.measure(one.listen()["port"], many=4)
    assert found["mbit"] > 1 and found["mbit_many"] > 1


def test_starved_parallel_connection_does_not_affect_the_result(players: tuple[Player, Player]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(6) as pool:

        def serve() -> None:
            for number in range(5):
                peer, _ = server.accept()
                if number == 2:
                    peer.close()
                else:
                    pool.submit(authenticate, peer, TOKEN.encode())

        server.settimeout(30)
        pool.submit(serve)
        found = players[0].measure(server.getsockname()[1], many=4)
    assert found["mbit"] > 1 and found["mbit_many"] > 1, found


def test_program_ends_with_its_input_during_a_measurement(players: tuple[Player, Player]) -> None:
    one, other = players
    port = one.listen()["port"]
    request = {"op": "measure", "address": "127.0.0.1", "port": port, "token": TOKEN, "seconds": 600, "pings": 1}
    other.process.stdin.write(json.dumps(request) + "\n")
    assert other.close() == 0 and one.close() == 0
