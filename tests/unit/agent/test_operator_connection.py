"""Requests reach the agent whole, however they are cut on their way."""

import os
import threading
from collections.abc import Iterator

import pytest

from shoal.remote.agent.context import OperatorConnection

LARGE = 13_000_000
"""Bytes of a document with Slurm in it."""


@pytest.fixture
def operator() -> Iterator[int]:
    """The operator's end of the agent's standard input."""
    kept, (reads, writes) = os.dup(0), os.pipe()
    os.dup2(reads, 0)
    os.close(reads)
    try:
        yield writes
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_requests_are_read_one_by_one(operator: int) -> None:
    connection = OperatorConnection()
    os.write(operator, b'{"op": "a"}\n{"op": "b"}\n{"op"')
    assert connection.request() == {"op": "a"}
    assert connection.is_open()  # reads on: what it read must not be lost
    os.write(operator, b': "c"}\n')
    assert [connection.request(), connection.request()] == [{"op": "b"}, {"op": "c"}]
    os.close(operator)
    assert connection.request() is None and not connection.is_open()


def test_large_request_arrives_in_small_pieces(operator: int) -> None:
    def send() -> None:
        with os.fdopen(operator, "wb") as pipe:
            pipe.write(b'{"content": "' + b"x" * LARGE + b'"}\n' + b"\n" * LARGE + b'\n{"op": "exit"}\n')

    sender = threading.Thread(target=send)
    sender.start()
    connection = OperatorConnection()
    first = connection.request()
    connection.receive("slurm", LARGE)
    second, end = connection.request(), connection.request()
    sender.join()
    assert first is not None and len(first["content"]) == LARGE
    assert connection.received == {"slurm": b"\n" * LARGE} and (second, end) == ({"op": "exit"}, None)
