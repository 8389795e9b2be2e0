"""Services on a host without systemd, each kept up by a supervisor of its own."""

from __future__ import annotations

import os
import sys
import time

from shoal.agent.program.disk import read_text, remove, write_atomic
from shoal.agent.program.failure import Failure
from shoal.agent.program.fast_stdlib import loads, signal
from shoal.agent.program.running import ENVIRONMENT, has_settled, last_lines, run
from shoal.agent.program.supervise import SERVICE_LOGS, SUPERVISED, process_start
from shoal.agent.program.wire import Item
from shoal.agent.program.world import Change, World, settle

SUPERVISOR = "shoal.agent.program.supervise"


def check_supervised(item: Item, world: World) -> Change | None:
    name, found = item["name"], supervised(item["name"])
    if item["running"] and not item["command"] and not found:
        raise Failure(f"this host has no systemd, and no command is known for {name}; use a host with systemd")
    if not item["running"]:
        return Change(f"stop {name}") if found else None
    if not found:
        return Change(f"start {name} under a supervisor")
    due = "service " + name in world.due and not world.defer
    return Change(f"restart {name}") if due or (item["command"] and found["command"] != item["command"]) else None


def make_supervised(item: Item, world: World) -> str:
    name, found = item["name"], supervised(item["name"])
    command = item["command"] or (found or {}).get("command", [])
    if found:
        stop_supervisor(found)
    cron = "/etc/cron.d/shoal-" + "".join(c if c.isalnum() else "-" for c in name)
    if not item["running"]:
        remove(cron)
        settle(world, "service " + name)
        return ""
    program = world.state + "/supervise.py"
    write_atomic(program, world.source(SUPERVISOR).encode(), 0o700, os.geteuid(), os.getegid())
    argv = [sys.executable or "python3", "-I", "-B", program, name, *command]
    status, text = run(argv, timeout=30.0)
    if status or not stays_up(name):
        log = last_lines(read_text(f"{SERVICE_LOGS}/{name}.log") or text)
        raise Failure(f"{name} started under the supervisor and did not stay up\n{log}")
    settle(world, "service " + name)
    if not item["enabled"] or not os.path.isdir("/etc/cron.d"):
        return "this host has no cron: after a reboot it starts with the next `shoal up`" if item["enabled"] else ""
    import shlex

    line = ["env", "PATH=" + ENVIRONMENT["PATH"], *argv]  # cron's own PATH leaves out where daemons are
    text = "@reboot root {}\n".format(" ".join(shlex.quote(part) for part in line).replace("%", "\\%"))
    write_atomic(cron, text.encode(), 0o644, os.geteuid(), os.getegid())
    return ""


def stays_up(name: str) -> bool:
    """Whether a supervisor that was just started keeps its daemon up, seen for a moment, longer on a busy host."""
    begun, first = time.monotonic(), 0
    while True:
        time.sleep(0.03)
        found, seconds = supervised(name), time.monotonic() - begun
        if not found:  # it writes its record once the daemon has begun
            if seconds > 10:
                return False
            continue
        first = first or found["child"]
        settled = has_settled(str(first), seconds)
        if found["child"] != first or not process_start(first):
            return False
        if settled:
            return True


def stop_supervisor(found: Item) -> None:
    os.kill(found["pid"], signal.SIGTERM)
    for _ in range(150):
        if process_start(found["pid"]) != found["start"]:
            return
        time.sleep(0.1)
    raise Failure(f"the supervisor (pid {found['pid']}) does not end; kill it and run again")


def supervised(name: str) -> Item | None:
    """The running supervisor of a service; None when there is none."""
    try:
        found: Item = loads(read_text(f"{SUPERVISED}/{name}.json") or "{}")
    except ValueError:
        return None
    return found if found and process_start(found["pid"]) == found["start"] else None
