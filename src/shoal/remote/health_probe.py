"""What `shoal doctor` reads from a host, as one JSON object: daemons, disks, names, users, munge, logs, health.

The request is a JSON object on standard input, with a list of arguments for each check. Each check runs in a thread of
its own, and what has not ended in time is named: a dead share or name server must not hide the rest. With --slowness=N,
for emulated machines, all have N times as long.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pwd
import re
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Callable

SLOWNESS = next((int(word.split("=")[1]) for word in sys.argv if word.startswith("--slowness=")), 1)
TIMEOUT_S = 5.0 * SLOWNESS
"""For all checks together."""
COMMAND_TIMEOUT_S = 3.0 * SLOWNESS
TAIL_BYTES, CHANGE_BYTES = 256 * 1024, 16 * 1024 * 1024
"""So much of the end of each log is searched for errors, and for changes of nodes."""
MAX_LINES, MAX_CHANGES, MAX_LINE, MAX_NAMES = 100, 1000, 300, 3
NOBODY = 65534
PROCESSES = {"munge": "munged"}
"""The programs of services that have another name."""
SERVICE_PROPERTIES = (
    "ActiveState",
    "NRestarts",
    "ActiveEnterTimestampMonotonic",
    "InactiveEnterTimestampMonotonic",
)
STABLE_S = 30.0
"""A service that failed, and has run for so long since, runs. slurmd waits 20 s for a device file before it fails."""
NODE_CHANGE = re.compile(rb"update_node: node \S+ (?:reason|state) set to|Setting node \S+ state to INVAL with reason:")
RECORD = re.compile(
    rb"JobState=([A-Z_]+) Partition=\S* TimeLimit=\S* StartTime=\S* EndTime=(\S+) NodeList=([^\s(]+) NodeCnt="
)
ENDS = ("COMPLETED", "FAILED", "NODE_FAIL", "BOOT_FAIL", "TIMEOUT", "OUT_OF_MEMORY")
"""Of jobs whose end says something of their nodes."""
FAILURES = ("FAILED", "NODE_FAIL", "BOOT_FAIL")
STOP = re.compile(rb"Slurmd shutdown completing|slurmd version \S+ started")
"""What slurmd logs when it is told to end, also by a reboot that somebody asked for, and when it is back."""
NOTABLE = re.compile(rb"error|fatal|[Pp]rolog|[Ee]pilog|slurmd version \S+ started")
CACHED_CONF = ("/run/slurm/conf", "/var/lib/slurm/slurmd/conf-cache")
"""Where slurmd keeps the files that it fetched from slurmctld."""
CONF = "/etc/slurm"
CONF_FILES = ("slurm.conf", "gres.conf", "cgroup.conf", "topology.conf", "plugstack.conf")
PACKAGES = ("slurmd", "munge", "libpmix*", "openmpi-bin", "libopenmpi*", "libnccl2", "nvidia-driver*", "libcuda1")
DRIVER_VERSION = "/sys/module/nvidia/version"
COMPLETING_FORMAT = "%i %u %N %e"


def check_services(*names: str) -> dict[str, str]:
    """The state of each service: `active`, `failed since 2026-11-17T10:00:00`. Without systemd, by the processes."""
    if not os.path.isdir("/run/systemd/system"):
        running = set(processes().values())
        return {name: "active" if PROCESSES.get(name, name) in running else "inactive" for name in names}
    answer = run(["systemctl", "show", "-p", ",".join(SERVICE_PROPERTIES), *names]).stdout
    parts = [dict(line.split("=", 1) for line in part.splitlines()) for part in answer.split("\n\n") if part]
    return {name: service_state(part) for name, part in zip(names, parts)}


def service_state(values: dict[str, str]) -> str:
    """Its state. One that systemd has just started again is `activating`: it may be about to fail again."""
    state, restarts, start_us, stop_us = (values[name] for name in SERVICE_PROPERTIES)
    if state in ("inactive", "failed") and int(stop_us):
        end = time.localtime(time.time() - time.monotonic() + int(stop_us) / 1e6)
        return "%s since %s" % (state, time.strftime("%Y-%m-%dT%H:%M:%S", end))
    is_new = time.monotonic() - int(start_us) / 1e6 < STABLE_S
    return "activating" if state == "active" and int(restarts) and is_new else state


def check_directories(*paths: str) -> list[dict[str, Any]]:
    """Each directory: its mount, room in it, and why a file cannot be written there."""
    spaces = []
    for path in paths:
        if os.path.isdir(path):
            room, mount = os.statvfs(path), path
            while not os.path.ismount(mount):
                mount = os.path.dirname(mount)
            spaces.append(
                {
                    "path": path,
                    "mount": mount,
                    "total_mb": room.f_blocks * room.f_frsize >> 20,
                    "free_mb": room.f_bavail * room.f_frsize >> 20,
                    "files": room.f_files,
                    "free_files": room.f_favail,
                    "problem": write_problem(path),
                }
            )
    return spaces


def write_problem(path: str) -> str:
    """Why no file can be written in a directory; empty where one can."""
    name = "%s/.shoal-probe-%d" % (path, os.getpid())
    try:
        file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(file, b"\0")
        finally:
            os.close(file)
            os.unlink(name)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_names(*names: str) -> list[str]:
    """The first names that do not resolve here."""
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # a name server that is away would take all the time
    missing = (name for name in names if not resolves(name))
    return list(itertools.islice(missing, MAX_NAMES))


def resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def check_users(*names: str) -> dict[str, int | None]:
    """The number of each user; None where there is no such user."""
    return {name: user_id(name) for name in names}


def user_id(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def check_steps() -> list[str]:
    """The job steps that have a process here, as `7.0 (pid 1234)`."""
    steps = []
    for pid, name in processes().items():
        if name == "slurmstepd":
            title = re.search(r"\[([^\]]+)\]", read_text("/proc/%d/cmdline" % pid))
            steps.append("%s (pid %d)" % (title[1] if title else "a step", pid))
    return steps


def check_logs(*paths: str) -> list[dict[str, Any]]:
    """The newest lines of Slurm's logs about errors, prologs and changes of nodes, with their age in seconds."""
    lines = []
    for path in paths:
        # A person's note on a node must not get lost among errors, or when the log is rotated.
        changes = [*search(path + ".1", CHANGE_BYTES, NODE_CHANGE), *search(path, CHANGE_BYTES, NODE_CHANGE)]
        notable = search(path, TAIL_BYTES, NOTABLE)
        for line in (*changes[-MAX_CHANGES:], *notable[-MAX_LINES:]):
            lines.append({"age_s": age(line), "text": line[:MAX_LINE]})
    return lines


