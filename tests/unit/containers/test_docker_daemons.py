"""The guard's service: who may ask it, and what the end of a job does to the Docker daemon of its user."""

import contextlib
import http.client
import io
import json
import os
import pwd
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.remote.docker_guard import main
from shoal.remote.docker_guard.caller import Caller, Rejection
from shoal.remote.docker_guard.main import Daemons, Guard, GuardServer, UserDaemon

GROUP = "/slurm_n1/uid_5/job_7"

SYSTEMCTL = """\
#!/bin/sh
cd "$(dirname "$0")"
case $1 in
    -q) test -e active ;;
    start) touch active ;;
    stop) rm active; echo stopped >> log ;;
esac
"""


class FakeDocker(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A daemon with containers, by id, each with its cgroup."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        self.containers: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.networks = 3
        self.posted: list[str] = []
        """The paths of requests that make or start something."""
        self.answers: dict[str, int] = {}
        """Statuses of requests that fail, by method and path."""
        super().__init__(str(path), FakeDockerRequest)


class FakeDockerRequest(BaseHTTPRequestHandler):
    server: FakeDocker

    def do_GET(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.posted.append(self.path)
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        path, containers = self.path.partition("?")[0].removeprefix("/v1.41"), self.server.containers
        status, body = self.server.answers.get(f"{self.command} {path}", 200), b""
        named = path.split("/")[2:3] or [""]
        identity = self.server.names.get(named[0], named[0])
        if status == 200 and path == "/containers/json":
            body = json.dumps([{"Id": name} for name in containers]).encode()
        elif status == 200 and path == "/networks":
            body = json.dumps([{}] * self.server.networks).encode()
        elif status == 200 and path.startswith("/networks/"):
            body = json.dumps({"Id": identity, "Driver": "bridge"}).encode()
        elif status == 200 and identity not in containers:
            status = 404
        elif status == 200 and self.command == "DELETE":
            status = 204
            del containers[identity]
        elif status == 200:
            body = json.dumps({"Id": identity, "HostConfig": {"CgroupParent": containers[identity]}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDocker]:
    (tmp_path / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(main, "REMOVAL_TIMEOUT_S", 1)
    (tmp_path / "ann").mkdir()
    with FakeDocker(tmp_path / "ann/docker.sock") as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def daemon(docker: FakeDocker, tmp_path: Path) -> UserDaemon:
    return Daemons(str(tmp_path)).of("ann")


def stops(tmp_path: Path) -> int:
    return len((tmp_path / "log").read_text().split()) if (tmp_path / "log").exists() else 0


@cases("changes", True, False, ids=["a build", "a push or a terminal"])
def test_request_of_another_job_keeps_the_daemon(daemon: UserDaemon, tmp_path: Path, changes: bool) -> None:
    with daemon.request("8", changes):
        daemon.end_job("7")
        assert stops(tmp_path) == 0
    daemon.end_job("8")
    assert stops(tmp_path) == 1


def test_terminal_of_the_job_itself_keeps_nothing(daemon: UserDaemon, tmp_path: Path) -> None:
    with daemon.request("7", False):
        daemon.end_job("7")
    assert stops(tmp_path) == 1


def test_end_of_a_job_removes_its_containers_alone(daemon: UserDaemon, docker: FakeDocker, tmp_path: Path) -> None:
    with daemon.request("8", True):
        docker.containers = {"a": "/slurm_n1/uid_5/job_7", "b": "/shoal-docker/job_7", "c": "/slurm_n1/uid_5/job_17"}
    daemon.end_job("7")
    assert [*docker.containers] == ["c"] and stops(tmp_path) == 0
    daemon.end_job("17")
    assert not docker.containers and stops(tmp_path) == 1


@cases(
    "request_line, status, message",
    ("DELETE /containers/a", 500, "Docker of ann does not remove 1 containers of /job_7$"),
    ("DELETE /containers/a", 409, "Docker of ann does not remove 1 containers of /job_7$"),
    ("GET /containers/json", 500, "GET /containers/json?all=1: Docker answers 500"),
    ("GET /containers/json", 400, "Docker of ann does not list its containers"),
    ("GET /containers/a/json", 500, "GET /containers/a/json: Docker answers 500"),
)
def test_container_that_stays_is_an_error(
    daemon: UserDaemon, docker: FakeDocker, tmp_path: Path, request_line: str, status: int, message: str
) -> None:
    with daemon.request("7", True):
        docker.containers = {"a": "/slurm_n1/uid_5/job_7", "b": "/slurm_n1/uid_5/job_7"}
        docker.answers[request_line] = status
    with pytest.raises(OSError) as error:
        daemon.end_job("7")
    assert str(error.value) == message and stops(tmp_path) == 0
    if request_line.startswith("DELETE"):
        assert [*docker.containers] == ["a"]
    docker.answers.clear()
    daemon.end_job("7")
    assert not docker.containers and stops(tmp_path) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="root ends jobs")
def test_epilog_is_told_of_a_container_that_stays(docker: FakeDocker, tmp_path: Path) -> None:
    (tmp_path / "active").touch()
    docker.containers = {"a": "/slurm_n1/uid_5/job_7"}
    docker.answers = {"DELETE /containers/a": 500}
    path = str(tmp_path / "guard.sock")
    with guard(path, tmp_path):
        assert answer(path, "POST", "/shoal/job-end?job=7&user=ann")[0] == 502
        docker.answers.clear()
        assert answer(path, "POST", "/shoal/job-end?job=7&user=ann")[0] == 200


def test_only_users_of_the_file_with_docker_may_ask(tmp_path: Path) -> None:
    path, config = str(tmp_path / "guard.sock"), tmp_path / "config.json"
    config.write_text('{"users": [12345]}')
    with guard(path, tmp_path):
        assert answer(path, "GET", "/info") == (
            403, "shoal: you may not use Docker: use podman, or ask the operator for `docker: true`"
        )  # fmt: skip
        config.write_text(json.dumps({"users": [os.getuid()]}))  # without a restart
        assert "inside a job of Slurm only" in answer(path, "GET", "/info")[1]


def in_a_job(monkeypatch: pytest.MonkeyPatch, place: Path) -> str:
    """The path of a guard whose callers are all in job 7."""
    user = pwd.getpwuid(os.getuid()).pw_name
    (place / user).symlink_to("ann")
    (place / "active").touch()
    (place / "config.json").write_text(json.dumps({"users": [os.getuid()], "shares": [], "node": "n1", "gpus": []}))
    monkeypatch.setattr(main.Peer, "caller", lambda peer: Caller(os.getuid(), os.getgid(), "7", GROUP))
    return str(place / "guard.sock")


def test_what_was_checked_is_what_docker_is_asked_for(
    docker: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker would look a name up anew, and find a container that has been given the name since."""
    path = in_a_job(monkeypatch, tmp_path)
    docker.containers, docker.names = {"a1": GROUP, "b2": "/slurm_n1/uid_5/job_8"}, {"mine": "a1", "net": "c3"}
    body = json.dumps({"Cmd": ["id"]})
    with guard(path, tmp_path):
        assert answer(path, "POST", "/v1.41/containers/mine/exec", body)[0] == 201
        assert answer(path, "POST", "/containers/mine/start?x=1")[0] == 201
        assert answer(path, "POST", "/networks/net/connect", body)[0] == 201
        assert "another job's" in answer(path, "POST", "/containers/b2/exec", body)[1]
        assert answer(path, "POST", "/containers/gone/exec", body) == (403, "shoal: you have no such container")
    assert docker.posted == ["/v1.41/containers/a1/exec", "/containers/a1/start?x=1", "/networks/c3/connect"]


def test_user_has_a_bounded_number_of_networks(
    docker: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = in_a_job(monkeypatch, tmp_path)
    with guard(path, tmp_path):
        assert answer(path, "POST", "/networks/create", '{"Name": "own"}')[0] == 201
        docker.networks = 20
        assert "remove some" in answer(path, "POST", "/networks/create", '{"Name": "own"}')[1]


@cases("body", "[]", '{"HostConfig": 5}', '{"HostConfig": {"Mounts": [3]}}', "[" * 100000)
def test_body_that_is_no_request_is_rejected(
    docker: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    path = in_a_job(monkeypatch, tmp_path)
    with guard(path, tmp_path):
        status, message = answer(path, "POST", "/containers/create", body)
    assert status in (400, 403) and message.startswith("shoal: not a") and docker.posted == []


def test_body_is_read_in_pieces_whatever_its_length() -> None:
    """A chunk of a gigabyte would be in the guard's memory."""

    def pieces(body: bytes) -> list[int]:
        request = Guard.__new__(Guard)
        request.headers = Message()
        request.headers["Transfer-Encoding"] = "chunked"
        request.rfile = io.BytesIO(body)
        return [len(piece) for piece in request._chunks()]

    size = 3 * main.CHUNK_BYTES + 5
    assert pieces(b"%x\r\n" % size + b"x" * size + b"\r\n2;a=b\r\nxx\r\n0\r\n\r\n") == [main.CHUNK_BYTES] * 3 + [5, 2]
    for body in (b"-1\r\n" + b"x" * 9, b"0\r\nTrailer: x\r\n\r\n", b"5\r\nxx", b"2\r\nxxxx\r\n"):
        with pytest.raises((Rejection, OSError)):
            pieces(body)


def test_user_takes_a_bounded_number_of_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = str(tmp_path / "guard.sock"), tmp_path / "config.json"
    config.write_text('{"users": []}')
    monkeypatch.setattr(main, "MAX_CONNECTIONS", 3)
    # As another user: root's Epilog is never held up.
    monkeypatch.setattr(main, "peer_ids", lambda connection: (os.getpid(), 12345, 12345))
    with guard(path, tmp_path):
        idle = [connected(path) for _ in range(4)]
        assert idle[3].recv(1) == b""
        for connection in idle:
            connection.close()
        for _ in range(200):  # they are counted until their threads have ended
            with contextlib.suppress(OSError, http.client.HTTPException):
                assert answer(path, "GET", "/info")[0] == 403
                return
            time.sleep(0.05)
    raise AssertionError("no connection is let in again")


def connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(path)
    return connection


class guard:
    def __init__(self, path: str, place: Path) -> None:
        self._server = GuardServer(path, str(place / "config.json"), str(place))

    def __enter__(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer(path: str, method: str, place: str, body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("docker")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    try:
        connection.request(method, place, body)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"{}").get("message", "")
    finally:
        connection.close()
