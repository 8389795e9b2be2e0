"""The service: HTTP on Docker's usual socket, passed on to the daemon of the caller's user.

Every request is read whole and written anew, on a connection of its own: what is passed on is what was checked.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from . import CONFIG, DAEMONS, SOCKET, rules
from .caller import Caller, Peer, Rejection, job_owner, peer_ids
from .job_limits import cgroup_parent, job_gpus, remove_groups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, Optional

UNIT = "shoal-docker@"
MAX_BODY_BYTES = 512 << 10
"""Of JSON, which takes up to twenty times as much memory once it is read."""
START_TIMEOUT_S = 60
END_TIMEOUT_S = 60
REMOVAL_TIMEOUT_S = 20
REQUEST_TIMEOUT_S = 30
"""From the connection to its first request."""
MAX_CONNECTIONS = 100
"""Of one user: everybody may connect, and nobody may take the files and threads that others need."""
MAX_NETWORKS = 20
"""Of one user, with Docker's own three: they stay, and all users of a node share 256 ranges of addresses."""
CHUNK_BYTES = 1 << 16
_KEPT_HEADERS = ("X-Registry-Auth", "X-Registry-Config", "Accept", "User-Agent")
_BODY_TYPES = {"tar": "application/x-tar", "build": "application/x-tar", "pull": "application/x-tar"}
_STREAMS = ("plain", "attach", "exec-start")
"""Requests that make nothing, or last as long as the container: the end of their own job does not wait for them."""
_JSON_KINDS = ("json", "create", "exec", "exec-start", "network", "volume")


