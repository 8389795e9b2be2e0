"""What each rank of a job does on this node: its step, CPU, where it sleeps, and its Python stack.

The stack comes from py-spy where that is installed, otherwise from faulthandler, which `shoal.train` has at hand.
Prints one JSON object for each rank, and one with NCCL's counters where NCCL answers. A py-spy that a user could have
replaced runs with that user's rights. Of a user's files only those are read that `shoal.train` makes in memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from typing import Any, Iterator

SYSTEM_PATH = "/usr/local/bin:/usr/bin"
PY_SPY_TIMEOUT_S = 10
SAMPLE_S = 1.0
FRAME = re.compile(r"^ {4}(.+)$", re.MULTILINE)
"""A frame in the output of `py-spy dump`, innermost first."""
STACK_SIGNAL, STACK_MEMORY, STEP_MEMORY = 50, "shoal-stack", "shoal-step"
"""As in `shoal/contract.py`."""
STACK_TIMEOUT_S = 2.0
MAX_STACK_BYTES = 256 << 10
MAX_FRAMES = 30
HANDLER_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""A frame in the output of faulthandler, innermost first."""
LIBRARY = re.compile(r"^.*/(?:site|dist)-packages/|^.*/lib/python3\.\d+/")
RAS_PORT = 28028
"""Where NCCL from 2.24 on tells how far each communicator is, unless NCCL_RAS_ADDR says otherwise."""
RAS_TIMEOUT_S = 5.0
MAX_RAS_BYTES = 64 << 10
MAX_RAS_LINES = 16
COLLECTIVE = (
    *("torch/distributed/", "distributed_c10d.py", "nn/parallel/distributed.py", "mpi4py"),
    # DDP's all-reduce runs inside the backward pass, and that of NCCL ends where the host waits for the GPU.
    *("torch/autograd/", "torch/cuda/streams.py", "torch/cuda/__init__.py"),
)
"""Files whose functions wait for other ranks."""


def main(job: str) -> None:
    ranks = rank_processes(job)
    before = {pid: cpu_ticks(pid) for pid in ranks}
    time.sleep(SAMPLE_S)
    ticks = os.sysconf("SC_CLK_TCK")
    for pid, environment in sorted(ranks.items()):
        used = (cpu_ticks(pid) - before[pid]) / ticks / SAMPLE_S
        wait = read_text("/proc/%d/wchan" % pid).strip("0\n")
        result: dict[str, Any] = {"rank": int(environment["RANK"]), "pid": pid, "cpu_percent": round(100 * used)}
        stack = python_stack(pid, environment) or handler_stack(pid)
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        line = {**result, **read_step(pid), "node": node, "wait": wait, "stack": stack}
        print(json.dumps(line), flush=True)
    ports = {environment.get("NCCL_RAS_ADDR", "").rpartition(":")[2] or str(RAS_PORT) for environment in ranks.values()}
    for port in sorted(port for port in ports if re.fullmatch("[0-9]{1,5}", port) and int(port) < 65536):
        lines = nccl_counters(int(port))
        if lines:
            print(json.dumps({"nccl": lines}), flush=True)


def rank_processes(job: str) -> dict[int, dict[str, str]]:
    """The environment of each rank's own process; those that it started have the same, and are left out."""
    processes, own = {}, os.environ.get("SLURMD_NODENAME", "")
    for name in os.listdir("/proc"):
        if name.isdecimal():
            pairs = (text.partition("=") for text in read_text("/proc/%s/environ" % name).split("\0"))
            environment = {key: value for key, _, value in pairs}
            here = environment.get("SLURMD_NODENAME", own) in (own, "") if own else True  # a host may be several nodes
            if environment.get("SLURM_JOB_ID") == job and environment.get("RANK", "").isdecimal() and here:
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
        if os.geteuid() == 0:
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
    return [frame.strip() for frame in FRAME.findall(main_thread)][:MAX_FRAMES]


def handler_stack(pid: int) -> list[str]:
    """The frames of its main thread, which faulthandler writes when it is asked; empty where nothing would answer."""
    file = open_memory(pid, STACK_MEMORY)
    if file is None:
        return []
    try:
        size = os.fstat(file).st_size
        if not handles_signal(pid):
            return []
        os.kill(pid, STACK_SIGNAL)
        text = wait_for_stack(file, size)
        head = os.pread(file, 64, 0).decode("utf-8", "replace")
    except OSError:  # it has ended
        return []
    finally:
        os.close(file)
    return parse_handler_stack(text, head.partition("main 0x")[2].partition("\n")[0])