def search(path: str, tail_bytes: int, pattern: re.Pattern[bytes]) -> list[str]:
    """The lines at the end of a file that match."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - tail_bytes))
            text = file.read()
    except FileNotFoundError:
        return []
    lines: list[str] = []
    for match in pattern.finditer(text):
        start, end = text.rfind(b"\n", 0, match.start()) + 1, text.find(b"\n", match.end())
        line = text[start : end if end >= 0 else None].decode("utf-8", "replace")
        if not lines or lines[-1] != line:  # a line may match twice
            lines.append(line)
    return lines


def age(line: str) -> float | None:
    """How long ago a line was written: `[2026-11-17T10:00:00.123] error: ...`."""
    try:
        return round(time.time() - time.mktime(time.strptime(line[1:20], "%Y-%m-%dT%H:%M:%S")), 1)
    except ValueError:
        return None


def check_records(path: str, days: str) -> dict[str, list[Any]]:
    """How many jobs ended on each list of nodes in these days, when some failed, and when some were lost with one."""
    since = time.time() - int(days) * 86400
    counts: dict[str, list[Any]] = {}
    for line in (*search(path + ".1", CHANGE_BYTES, RECORD), *search(path, CHANGE_BYTES, RECORD)):
        # The last match: a job's name comes before, and is its user's.
        for match in RECORD.finditer(line.encode()):
            state, end, nodes = (part.decode() for part in match.groups())
        seconds = age("[" + end)
        ended = time.time() - seconds if seconds is not None else 0.0
        if ended >= since and state in ENDS:
            count = counts.setdefault(nodes, [0, [], []])
            count[0] += 1
            if state in FAILURES:
                count[1 + (state != "FAILED")].append(round(ended))
    return counts


def check_stops(path: str, days: str) -> list[list[float]]:
    """When slurmd was told to end in these days, each time with its next start, or now."""
    stops: list[list[float]] = []
    for line in (*search(path + ".1", CHANGE_BYTES, STOP), *search(path, CHANGE_BYTES, STOP)):
        seconds, is_open = age(line), bool(stops) and len(stops[-1]) == 1
        if seconds is None or seconds > int(days) * 86400:
            continue
        if "started" not in line:
            stops.append([time.time() - seconds])
        elif is_open:
            stops[-1].append(time.time() - seconds)
    return [stop if len(stop) == 2 else [*stop, time.time()] for stop in stops]


def check_health(config: str, result: str) -> dict[str, Any]:
    """The last result of the node's health program, with its age in seconds; empty before its first run."""
    text = read_text(result)
    if text:
        values = json.loads(text)
        return {"age_s": time.time() - values["time"], "findings": values["findings"]}
    try:
        return {"age_s": time.time() - os.stat(config).st_mtime, "findings": []}
    except OSError:
        return {}


