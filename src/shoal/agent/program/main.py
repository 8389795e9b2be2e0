"""Answering the operator, request by request."""

from __future__ import annotations

import fcntl
import os
import time

from shoal.agent.program.converge import converge
from shoal.agent.program.disk import read_bytes, write_atomic
from shoal.agent.program.facts import gather_facts
from shoal.agent.program.failure import explain
from shoal.agent.program.fast_stdlib import signal
from shoal.agent.program.packages import release_daemons
from shoal.agent.program.reach import reach
from shoal.agent.program.secrets import random_line
from shoal.agent.program.wire import Item, Wire
from shoal.agent.program.world import World, read_due

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Callable


def main(state: str, source: Callable[[str], str]) -> None:
    """Answer until the operator goes. `state` is a directory for what has to outlive a run."""
    os.chdir("/")
    os.umask(0o022)
    wire = Wire()
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, wire.hang_up)
    before: World | None = None
    while True:
        request = wire.request()
        if request is None or request["op"] == "exit":
            return
        world = World(wire, state, request.get("items", []), request["op"] == "check", source)
        if before and request["op"] == "check":
            world.units_as_in(before)
        try:
            answer(request, world)
            before = world if request["op"] == "facts" else None  # a dry run that follows goes by what they told
        except OSError as error:
            text = explain(error, request.get("path", state), request["op"])
            wire.send({"event": "error", "text": text})


def answer(request: Item, world: World) -> None:
    operation, wire = request["op"], world.wire
    if operation == "facts":
        begin = time.monotonic()
        facts = gather_facts(request, world)
        wire.send({"event": "facts", "facts": facts, "took": time.monotonic() - begin})
        return
    if operation == "check":
        converge(world)
        return
    if operation == "reach":
        wire.send({"event": "reach", "answers": reach(request["targets"], request["seconds"])})
        return
    held = lock(world)
    try:
        world.due = read_due(world.state)
        world.forget_units()
        world.defer = bool(request.get("defer_restarts"))
        if operation == "apply":
            release_daemons(world)
            converge(world)
        elif operation == "secret":
            wire.send(secret(request))
    finally:
        os.close(held)


def lock(world: World) -> int:
    """One operator at a time: waits for another one's work to end, and says whose it is."""
    os.makedirs(world.state, 0o700, exist_ok=True)
    fd = os.open(world.state + "/lock", os.O_RDWR | os.O_CREAT, 0o600)
    told = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if not told:
                holder = os.pread(fd, 200, 0).decode("utf-8", "replace") or "another run"
                world.tell(f"waiting for {holder} to finish on this host")
                told = True
            if not world.wire.still_there():
                raise SystemExit(0) from None
            time.sleep(0.1)
    address = os.environ.get("SSH_CONNECTION", "").split(" ")[0]
    who = os.environ.get("SUDO_USER") or os.environ.get("USER") or "root"
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{who}{' from ' + address if address else ''} (pid {os.getpid()})".encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds all the same
    return fd


def secret(request: Item) -> Item:
    """A secret file's content, made from random bytes first where it is absent and `make` says how many.

    With `text` they are hexadecimal digits.
    """
    path = request["path"]
    if request.get("make") and not (os.path.exists(path) and os.path.getsize(path)):
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            os.makedirs(folder, 0o700)
        data = random_line(request["make"]) if request.get("text") else os.urandom(request["make"])
        write_atomic(path, data, 0o400, os.geteuid(), os.getegid())
    from binascii import b2a_base64

    return {"event": "secret", "content_b64": b2a_base64(read_bytes(path), newline=False).decode()}
