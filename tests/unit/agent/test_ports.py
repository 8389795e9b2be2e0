"""Which process listens on which port, and which addresses a host can connect to."""

import os
import socket
import subprocess
import sys

from shoal.remote.agent.network import listens, port_holder, reach


def test_process_counts_as_listening_when_connections_are_accepted() -> None:
    waiting = (
        "import socket, sys; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(flush=True); input(); s.listen()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", waiting + "; print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.readline()
        assert not listens(str(process.pid))
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        assert listens(str(process.pid))
        process.stdin.write("\n")
        process.stdin.flush()
    assert not listens(str(process.pid)), "it has ended"


def test_holder_of_a_port_is_named() -> None:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as server:
            server.bind((address, 0))
            server.listen()
            port = server.getsockname()[1]
            assert port_holder(port).endswith(f" (pid {os.getpid()})")
        assert port_holder(port) == ""


def test_listening_port_is_open_and_closed_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
        closed.close()
        here = server.getsockname()[1]
        assert reach([["127.0.0.1", here], ["127.0.0.1", free]], 5.0) == ["open", "refused"]


def test_silent_address_does_not_delay_the_others() -> None:
    with socket.socket() as full, socket.create_server(("127.0.0.1", 0)) as server:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = []
        for _ in range(3):  # a full queue answers no connection
            link = socket.socket()
            link.setblocking(False)
            link.connect_ex(full.getsockname())
            waiting.append(link)
        answers = reach([list(full.getsockname()), list(server.getsockname())], 0.3)
        for link in waiting:
            link.close()
    assert answers == ["silent", "open"]


def test_kernel_error_for_an_address_is_reported() -> None:
    # No host has a broadcast address: the kernel rejects the connection at once.
    assert reach([["255.255.255.255", 22]], 1.0) == ["Network is unreachable"] and reach([], 1.0) == []
