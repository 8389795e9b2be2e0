"""What a broken or hostile tracking server may answer, over real sockets."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.cases import cases

from shoal.train.tracking.mlflow_client import MlflowClient, RequestRejected, ServerUnavailable

MiB = 1024 * 1024
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"

Chunks = Callable[[], Iterator[bytes]]


@contextlib.contextmanager
def sending(chunks: Chunks) -> Iterator[str]:
    """A server that answers one request with these chunks, until the client hangs up."""

    def answer() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            while b"\r\n\r\n" not in connection.recv(65536):
                pass
            for chunk in chunks():
                connection.sendall(chunk)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            thread.join()


def whole(body: bytes, status: str = "200 OK") -> Chunks:
    head = HEAD.replace(b"200 OK", status.encode()) + f"Content-Length: {len(body)}\r\n\r\n".encode()
    return lambda: iter([head + body])


def unavailable(chunks: Chunks, timeout: float = 30.0) -> str:
    with sending(chunks) as uri:
        with pytest.raises(ServerUnavailable) as caught:
            MlflowClient(uri, {}, timeout).get("runs/get", run_id="r1")
        return str(caught.value).removeprefix(f"{uri}: ")


@cases("status", "200 OK", "500 Internal Server Error")
def test_endless_body_ends_at_the_limit(status: str) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield HEAD.replace(b"200 OK", status.encode()) + b'\r\n{"run": "'
        while sent < 2500 * MiB:
            sent += MiB
            yield b"x" * MiB

    assert unavailable(endless) == "the answer is longer than 8 MiB: this address is not an MLflow server"
    assert sent < 100 * MiB, "the client hangs up"


def test_a_byte_now_and_then_ends_at_the_time_limit() -> None:
    def told(status: str, where: str) -> str:
        answer = HEAD.replace(b"200 OK", status.encode()) + b"Content-Length: 99\r\n\r\n" + b'{"run": {}}'.ljust(99)
        begin = len(answer) - 99 if where == "body" else 5

        def slow() -> Iterator[bytes]:
            yield answer[:begin]
            for place in range(begin, len(answer)):
                time.sleep(0.05)
                yield answer[place : place + 1]

        return unavailable(slow, timeout=1.0)

    places = list(itertools.product(("200 OK", "404 Not Found"), ("head", "body")))
    with ThreadPoolExecutor() as pool:  # a limit of seconds, so that a busy machine sends each byte in time
        answers = set(pool.map(told, *zip(*places, strict=True)))
    assert answers == {"no complete answer within 3 s: this address is not an MLflow server"}


@cases("body", b'{"step": NaN}', b"[" * 100_000 + b"]" * 100_000, b"<html>")
def test_what_is_no_json_is_the_servers_error(body: bytes) -> None:
    assert unavailable(whole(body)) == "the answer is not JSON: this address is not an MLflow server"
    assert unavailable(whole(body, "500 Error")) == "the server answers 500 Error"


def test_ordinary_answers_are_read() -> None:
    with sending(whole(b'{"run": {"info": 1}}')) as uri:
        assert MlflowClient(uri, {}).get("runs/get") == {"run": {"info": 1}}
    with sending(whole(b"")) as uri:
        assert MlflowClient(uri, {}).post("runs/update", {}) == {}
    refused = whole(b'{"error_code": "INVALID_PARAMETER_VALUE", "message": "no"}', "400 Bad Request")
    with sending(refused) as uri, pytest.raises(RequestRejected, match="INVALID_PARAMETER_VALUE: no"):
        MlflowClient(uri, {}).post("runs/update", {})


def test_redirect_is_not_followed() -> None:
    elsewhere = HEAD.replace(b"200 OK", b"302 Found") + b"Location: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"
    assert unavailable(lambda: iter([elsewhere])) == "the server answers 302 Found"
