"""A rank of the validation: where it runs, what it gets from its launcher, and how it reports results."""

from __future__ import annotations

import glob
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from typing import Any, Dict, Iterable, List, NamedTuple, Tuple

PREFIX = "shoal-validate "
"""Begins every line with a result."""
TOOL_TIMEOUT_S = 60.0
SHOWN_VARIABLES = (
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TMPDIR"),
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MKL_NUM_THREADS"),
)
SHOWN_PREFIXES = ("SLURM_", "NCCL_", "GLOO_", "TP_SOCKET", "OMPI_MCA_", "PRTE_MCA_", "UCX_", "PMIX_MCA_", "TORCH_")
HIDDEN_WORDS = ("PASSWORD", "TOKEN", "SECRET", "KEY", "CREDENTIAL")
"""Variables with such a word in their names are nobody's business."""
MAX_VALUE = 400
"""Characters of a variable that are reported."""
MAX_ALL_PAIRS_NODES = 16
"""With more nodes, each is only paired with its neighbours."""


class MissingTool(Exception):
    """A program or library that a test needs is not on the node. It is a reason not to run, not a failure."""

    def __init__(self, tool: str, package: str) -> None:
        super().__init__("%s is not installed" % tool)
        self.tool = tool
        self.package = package


class Rank(NamedTuple):
    """This process among those of the job."""

    rank: int
    local_rank: int
    world: int
    node: str


def read_rank(environ: Dict[str, str]) -> Rank:
    """What Shoal's launchers tell every rank."""
    return Rank(
        int(environ.get("RANK", "0")),
        int(environ.get("LOCAL_RANK", "0")),
        int(environ.get("WORLD_SIZE", "1")),
        environ.get("SLURMD_NODENAME") or socket.gethostname(),
    )


def emit(rank: Rank, test: str, **values: Any) -> None:
    """Report a result: one line of JSON. The logs of the job carry it."""
    record = {"test": test, "node": rank.node, "rank": rank.rank, **values}
    sys.stdout.write(PREFIX + json.dumps(record, sort_keys=True) + "\n")
    sys.stdout.flush()