class DaemonConnection(http.client.HTTPConnection):
    """A connection to the daemon of one user."""

    def __init__(self, path: str, timeout: Optional[float] = None) -> None:
        super().__init__("docker", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Daemons:
    """The daemons of users: started at a user's first request, stopped when no container of theirs is left."""

    def __init__(self, directory: str = DAEMONS) -> None:
        self._users: Dict[str, UserDaemon] = {}
        self._directory = directory
        self._lock = threading.Lock()

    def of(self, user: str) -> UserDaemon:
        with self._lock:
            return self._users.setdefault(user, UserDaemon(user, f"{self._directory}/{user}/docker.sock"))


class UserDaemon:
    def __init__(self, user: str, path: str) -> None:
        self.user, self._unit, self._socket = user, UNIT + user, path
        self._lock = threading.Condition()
        self._requests: Counter[str] = Counter()
        """Requests under way, by job. The end of the daemon would end them: a push or a save, a terminal."""
        self._changes: Counter[str] = Counter()
        """Those of them that make or start something."""

    def connect(self, timeout: Optional[float] = None) -> DaemonConnection:
        return DaemonConnection(self._socket, timeout)

    def ask(self, method: str, path: str) -> Any:
        """The answer as JSON; None where it says that there is no such thing."""
        connection = self.connect(START_TIMEOUT_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status >= 500:
            raise OSError(f"{method} {path}: Docker answers {response.status}")
        return json.loads(data) if data and response.status < 300 else None

    @contextmanager
    def request(self, job: str, changes: bool) -> Iterator[None]:
        with self._lock:
            self._start()
            self._requests[job] += 1
            self._changes[job] += changes
        try:
            yield
        finally:
            with self._lock:
                self._requests[job] -= 1
                self._changes[job] -= changes
                self._lock.notify_all()

    def end_job(self, job: str) -> None:
        """Remove what a job has left. Its processes have ended, so no new request of its own comes."""
        with self._lock:
            self._lock.wait_for(lambda: not self._changes[job], END_TIMEOUT_S)
            left = self._is_active() and self._remove_containers(re.compile(rf"/job_{job}$"))
            # Those of the job itself end with its containers.
            others = any(number for other, number in self._requests.items() if other != job)
            if not left and not others:
                subprocess.run(["systemctl", "stop", self._unit], check=True, timeout=END_TIMEOUT_S)
        remove_groups(job)
        job_owner.cache_clear()  # Slurm uses numbers again

    def _is_active(self) -> bool:
        return subprocess.run(["systemctl", "-q", "is-active", self._unit], timeout=START_TIMEOUT_S).returncode == 0

    def _start(self) -> None:
        if os.path.exists(self._socket) and self._is_active():
            return
        if subprocess.run(["systemctl", "start", self._unit], timeout=START_TIMEOUT_S).returncode != 0:
            where = f"the operator sees why in `journalctl -u {self._unit}`"
            raise Rejection(f"Docker does not start for {self.user}: {where}")
        self._remove_containers(re.compile(""))  # of jobs that a reboot has ended

    def _remove_containers(self, group: re.Pattern[str]) -> int:
        """Remove containers by their cgroup, those of builds too, and return how many others there are."""
        for container, name in self._containers():
            if group.search(name):
                with suppress(OSError, http.client.HTTPException):  # one that stays is seen below
                    self.ask("DELETE", f"/containers/{container}?force=1&v=1")
        end = time.monotonic() + REMOVAL_TIMEOUT_S
        while True:  # Docker may be removing one itself, after `docker run --rm`
            names = [name for _, name in self._containers()]
            stay = sum(bool(group.search(name)) for name in names)
            if not stay:
                return len(names)
            if time.monotonic() > end:
                old = group.pattern or "old jobs"
                raise OSError(f"Docker of {self.user} does not remove {stay} containers of {old}")
            time.sleep(0.2)

    def _containers(self) -> list[tuple[str, str]]:
        """The ids and cgroups of all containers."""
        listed = self.ask("GET", "/containers/json?all=1")
        if listed is None:
            raise OSError(f"Docker of {self.user} does not list its containers")
        details = [self.ask("GET", f"/containers/{container['Id']}/json") for container in listed]
        return [(one["Id"], one["HostConfig"].get("CgroupParent") or "") for one in details if one]


class Guard(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = REQUEST_TIMEOUT_S
    server: GuardServer

    def setup(self) -> None:
        super().setup()
        self.peer = Peer(self.connection)

    def finish(self) -> None:
        self.peer.close()
        super().finish()

    def address_string(self) -> str:
        return f"uid {self.peer.uid}"

    def _handle(self) -> None:
        self.connection.settimeout(None)
        try:
            place = urlsplit(self.path)
            if self.peer.uid == 0 and place.path == "/shoal/job-end":
                words = dict(parse_qsl(place.query))
                self.server.daemons.of(words["user"]).end_job(words["job"])
                return self._answer(200, {})
            self.config = self.server.read_config()
            if self.peer.uid not in self.config["users"]:
                raise Rejection("you may not use Docker: use podman, or ask the operator for `docker: true`")
            caller, kind = self.peer.caller(), rules.route(self.command, place.path)
            self.daemon = self.server.daemons.of(caller.user)
            with self.daemon.request(caller.job, kind not in _STREAMS):
                self._pass_on(caller, kind, place.path, place.query)
        except Rejection as error:
            self._answer(403, {"message": f"shoal: {error}"})
        except (AttributeError, KeyError, RecursionError, TypeError):
            self._answer(400, {"message": "shoal: not a request of Docker's"})
        except (OSError, ValueError, http.client.HTTPException, subprocess.SubprocessError) as error:
            self.log_error("%s %s: %r", self.command, self.path.partition("?")[0], error)
            self._answer(502, {"message": "shoal: Docker does not answer on this node"})

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def _pass_on(self, caller: Caller, kind: str, path: str, query_text: str) -> None:
        ask, config = self.daemon.ask, self.config
        query = parse_qsl(query_text, keep_blank_values=True, strict_parsing=bool(query_text))
        body: Any = None
        if kind in _JSON_KINDS:
            body = json.loads(self._body() or b"null")
        if kind in ("start", "exec", "archive"):
            place, _, verb = path.rpartition("/")
            container = ask("GET", f"{place}/json")
            if container is None:
                raise Rejection("you have no such container")
            # By its id: another container may have the name before Docker reads it.
            path = f"{place.rpartition('/')[0]}/{container['Id']}/{verb}"
            if container["HostConfig"].get("CgroupParent") != cgroup_parent(caller):
                raise Rejection("this container is another job's: make one in this job")
            if kind == "archive" and rules.runs_as_user(container):
                raise Rejection("`docker cp` does not work with a container that has files of the node: use those")
            if kind == "start":
                rules.check_sources(container, caller, config["shares"])
            if kind == "exec":
                body = rules.confine_exec(body, caller, container)
        elif kind == "create":
            gpus = job_gpus(caller.job, config) if "DeviceRequests" in json.dumps(body) else ()
            body = rules.confine_container(body, caller, cgroup_parent(caller), config["shares"], gpus)
            for name in rules.networks(body):
                rules.check_network(name, ask("GET", f"/networks/{quote(name, safe='')}"))
        elif kind == "build":
            query = rules.confine_build(query, cgroup_parent(caller))
        elif kind == "pull":
            query = rules.confine_pull(query)
        elif kind == "volume":
            body = rules.confine_volume(body)
        elif kind == "network":
            if len(ask("GET", "/networks") or ()) >= MAX_NETWORKS:
                raise Rejection(f"you have {MAX_NETWORKS} networks on this node: remove some (docker network prune)")
            body = rules.confine_network(body)
        elif kind == "json" and "/networks/" in path:
            place, _, verb = path.rpartition("/")
            network = ask("GET", place)
            rules.check_network(path, network)
            path = f"{place.rpartition('/')[0]}/{network['Id']}/{verb}"
        self._forward(kind, path + (f"?{urlencode(query)}" if query else ""), body)

    def _forward(self, kind: str, path: str, body: Any) -> None:
        headers = {name: self.headers[name] for name in _KEPT_HEADERS if name in self.headers}
        is_stream = kind == "attach" or (kind == "exec-start" and not (body or {}).get("Detach"))
        if is_stream:
            if self.headers.get("Upgrade") != "tcp":
                raise Rejection("this client is too old: it does not ask for a stream")
            headers.update({"Connection": "Upgrade", "Upgrade": "tcp"})
        data: Any = None
        if kind in _JSON_KINDS:
            headers["Content-Type"], data = "application/json", json.dumps(body).encode()
        elif kind in _BODY_TYPES or self.command == "PUT":
            # Of another type, Docker would read the body as part of the query.
            headers.update({"Content-Type": "application/x-tar", "Transfer-Encoding": "chunked"})
            data = self._chunks()
        else:
            self._body()
        connection = self.daemon.connect()
        try:
            connection.request(self.command, path, data, headers, encode_chunked=True)
            upstream = connection.sock  # the connection has none any more after an answer that ends it
            response = connection.getresponse()
            if is_stream and response.status == http.client.SWITCHING_PROTOCOLS:
                self._stream(upstream, response)
            else:
                self._return(upstream, response)
        finally:
            connection.close()

    def _return(self, upstream: socket.socket, response: http.client.HTTPResponse) -> None:
        """The answer, as it comes. A client that goes away ends a build or a pull."""
        self.send_response_only(response.status, response.reason)
        skipped = ("connection", "transfer-encoding", "keep-alive", "upgrade")
        for name, value in response.getheaders():
            if name.lower() not in skipped:
                self.send_header(name, value)
        has_body = self.command != "HEAD" and response.status not in (204, 304)
        chunked = has_body and response.headers.get("Content-Length") is None
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        if not has_body:
            return
        done = threading.Event()
        threading.Thread(target=self._watch_client, args=(upstream, done), daemon=True).start()
        try:
            while data := response.read1(CHUNK_BYTES):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
                self.wfile.flush()
            if chunked:
                self.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException):
            self.close_connection = True
        finally:
            done.set()

    def _watch_client(self, upstream: socket.socket, done: threading.Event) -> None:
        watch = select.poll()
        watch.register(self.connection, select.POLLRDHUP | select.POLLHUP)
        while not done.is_set():
            if watch.poll(1000):
                try:
                    upstream.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
                return

    def _stream(self, upstream: socket.socket, response: http.client.HTTPResponse) -> None:
        """The terminal of a container, in both directions. Docker reads no further request on such a connection."""
        self.close_connection = True
        self.send_response_only(101, "UPGRADED")
        for name, value in (("Content-Type", response.headers.get("Content-Type", "")), ("Connection", "Upgrade")):
            self.send_header(name, value)
        self.send_header("Upgrade", "tcp")
        self.end_headers()
        self.wfile.flush()
        upstream.setblocking(False)
        first = response.fp.peek(CHUNK_BYTES)
        upstream.setblocking(True)
        self.connection.sendall(first or b"")
        threading.Thread(target=self._send_input, args=(upstream,), daemon=True).start()
        pump(upstream, self.connection)

    def _send_input(self, upstream: socket.socket) -> None:
        """What the client has typed, beginning with what is in our buffer."""
        self.connection.setblocking(False)
        first = self.rfile.peek(CHUNK_BYTES) if hasattr(self.rfile, "peek") else b""
        self.connection.setblocking(True)
        try:
            upstream.sendall(first or b"")
        except OSError:
            return
        pump(self.connection, upstream)

    def _body(self) -> bytes:
        data = b""
        for chunk in self._chunks():
            data += chunk
            if len(data) > MAX_BODY_BYTES:
                raise Rejection("the request is too long")
        return data

    def _chunks(self) -> Iterator[bytes]:
        """The body of the request."""
        encoding, length = self.headers.get("Transfer-Encoding"), self.headers.get("Content-Length", "0")
        if encoding is not None and encoding.lower() != "chunked":
            raise Rejection("not a request")
        if encoding is None:
            yield from self._read(int(length))
            return
        while True:
            size = int(self.rfile.readline(64).split(b";")[0].strip() or b"-", 16)
            yield from self._read(size)
            if self.rfile.readline(8).strip():
                raise OSError("the client has gone")
            if not size:
                return

    def _read(self, size: int) -> Iterator[bytes]:
        """So many bytes of the client's, in pieces: it may announce more than there is memory."""
        if size < 0:
            raise Rejection("not a request")
        while size:
            data = self.rfile.read(min(size, CHUNK_BYTES))
            if not data:
                raise OSError("the client has gone")
            size -= len(data)
            yield data

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.close_connection = True
        try:
            self.send_response_only(status)
            for name, value in (("Content-Type", "application/json"), ("Content-Length", str(len(data)))):
                self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)
        except OSError:
            pass


def pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


class GuardServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # clients go away
            super().handle_error(request, client_address)

    def __init__(self, path: str, config: str = CONFIG, daemons: str = DAEMONS) -> None:
        self.daemons, self._config = Daemons(daemons), config
        self._connections: Counter[int] = Counter()
        self._lock = threading.Lock()
        super().__init__(path, Guard)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        uid = peer_ids(request)[1]
        with self._lock:
            if uid != 0 and self._connections[uid] >= MAX_CONNECTIONS:
                return False
            self._connections[uid] += 1
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        uid = peer_ids(request)[1]
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._connections[uid] -= 1

    def read_config(self) -> Any:
        with open(self._config, encoding="utf-8") as file:
            return json.load(file)


def end_job(job: str, user: str) -> None:
    """What Slurm's Epilog runs: asks the service to remove what the job has left."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(4 * END_TIMEOUT_S)
    connection.connect(SOCKET)
    place = urlencode({"job": job, "user": user})
    connection.sendall(f"POST /shoal/job-end?{place} HTTP/1.1\r\nHost: docker\r\nContent-Length: 0\r\n\r\n".encode())
    if b" 200 " not in connection.recv(64):
        raise SystemExit(f"cannot remove the containers of job {job}")


def main(arguments: list[str]) -> None:
    if arguments:
        return end_job(*arguments)
    import grp

    if os.path.lexists(SOCKET):
        os.unlink(SOCKET)
    os.umask(0o177)
    server = GuardServer(SOCKET)
    os.chown(SOCKET, 0, grp.getgrnam(server.read_config()["group"]).gr_gid)
    os.chmod(SOCKET, 0o660)  # nosec B103 - for the users of the cluster, of whom the guard knows who may use Docker
    os.umask(0o022)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
