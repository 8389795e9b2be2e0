"""What a node does alone: HPL and STREAM of Debian's hpcc, and fio in each directory."""

from __future__ import annotations

import contextlib
import getpass
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
from typing import Any, Dict, Tuple

from .place import MissingTool, Rank, emit

HPCC_TIMEOUT_S = 3600.0
FIO_TIMEOUT_S = 600.0
BLOCK = 128
"""The block size of HPL."""
HPL_SECONDS, CPU_FLOPS = 300.0, 10e9
"""HPL solves no larger matrix than CPUs of this speed do in this time."""
INPUT = """\
HPLinpack benchmark input file
Innovative Computing Laboratory, University of Tennessee
HPL.out      output file name (if any)
8            device out (6=stdout,7=stderr,file)
1            # of problems sizes (N)
{size}       Ns
1            # of NBs
{block}      NBs
0            PMAP process mapping (0=Row-,1=Column-major)
1            # of process grids (P x Q)
{rows}       Ps
{columns}    Qs
16.0         threshold
1            # of panel fact
2            PFACTs (0=left, 1=Crout, 2=Right)
1            # of recursive stopping criterium
4            NBMINs (>= 1)
1            # of panels in recursion
2            NDIVs
1            # of recursive panel fact.
1            RFACTs (0=left, 1=Crout, 2=Right)
1            # of broadcast
1            BCASTs (0=1rg,1=1rM,2=2rg,3=2rM,4=Lng,5=LnM)
1            # of lookahead depth
1            DEPTHs (>=0)
2            SWAP (0=bin-exch,1=long,2=mix)
64           swapping threshold
0            L1 in (0=transposed,1=no-transposed) form
0            U  in (0=transposed,1=no-transposed) form
1            Equilibration (0=no,1=yes)
8            memory alignment in double (> 0)
##### This line (no. 32) is ignored (it serves as a separator). ######
0            Number of additional problem sizes for PTRANS
1200         values of N
0            number of additional blocking sizes for PTRANS
40           values of NB
"""
LAUNCHER_VARIABLES = ("SLURM_", "PMIX_", "PMI_", "OMPI_", "PRTE_")
"""hpcc runs on this node alone, under an mpirun that must not notice the job around it."""


