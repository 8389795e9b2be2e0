"""A plain supervisor for a host without systemd: keeps one daemon running.

Stands alone: on such a host it is a file of its own, run as `supervise.py NAME COMMAND...`.
"""

from __future__ import annotations

import os
import sys
import time

SUPERVISED = "/run/shoal/supervise"
SERVICE_LOGS = "/var/log/shoal"


def supervise(name: str, command: list[str]) -> None:
    """Keep a command running, in the background: started again when it ends, with growing pauses."""
    import json  # here, because the agent loads this file at every start and has no use for these
    import signal

    if os.fork():
        return
    os.setsid()
    os.makedirs(SUPERVISED, 0o755, exist_ok=True)
    os.makedirs(SERVICE_LOGS, 0o755, exist_ok=True)
    log = os.open(f"{SERVICE_LOGS}/{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    null = os.open("/dev/null", os.O_RDONLY)
    for fd, to in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, to)
    record = f"{SUPERVISED}/{name}.json"
    child = [0]

    def end(*_: object) -> None:
        if child[0]:
            os.kill(child[0], signal.SIGTERM)
            for _tick in range(100):
                if not process_start(child[0]):
                    break
                time.sleep(0.1)
            else:
                os.kill(child[0], signal.SIGKILL)
        if os.path.exists(record):
            os.unlink(record)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    pause = 1.0
    while True:
        began = time.monotonic()
        child[0] = os.posix_spawnp(command[0], command, os.environ, setsid=True, setsigdef=[signal.SIGPIPE])
        note = {"pid": os.getpid(), "start": process_start(os.getpid()), "child": child[0], "command": command}
        with open(record + ".new", "w") as file:
            json.dump(note, file)
        os.rename(record + ".new", record)
        os.waitpid(child[0], 0)
        child[0] = 0
        pause = 1.0 if time.monotonic() - began > 60 else min(pause * 2, 30.0)
        time.sleep(pause)


def process_start(pid: int) -> str:
    """When a process started, which distinguishes it from a later one with the same id; "" for none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return ""
    return fields[19] if fields and fields[0] != "Z" else ""


if __name__ == "__main__":
    supervise(sys.argv[1], sys.argv[2:])