def report_place(rank: Rank, options: Dict[str, Any]) -> None:
    """The row `cpu`: that the rank runs at all, where, with how many CPUs, and in which environment."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    emit(
        rank,
        "cpu",
        local_rank=rank.local_rank,
        world=rank.world,
        cpus=len(os.sched_getaffinity(0)),
        python="%d.%d.%d %s" % (*sys.version_info[:3], sys.executable),
        vendor=_read("/sys/class/dmi/id/sys_vendor"),
        memlock="unlimited" if soft == resource.RLIM_INFINITY else str(soft),
        environment=shown_environment(dict(os.environ)),
    )


def shown_environment(environ: Dict[str, str]) -> Dict[str, str]:
    """The variables that decide how a rank runs. Those that may be secret are left out."""
    return {
        name: value[:MAX_VALUE]
        for name, value in sorted(environ.items())
        if (name in SHOWN_VARIABLES or name.startswith(SHOWN_PREFIXES))
        and not any(word in name.upper() for word in HIDDEN_WORDS)
    }


def report_mpirun(rank: Rank, options: Dict[str, Any]) -> None:
    """The row `mpirun`: path, version and PMIx support of the one that the rank finds first, and how many there are."""
    if rank.local_rank != 0:
        return
    paths = find_programs("mpirun", os.environ.get("PATH", ""))
    if not paths:
        raise MissingTool("mpirun", "openmpi-bin")
    path = os.path.realpath(paths[0])
    version = first_line([paths[0], "--version"])
    if "Open MPI" not in version and "OpenRTE" not in version:
        version = next((line.strip() for line in output([paths[0], "--version"]) if "Version" in line), version)
        emit(rank, "mpirun", path=paths[0], version=version, pmix="", others=paths[1:], kind="other")
        return
    info = os.path.join(os.path.dirname(paths[0]), "ompi_info")
    lines = output([info, "--parsable"]) if os.access(info, os.X_OK) else []
    emit(
        rank,
        "mpirun",
        path=paths[0],
        target=path,
        version=version,
        pmix=pmix_support(lines),
        others=paths[1:],
        kind="openmpi",
        plugins=slurm_plugins(output(["srun", "--mpi=list"])),
    )


def find_programs(name: str, path: str) -> List[str]:
    """Every program of this name in the search path, the first one first; one file counts once."""
    programs: Dict[str, str] = {}
    for directory in path.split(os.pathsep):
        program = shutil.which(name, path=directory) if directory else None
        if program:
            programs.setdefault(os.path.realpath(program), program)
    return list(programs.values())


def pmix_support(lines: Iterable[str]) -> str:
    """How Open MPI speaks PMIx, from `ompi_info --parsable`: its component, or `built in` from release 5 on."""
    components = []
    for line in lines:
        fields = line.split(":")
        if fields[:2] == ["mca", "pmix"] and len(fields) > 2 and fields[2] not in ("isolated", "flux", "base"):
            components.append(fields[2])
        elif fields[:2] == ["ompi", "version"] and len(fields) > 3 and fields[2] == "full" and fields[3][:1] >= "5":
            components.append("built in")
    return ", ".join(sorted(set(components)))


def slurm_plugins(lines: Iterable[str]) -> List[str]:
    """The kinds of MPI that Slurm supports, from `srun --mpi=list`, which has another layout in each release."""
    words = [line.replace("srun:", "").strip() for line in lines]
    return [word for word in words if word and " " not in word.rstrip(":") and not word.endswith(":")]


def output(command: List[str]) -> List[str]:
    """The lines of a program, of both streams; none where it does not run."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=TOOL_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.decode("utf-8", "replace").splitlines()


def first_line(command: List[str]) -> str:
    return next((line.strip() for line in output(command) if line.strip()), "")


def rounds(names: List[str]) -> List[List[Tuple[str, str]]]:
    """Pairs, in rounds in which no node is in two: all of them, or only neighbours where that would take long."""
    if len(names) > MAX_ALL_PAIRS_NODES:
        ring = list(zip(names, names[1:] + names[:1]))
        even = [pair for place, pair in enumerate(ring) if place % 2 == 0 and pair[1] != names[0]]
        odd = [pair for place, pair in enumerate(ring) if place % 2]
        return [even, odd]
    table = names + [""] * (len(names) % 2)
    schedule = []
    for _ in range(len(table) - 1):
        half = len(table) // 2
        schedule.append([(a, b) for a, b in zip(table[:half], reversed(table[half:])) if a and b])
        table.insert(1, table.pop())
    return schedule


def bus_bandwidth(size: int, seconds: float, ranks: int) -> Tuple[float, float]:
    """GB/s of an all-reduce: by size alone, and of the bus, as nccl-tests counts them."""
    algorithm = size / seconds / 1e9 if seconds > 0 else 0.0
    return algorithm, algorithm * 2 * (ranks - 1) / ranks


def size_row(size: int, seconds: float, ranks: int, wrong: int) -> Dict[str, Any]:
    """One line of the table of nccl-tests."""
    algorithm, bus = bus_bandwidth(size, seconds, ranks)
    values = {"size": size, "count": size // 4, "us": seconds * 1e6, "algbw": algorithm, "busbw": bus, "wrong": wrong}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


def library_beside(program: str, names: Tuple[str, ...]) -> str:
    """The library of these names that belongs to a program: a conda's mpirun needs the conda's libmpi."""
    path = shutil.which(program)
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(path))) if path else ""
    for name in names if prefix not in ("", "/usr", "/") else ():
        match = sorted(glob.glob(os.path.join(prefix, "lib*", name)))
        if match:
            return match[0]
    return names[0]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""
