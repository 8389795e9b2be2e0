"""TCP ports that are listened on, and by whom."""

from __future__ import annotations

import os

from shoal.agent.program.disk import read_text


def port_holder(port: int) -> str:
    """The process that listens on a TCP port; "" when there is none, or none that we can see."""
    sockets = {name for name, at in listening_sockets().items() if at == port}
    for pid in filter(str.isdigit, os.listdir("/proc")) if sockets else ():
        if sockets & open_files(pid):
            return f"{read_text(f'/proc/{pid}/comm').strip()} (pid {pid})"
    return ""


def listens(pid: str) -> bool:
    """Whether a process has a port that others can connect to."""
    return not listening_sockets().keys().isdisjoint(open_files(pid))


def listening_sockets() -> dict[str, int]:
    """The port of every socket that is listened on, by the name the socket has among a process's open files."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in read_text("/proc/net/" + table).splitlines()[1:]:
            field = line.split()
            if field[3] == "0A":
                found[f"socket:[{field[9]}]"] = int(field[1].rpartition(":")[2], 16)
    return found


def open_files(pid: str) -> set[str]:
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
            except OSError:  # closed while we looked
                continue
    except OSError:  # the process has ended
        pass
    return found