def measure_hpcc(rank: Rank, options: Dict[str, Any]) -> None:
    """The rows `hpl` and `stream`: one run of hpcc on all CPUs of the node."""
    for program, package in (("hpcc", "hpcc"), ("mpirun", "openmpi-bin")):
        if shutil.which(program) is None:
            raise MissingTool(program, package)
    cpus = len(os.sched_getaffinity(0))
    memory = usable_memory(memory_bytes(), int(options.get("memory_mb", 0)))
    size = problem_size(memory, float(options["hpl_memory"]), int(options["hpl_order"]), cpus)
    with tempfile.TemporaryDirectory(prefix="shoal-hpcc-") as directory:
        with open(os.path.join(directory, "hpccinf.txt"), "w", encoding="utf-8") as file:
            file.write(input_text(size, cpus))
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        command += ["--host", "localhost:%d" % cpus, "-n", str(cpus), "hpcc"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
        done = subprocess.run(
            command,
            cwd=directory,
            env={**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=HPCC_TIMEOUT_S,
        )
        path = os.path.join(directory, "hpccoutf.txt")
        text = ""
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
    if done.returncode != 0:
        lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
        raise RuntimeError("hpcc ended with status %d: %s" % (done.returncode, lines[-1] if lines else "no output"))
    emit(rank, "hpcc", size=size, cpus=cpus, **parse_hpcc(text))


def input_text(size: int, cpus: int) -> str:
    rows, columns = grid(cpus)
    return INPUT.format(size=size, block=min(BLOCK, size), rows=rows, columns=columns)


def grid(count: int) -> Tuple[int, int]:
    """The processes as a rectangle that is as square as possible."""
    rows = next(number for number in range(int(math.sqrt(count)), 0, -1) if count % number == 0)
    return rows, count // rows


def problem_size(memory: int, fraction: float, order: int, cpus: int) -> int:
    """The order of the matrix, as a multiple of the block: as large for each CPU, or a fraction of the memory.

    hpcc does not finish where its processes have next to nothing each. Of much memory it would take hours.
    """
    longest = (1.5 * HPL_SECONDS * CPU_FLOPS * cpus) ** (1 / 3)
    size = order * math.sqrt(cpus) if order else min(longest, math.sqrt(memory * fraction / 8))
    return max(BLOCK, int(size) // BLOCK * BLOCK)


def usable_memory(shown: int, memory_mb: int) -> int:
    """A container shows the memory of its machine. What Slurm has of the node is what jobs may use."""
    return min(shown, memory_mb << 20) if memory_mb else shown


def memory_bytes() -> int:
    """The memory that the job may use: the cgroup's limit, or all of the node."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="ascii") as file:
        group = file.read().strip().splitlines()[-1].split(":", 2)[2]
        while group not in ("", "/"):
            path = "/sys/fs/cgroup%s/memory.max" % group
            with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as limit:
                limits.append(int(limit.read()))
            group = os.path.dirname(group)
    return min(limits)


def parse_hpcc(text: str) -> Dict[str, Any]:
    """What hpccoutf.txt says: speeds, and whether HPL's result was right."""
    summary = dict(re.findall(r"^(\w+)=(\S+)$", text.partition("Begin of Summary section.")[2], re.MULTILINE))
    if summary.get("Success") != "1" or "HPL_Tflops" not in summary:
        raise RuntimeError("hpcc did not finish: its output has no summary with Success=1")
    failed = re.search(r"^\s*(\d+) tests completed and failed residual checks", text, re.MULTILINE)
    wrong = int(failed.group(1)) if failed else int("FAILED" in text)
    processes = int(summary.get("CommWorldProcs", "1"))
    return {
        "gflops": float(summary["HPL_Tflops"]) * 1000,
        "triad": float(summary["StarSTREAM_Triad"]) * processes,
        "single_triad": float(summary["SingleSTREAM_Triad"]),
        "wrong": wrong,
        "version": "hpcc %s.%s.%s"
        % tuple(summary.get(name, "?") for name in ("VersionMajor", "VersionMinor", "VersionMicro")),
    }


def measure_fio(rank: Rank, options: Dict[str, Any]) -> None:
    """The rows `fio`: a file written and read in each share, and in the scratch directory of the node."""
    if shutil.which("fio") is None:
        raise MissingTool("fio", "fio")
    for name, directory in [*((path, path) for path in options["shares"]), ("scratch", tempfile.gettempdir())]:
        try:
            values = measure_directory(directory, str(options["fio_size"]), str(options["fio_seconds"]))
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            emit(rank, "fio", directory=name, problem=str(error))
        else:
            emit(rank, "fio", directory=name, **values)


def measure_directory(directory: str, size: str, seconds: str) -> Dict[str, Any]:
    place = make_directory(directory)
    try:
        common = ["fio", "--name=validate", "--directory=" + place, "--filename=data", "--bs=1M", "--size=" + size]
        common += ["--output-format=json", "--ioengine=psync", "--runtime=" + seconds]
        written = run_fio([*common, "--rw=write", "--end_fsync=1"], "write")
        read = run_fio([*common, "--rw=read", "--invalidate=1"], "read")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return {"write": written["bw_bytes"] / 1e9, "read": read["bw_bytes"] / 1e9, "version": written["version"]}


def make_directory(directory: str) -> str:
    """A directory of this user's in a share: directly in it, or in the user's own part of it."""
    for place in (directory, os.path.join(directory, getpass.getuser())):
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix=".shoal-validate-", dir=place)
    raise RuntimeError("%s cannot write to %s" % (getpass.getuser(), directory))


def run_fio(command: Any, kind: str) -> Dict[str, Any]:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=FIO_TIMEOUT_S
    )
    text = done.stdout.decode("utf-8", "replace")
    return parse_fio(text, kind, done.stderr.decode("utf-8", "replace"))


def parse_fio(text: str, kind: str, errors: str = "") -> Dict[str, Any]:
    """One job of fio's JSON. fio may print notes before it, and ends with 0 although the job has an error."""
    try:
        report = json.loads(text[text.index("{") :])
        job = report["jobs"][0]
    except (ValueError, KeyError, IndexError):
        lines = (errors or text).strip().splitlines()
        raise RuntimeError("fio: %s" % (lines[-1] if lines else "no output")) from None
    if job.get("error"):
        raise RuntimeError("fio: %s" % os.strerror(int(job["error"])))
    return {"bw_bytes": job[kind]["bw_bytes"], "iops": job[kind]["iops"], "version": report.get("fio version", "fio")}