def check_clock() -> float:
    return time.time()


def check_version(daemon: str) -> str:
    """The version of a daemon of Slurm that is installed."""
    return run([daemon, "-V"]).stdout.strip()


def check_confs(cached: str) -> dict[str, str]:
    """A digest of each file of Slurm's: those that slurmd fetched, or the controller's own."""
    folders = CACHED_CONF if cached else (CONF,)
    folder = next((folder for folder in folders if os.path.isdir(folder)), "")
    return {name: digest(f"{folder}/{name}") for name in CONF_FILES if folder and os.path.exists(f"{folder}/{name}")}


def check_facts(*paths: str) -> dict[str, str]:
    """What the nodes of a nodeset have in common: kernel, driver, packages, and the contents of these files."""
    facts = {"kernel": os.uname().release, "NVIDIA driver": read_text(DRIVER_VERSION).strip()}
    listing = run(["dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Package} ${Version}\\n", *PACKAGES]).stdout
    for line in listing.splitlines():
        if line.startswith("ii "):
            name, version = line[3:].split()
            facts[name] = version
    return {**facts, **{path: digest(path) for path in paths}}


def check_completing() -> list[dict[str, Any]]:
    """Jobs that have ended and still hold their nodes, with the seconds since their end."""
    jobs = []
    for line in run(["squeue", "-h", "-t", "CG", "-o", COMPLETING_FORMAT]).stdout.splitlines():
        job, user, nodes, end = line.split()
        try:
            seconds = time.time() - time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            continue
        jobs.append({"job": job, "user": user, "nodes": nodes, "seconds": round(seconds)})
    return jobs


def digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:12]
    except OSError as error:
        return error.strerror or str(error)


def check_munge() -> dict[str, str]:
    """A credential of a user without rights, for the controller to decode; or the error."""
    result = run(["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "munge", "-n"])
    return {"credential": result.stdout.strip(), "error": result.stderr.strip()}


def decode(credentials: dict[str, str]) -> dict[str, str]:
    """What munge on this host says to the credential of each host: `Success`, `Invalid credential`."""
    answers = {}
    for host, credential in credentials.items():
        result = run(["unmunge"], input=credential)
        # Of a credential that it can read, such as one of the future, unmunge prints the status with the rest.
        status = re.search(r"^STATUS:\s+(.+) \(\d+\)", result.stdout, re.MULTILINE)
        error = status[1] if status else result.stderr.strip().rpartition("Error: ")[2]
        answers[host] = "Success" if result.returncode == 0 else error
    return answers


def processes() -> dict[int, str]:
    names = {int(pid): read_text("/proc/%s/comm" % pid).strip() for pid in os.listdir("/proc") if pid.isdecimal()}
    return {pid: name for pid, name in names.items() if name}


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""  # the process has ended


def run(argv: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            timeout=COMMAND_TIMEOUT_S,
            **more,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return subprocess.CompletedProcess(argv, 1, "", str(error))


CHECKS: dict[str, Callable[..., Any]] = {
    "services": check_services,
    "directories": check_directories,
    "names": check_names,
    "users": check_users,
    "steps": check_steps,
    "logs": check_logs,
    "munge": check_munge,
    "health": check_health,
    "records": check_records,
    "stops": check_stops,
    "clock": check_clock,
    "version": check_version,
    "confs": check_confs,
    "facts": check_facts,
    "completing": check_completing,
}


def answer(request: dict[str, list[str]]) -> dict[str, Any]:
    """The result of each check that was asked for, and the names of those that have not ended."""
    results: dict[str, Any] = {}

    def work(name: str) -> None:
        results[name] = CHECKS[name](*request[name])

    threads = {name: threading.Thread(target=work, args=(name,), daemon=True) for name in request}
    for thread in threads.values():
        thread.start()
    end = time.monotonic() + TIMEOUT_S
    for thread in threads.values():
        thread.join(max(0.0, end - time.monotonic()))
    return {**results, "unfinished": [name for name in request if name not in results]}


if __name__ == "__main__":
    request = json.load(sys.stdin)
    print(json.dumps(decode(request) if "decode" in sys.argv[1:] else answer(request)), flush=True)
    os._exit(0)  # a check that hangs would keep the interpreter
