"""The guard's service: who may ask it, and what the end of a job does to the Docker daemon of its user."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from shoal.remote.docker_guard import main
from shoal.remote.docker_guard.main import Daemons, GuardServer, UserDaemon

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
        self.answers: dict[str, int] = {}
        """Statuses of requests that fail, by method and path."""
        super().__init__(str(path), FakeDockerRequest)


class FakeDockerRequest(BaseHTTPRequestHandler):
    server: FakeDocker

    def do_GET(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        path, containers = self.path.partition("?")[0], self.server.containers
        status, body = self.server.answers.get(f"{self.command} {path}", 200), b""
        identity = path.split("/")[2]
        if status == 200 and path == "/containers/json":
            body = json.dumps([{"Id": name} for name in containers]).encode()
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


@pytest.mark.parametrize("changes", [True, False], ids=["a build", "a push or a terminal"])
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


@pytest.mark.parametrize(
    ("request_line", "status", "message"),
    [
        ("DELETE /containers/a", 500, "Docker of ann does not remove 1 containers of /job_7$"),
        ("DELETE /containers/a", 409, "Docker of ann does not remove 1 containers of /job_7$"),
        ("GET /containers/json", 500, "GET /containers/json?all=1: Docker answers 500"),
        ("GET /containers/json", 400, "Docker of ann does not list its containers"),
        ("GET /containers/a/json", 500, "GET /containers/a/json: Docker answers 500"),
    ],
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


def answer(path: str, method: str, place: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("docker")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    try:
        connection.request(method, place)
        response = connection.getresponse()
        return response.status, json.loads(response.read()).get("message", "")
    finally:
        connection.close()
