"""A node whose torchrun cannot reach the first node reports it before torchrun does."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from shoal.remote.runner.launch import connection_problem, watch_rendezvous


@pytest.fixture
def silent() -> Iterator[int]:
    """A port at which nothing comes back, as behind a firewall: its queue is full."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0)).getsockname()[1]
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield int(port)


@pytest.fixture
def closed() -> int:
    """A port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_silent_host_differs_from_a_torchrun_not_started_yet(silent: int, closed: int) -> None:
    assert connection_problem("127.0.0.1", silent) == (
        "no answer within 2 s; a firewall between the nodes is the usual cause"
    )
    assert connection_problem("127.0.0.1", closed) == ""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert connection_problem("127.0.0.1", server.getsockname()[1]) is None


def test_rendezvous_problem_is_printed_once_with_both_ends(
    silent: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(silent))
    monkeypatch.setenv("SLURMD_NODENAME", "gpu02")
    watch_rendezvous(lambda: False, silence=0)
    assert capsys.readouterr().err == (
        f"shoal: torchrun on gpu02 does not reach the one on the first node, at 127.0.0.1 port {silent}:"
        " no answer within 2 s; a firewall between the nodes is the usual cause\n"
    )


def test_nothing_is_printed_once_the_ranks_start(
    silent: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(silent))
    watch_rendezvous(lambda: True, silence=0)
    assert capsys.readouterr().err == ""
