"""Which addresses a host can connect to, with real sockets."""

import socket

from shoal.remote.agent.network import reach


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