def wait_for_stack(file: int, size: int) -> str:
    """What faulthandler adds to a file of this size. It writes line by line, the main thread last."""
    end, text = time.monotonic() + STACK_TIMEOUT_S, ""
    while time.monotonic() < end:
        time.sleep(0.05)
        new = os.pread(file, MAX_STACK_BYTES, size).decode("utf-8", "replace")
        if new and new == text:
            break
        text = new
    return text


def parse_handler_stack(text: str, main_thread: str) -> list[str]:
    """The frames of the main thread, as py-spy writes them."""
    threads = re.split(r"^(?:Current thread|Thread) 0x0*", text, flags=re.MULTILINE)
    own = [thread for thread in threads if main_thread and thread.split(" ")[0].lower() == main_thread.lower()]
    frames = HANDLER_FRAME.findall((own or threads)[-1])
    return ["%s (%s:%s)" % (name, short_path(path), line) for path, line, name in frames][:MAX_FRAMES]


def short_path(path: str) -> str:
    """A file of a library from its package on, others by their name."""
    short = LIBRARY.sub("", path)
    return short if short != path else os.path.basename(path)


def handles_signal(pid: int) -> bool:
    """Whether it has a handler: without one, the signal would end it."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", read_text("/proc/%d/status" % pid), re.MULTILINE)
    return bool(caught and int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1)


def open_memory(pid: int, name: str) -> int | None:
    """The newest file in memory of this name that a process has open, to be read; a fork has its parent's, too."""
    newest, newest_number = None, -1
    for file in open_files(pid, "/memfd:%s (deleted)" % name):
        number = os.fstat(file).st_ino
        if number > newest_number:
            if newest is not None:
                os.close(newest)
            newest, newest_number = file, number
        else:
            os.close(file)
    return newest


def open_files(pid: int, target: str) -> Iterator[int]:
    folder = "/proc/%d/fd" % pid
    try:
        numbers = os.listdir(folder)
    except OSError:
        return
    for number in numbers:
        path = "%s/%s" % (folder, number)
        try:
            if os.readlink(path) != target:
                continue
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        # Looked at again once it is open: the process may put another file in its place.
        if os.readlink("/proc/self/fd/%d" % file) == target:
            yield file
        else:
            os.close(file)


def read_step(pid: int) -> dict[str, Any]:
    """The last step of a rank, how long ago that was, and how long one takes; empty where it does not say."""
    file = open_memory(pid, STEP_MEMORY)
    if file is None:
        return {}
    try:
        values = json.loads(os.pread(file, 256, 0).decode("utf-8", "replace"))
        silence_s, median_s = time.monotonic() - float(values["clock"]), values.get("median_s")
        step = {"step": int(values["step"]), "silence_s": round(silence_s, 1)}
        return {**step, "median_s": float(median_s)} if median_s else step
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        return {}
    finally:
        os.close(file)


def nccl_counters(port: int) -> list[str]:
    """What NCCL on this node says of the job's communicators: their states, then errors and ranks that differ."""
    data, end = b"", time.monotonic() + RAS_TIMEOUT_S
    try:
        with socket.create_connection(("localhost", port), RAS_TIMEOUT_S) as peer:
            peer.sendall(b"verbose status\n")
            while len(data) < MAX_RAS_BYTES and time.monotonic() < end:
                peer.settimeout(max(0.1, end - time.monotonic()))
                part = peer.recv(65536)
                if not part:
                    break
                data += part
    except OSError:
        pass
    text = "".join(sign if sign.isprintable() or sign == "\n" else " " for sign in data.decode("utf-8", "replace"))
    lines = [" ".join(line.split())[:160] for line in text.splitlines() if line.strip()]
    start = next((place for place, line in enumerate(lines) if line.startswith("Communicators")), len(lines))
    return [line for line in lines[start + 1 :] if line.strip("=")][:MAX_RAS_LINES]


def ranks_behind(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that the others wait for, as far as steps and stacks tell; none where they do not."""
    steps = [rank["step"] for rank in ranks if rank.get("step") is not None]
    late = [rank for rank in ranks if rank.get("step") is not None and rank["step"] < max(steps) - 1]
    seen = [rank for rank in ranks if rank.get("stack")]
    busy = [rank for rank in seen if not waits_for_others(rank["stack"])]
    if busy and len(busy) < len(seen):
        return busy
    if late and len(late) < len(ranks):
        return late
    innermost = [rank["stack"][0] for rank in seen]
    common = max(innermost, key=innermost.count, default="")
    if innermost.count(common) * 2 > len(seen) > 2:
        return [rank for rank in seen if rank["stack"][0] != common]
    return []


def waits_for_others(stack: list[str]) -> bool:
    return any(word in frame for frame in stack for word in COLLECTIVE)


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1])
