"""Answering the operator, request by request."""

from __future__ import annotations

import fcntl
import os
import time
from _collections_abc import Callable

from shoal.remote.agent.context import ConvergeContext, Item, OperatorConnection, read_due
from shoal.remote.agent.converge import converge
from shoal.remote.agent.facts import gather_facts
from shoal.remote.agent.fast_stdlib import signal
from shoal.remote.agent.file_io import read_bytes, write_atomic
from shoal.remote.agent.files import random_line
from shoal.remote.agent.network import reach
from shoal.remote.agent.packages import release_daemons
from shoal.remote.agent.running import explain


def main(state: str, source: Callable[[str], str]) -> None:
    """Answer until the operator goes. `state` is a directory for what has to outlive a run."""
    os.chdir("/")
    os.umask(0o022)
    connection = OperatorConnection()
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, connection.close)
    before: ConvergeContext | None = None
    while True:
        request = connection.request()
        if request is None or request["op"] == "exit":
            return
        if request["op"] == "receive":
            connection.receive(request["name"], request["size"])
            continue
        context = ConvergeContext(connection, state, request.get("items", []), request["op"] == "check", source)
        if before and request["op"] == "check":
            context.known_units = before.known_units  # asking again costs as much as all the rest
        try:
            answer(request, context)
            before = context if request["op"] == "facts" else None  # a dry run that follows reuses these facts
        except OSError as error:
            text = explain(error, request.get("path", state), request["op"])
            connection.send({"event": "error", "text": text})


def answer(request: Item, context: ConvergeContext) -> None:
    operation, connection = request["op"], context.connection
    if operation == "facts":
        begin = time.monotonic()
        facts = gather_facts(request, context)
        connection.send({"event": "facts", "facts": facts, "took": time.monotonic() - begin})
    elif operation == "check":
        converge(context)
    elif operation == "reach":
        connection.send({"event": "reach", "answers": reach(request["targets"], request["seconds"])})
    else:
        lock_fd = lock(context)
        try:
            context.due = read_due(context.state)
            context.known_units = {}
            context.defer = bool(request.get("defer_restarts"))
            for item in context.items:
                if "received" in item:
                    item["data"] = connection.received[item["received"]]
            connection.received = {}
            if operation == "apply":
                release_daemons(context)
                converge(context)
            elif operation == "secret":
                connection.send(secret(request))
        finally:
            os.close(lock_fd)


def lock(context: ConvergeContext) -> int:
    """One operator at a time: wait until another operator's run ends, and report whose it is."""
    os.makedirs(context.state, 0o700, exist_ok=True)
    fd = os.open(context.state + "/lock", os.O_RDWR | os.O_CREAT, 0o600)
    reported = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if not reported:
                holder = os.pread(fd, 200, 0).decode("utf-8", "replace") or "another run"
                context.report(f"waiting for {holder} to finish on this host")
                reported = True
            if not context.connection.is_open():
                raise SystemExit(0) from None
            time.sleep(0.1)
    address = os.environ.get("SSH_CONNECTION", "").split(" ")[0]
    user = os.environ.get("SUDO_USER") or os.environ.get("USER") or "root"
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{user}{' from ' + address if address else ''} (pid {os.getpid()})".encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds all the same
    return fd


def secret(request: Item) -> Item:
    """A secret file's content, made from random bytes first where it is absent and `make` says how many.

    With `text` they are hexadecimal digits.
    """
    path = request["path"]
    if request.get("make") and not (os.path.exists(path) and os.path.getsize(path)):
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        data = random_line(request["make"]) if request.get("text") else os.urandom(request["make"])
        write_atomic(path, data, 0o400, os.geteuid(), os.getegid())
    from binascii import b2a_base64

    return {"event": "secret", "content_b64": b2a_base64(read_bytes(path), newline=False).decode()}
