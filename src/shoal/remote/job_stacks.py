"""What each rank of a job does on this node: CPU, where it sleeps, and its Python stack where py-spy is installed.

Prints one JSON object for each rank. A py-spy that a user could have replaced runs with that user's rights.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from typing import Any

SYSTEM_PATH = "/usr/local/bin:/usr/bin"
PY_SPY_TIMEOUT_S = 10
SAMPLE_S = 1.0
FRAME = re.compile(r"^ {4}(.+)$", re.MULTILINE)
"""A frame in the output of `py-spy dump`, innermost first."""


def main(job: str) -> None:
    ranks = rank_processes(job)
    before = {pid: cpu_ticks(pid) for pid in ranks}
    time.sleep(SAMPLE_S)
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, environment in sorted(ranks.items()):
        used = (cpu_ticks(pid) - before[pid]) / ticks / SAMPLE_S
        wait = read_text("/proc/%d/wchan" % pid).strip("0\n")
        result: dict[str, Any] = {"rank": int(environment["RANK"]), "pid": pid, "cpu_percent": round(100 * used)}
        print(json.dumps({**result, "wait": wait, "stack": python_stack(pid, environment)}), flush=True)


def rank_processes(job: str) -> dict[int, dict[str, str]]:
    """The environment of each rank's own process; those that it started have the same, and are left out."""
    processes = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            pairs = (text.partition("=") for text in read_text("/proc/%s/environ" % name).split("\0"))
            environment = {key: value for key, _, value in pairs}
            if environment.get("SLURM_JOB_ID") == job and environment.get("RANK", "").isdecimal():
                processes[int(name)] = environment
    return {pid: environment for pid, environment in processes.items() if parent(pid) not in processes}


def parent(pid: int) -> int:
    fields = read_text("/proc/%d/stat" % pid).rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def cpu_ticks(pid: int) -> int:
    fields = read_text("/proc/%d/stat" % pid).rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def python_stack(pid: int, environment: dict[str, str]) -> list[str]:
    """The frames of its main thread; empty without py-spy."""
    program, line = shutil.which("py-spy", path=SYSTEM_PATH), ["--pid", str(pid)]
    prefix: list[str] = []
    if not program:
        program = shutil.which("py-spy", path=environment.get("PATH", ""))
        try:
            owner = os.stat("/proc/%d" % pid)
        except OSError:
            return []
        prefix = ["setpriv", "--reuid=%d" % owner.st_uid, "--regid=%d" % owner.st_gid, "--clear-groups"]
    if not program:
        return []
    try:
        done = subprocess.run(
            [*prefix, program, "dump", *line],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            universal_newlines=True,
            timeout=PY_SPY_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    threads = done.stdout.split("\nThread ")
    main_thread = next((text for text in threads if "MainThread" in text), threads[-1])
    return [frame.strip() for frame in FRAME.findall(main_thread)][:30]


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1])
