"""Which process listens on which port, read from the kernel's tables."""

import os
import socket
import subprocess
import sys

from shoal.remote.agent.network import listens, port_holder


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
        assert process.stdin and process.stdout
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
