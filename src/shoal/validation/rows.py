"""The rows of the table, read from what the ranks printed. A test without a result has failed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from shoal.hostlist import compress
from shoal.remote.validation.place import PREFIX
from shoal.validation.types import (
    JobOutcome,
    MpirunProgram,
    PairSpeed,
    SizeSpeed,
    StepEnvironment,
    ValidationRow,
)

Record = Mapping[str, Any]

TORCH_FIX = "name an environment that has it with --env, or a Python with --python"
PACKAGE_FIXES = {
    "torch": TORCH_FIX,
    **dict.fromkeys(("openmpi-bin", "hpcc", "fio"), "set `mpi: openmpi` in the file and run `shoal up`"),
}
MPI_START = re.compile(r"orte_(?:ess_)?init failed|PMIX ERROR|pmix_v\d\S* .*fail|Invalid MPI type|couldn't find.*pmix")
_NO_MPIRUN = re.compile(r"shoal: no mpirun of Open MPI on (\S+)")
_NO_TORCH = re.compile(r"No module named '?torch")


def read_records(lines: Iterable[str]) -> list[Record]:
    """The results in the output of a job. A line that a dying rank did not finish is no result."""
    records: list[Record] = []
    for line in lines:
        if line.startswith(PREFIX):
            try:
                record = json.loads(line.removeprefix(PREFIX))
            except ValueError:
                continue
            if isinstance(record, dict) and {"test", "node", "rank"} <= record.keys():
                records.append(record)
    return records


def read_rows(outcome: JobOutcome) -> list[ValidationRow]:
    """A row for every test of the job, whatever came of it; several for a test with several results."""
    records = read_records(outcome.lines)
    vendor = next((str(record["vendor"]) for record in records if record.get("vendor")), "")
    base = ValidationRow(outcome.job.title, "", compress(outcome.job.nodes), "failed", job=outcome.id, vendor=vendor)
    if missing := _missing_launcher(outcome, records):
        package, detail = missing
        base = replace(base, status="not run", package=package, detail=detail, fix=package_fix(package))
        return [replace(base, test=name) for test in outcome.job.tests for name in ROW_NAMES[test]]
    return [row for test in outcome.job.tests for row in _read_test(outcome, test, records, base)]


def _missing_launcher(outcome: JobOutcome, records: Sequence[Record]) -> tuple[str, str] | None:
    """What the launcher itself lacks, where no rank could start for that."""
    if records:
        return None
    text = "\n".join((outcome.reason, *outcome.lines))
    if match := _NO_MPIRUN.search(text) or re.search(r"no mpirun of Open MPI on (\S+)", text):
        return "openmpi-bin", f"no mpirun of Open MPI on {match[1]}"
    if _NO_TORCH.search(text):
        return "torch", "torchrun is part of torch, which this Python does not have"
    return None


def _read_test(
    outcome: JobOutcome, test: str, all_records: Sequence[Record], base: ValidationRow
) -> list[ValidationRow]:
    names = ROW_NAMES[test]
    records = [record for record in all_records if record["test"] in RECORD_NAMES[test]]
    problems = [record for record in records if record.get("problem") and "directory" not in record]
    if missing := [record for record in problems if record.get("missing")]:
        package, where = missing[0]["missing"], compress(dict.fromkeys(record["node"] for record in missing))
        detail = f"{missing[0]['problem']} on {where}"
        image = outcome.job.image
        fix = f"install {package} in image {image}" if image else package_fix(package)
        row = replace(base, status="not run", package=package, detail=detail, fix=fix)
        return [replace(row, test=name) for name in names]
    if problems:
        first = problems[0]
        detail = f"rank {first['rank']} on {first['node']}: {first['problem']}"
        return [replace(base, test=name, detail=detail, fix=_fix(detail)) for name in names]
    if not records:
        detail = outcome.reason or "it left no result"
        fix = outcome.fix or _fix("\n".join(outcome.lines)) or f"look at `shoal logs {outcome.id}`"
        return [replace(base, test=name, detail=detail, fix=fix) for name in names]
    return READERS[test](outcome, records, base)


def package_fix(package: str) -> str:
    return PACKAGE_FIXES.get(package, f"install the package {package} on the nodes")


def _fix(text: str) -> str:
    if MPI_START.search(text):
        return "start it with Slurm's PMIx (--launcher pmix), and with a libmpi that was built with PMIx"
    if "do not fit together" in text:
        return "use the mpirun and libmpi of one installation: a conda's mpirun before the system's is a usual cause"
    return ""


def _read_cpu(outcome: JobOutcome, records: Sequence[Record], base: ValidationRow) -> list[ValidationRow]:
    job = outcome.job
    row = replace(base, test="cpu", ranks=job.world_size)
    by_rank = {int(record["rank"]): record for record in records}
    if missing := [rank for rank in range(job.world_size) if rank not in by_rank]:
        ranks = ", ".join(map(str, missing[:8]))
        detail = f"{len(missing)} of {job.world_size} ranks did not start: {ranks}; {outcome.reason}".rstrip("; ")
        return [replace(row, detail=detail, fix=outcome.fix or f"look at `shoal logs {outcome.id}`")]
    for node in job.nodes:
        ranks_here = sum(record["node"] == node for record in by_rank.values())
        if ranks_here != job.ranks_per_node:
            detail = f"{node} has {ranks_here} ranks instead of {job.ranks_per_node}"
            return [replace(row, detail=detail, fix="look for a host name that two nodes have in common")]
    cpus = [int(record["cpus"]) for record in by_rank.values()]
    if min(cpus) < job.cpus:
        poor = next(record for record in by_rank.values() if record["cpus"] == min(cpus))
        detail = f"rank {poor['rank']} on {poor['node']} may use {min(cpus)} of {job.cpus} CPUs"
        fix = "look for a binding to cores: SLURM_CPU_BIND, OMPI_MCA_hwloc_base_binding_policy"
        return [replace(row, detail=detail, fix=fix)]
    return [replace(row, status="passed", detail=f"{job.world_size} ranks, {min(cpus)} CPUs each")]


def _read_mpirun(outcome: JobOutcome, records: Sequence[Record], base: ValidationRow) -> list[ValidationRow]:
    row = replace(base, test="mpirun", version=str(records[0]["version"]))
    versions = {str(record["version"]) for record in records}
    others = [record for record in records if record.get("kind") != "openmpi"]
    if others:
        detail = f"{others[0]['path']} on {others[0]['node']} is not Open MPI: {others[0]['version']}"
        return [replace(row, detail=detail, fix="put Open MPI first in PATH, or use --launcher pmix")]
    if len(versions) > 1:
        detail = "; ".join(f"{record['node']}: {record['version']}" for record in records)
        return [replace(row, detail=f"nodes have different releases: {detail}", fix="install one release on all nodes")]
    without = [record for record in records if not record.get("pmix")]
    if without:
        detail = f"{without[0]['path']} on {without[0]['node']} was built without PMIx"
        return [replace(row, detail=detail, fix="use mpirun for its programs: srun --mpi=pmix cannot start them")]
    first = records[0]
    return [replace(row, status="passed", detail=f"{first['path']}, PMIx: {first['pmix']}")]


def _read_gpu(outcome: JobOutcome, records: Sequence[Record], base: ValidationRow) -> list[ValidationRow]:
    names = sorted({name for record in records for name in record["gpus"]})
    row = replace(base, test="gpu", gpu=", ".join(names), ranks=len(records))
    short = [record for record in records if len(record["gpus"]) < int(record["expected"])]
    if short:
        first = short[0]
        detail = f"rank {first['rank']} on {first['node']} opens {len(first['gpus'])} of {first['expected']} GPUs"
        return [replace(row, detail=detail, fix=f"`shoal doctor --node {first['node']}`")]
    wrong = [record for record in records if record.get("wrong")]
    if wrong:
        detail = f"{wrong[0]['node']}: a matrix product has {wrong[0]['wrong']} wrong values"
        return [replace(row, detail=detail, fix="take the node out of service: the GPU or its memory is faulty")]
    by_node = _lowest(records, "tflops")
    speeds = [f"{record['h2d']:.1f} GB/s from host memory" for record in records if "h2d" in record][:1]
    speeds += [f"{record['d2d']:.1f} GB/s between GPUs" for record in records if "d2d" in record][:1]
    notes = [str(record["note"]) for record in records if record.get("note")][:1]
    value = min(by_node.values()) if by_node else None
    unit = "TFLOP/s" if by_node else ""
    detail = ", ".join((*speeds, *notes)) or f"{records[0]['expected']} a node; without torch no speed is measured"
    rows = [replace(row, status="passed", value=value, unit=unit, detail=detail, by_node=by_node)]
    for name, test in (("h2d", "gpu copy from host"), ("d2d", "gpu copy between gpus")):
        if speeds_by_node := _lowest(records, name):
            copy = replace(row, test=test, status="passed", unit="GB/s", by_node=speeds_by_node)
            rows.append(replace(copy, value=min(speeds_by_node.values())))
    return rows


def _lowest(records: Iterable[Record], name: str) -> dict[str, float]:
    """The lowest value of each node."""
    values: dict[str, float] = {}
    for record in records:
        if name in record:
            node, value = str(record["node"]), float(record[name])
            values[node] = min(value, values.get(node, value))
    return values


def _read_torch(outcome: JobOutcome, records: Sequence[Record], base: ValidationRow) -> list[ValidationRow]:
    whole = next((record for record in records if record["test"] == "torch"), None)
    if whole is None:
        detail = "not all ranks finished the all-reduce"
        return [replace(base, test="all-reduce", detail=outcome.reason or detail, fix=outcome.fix)]
    row = _read_sizes(whole, replace(base, test=f"all-reduce {whole['backend']}", pairs=_pairs(records)))
    rows = [replace(row, version=str(whole["version"]), gpu=str(whole.get("gpu", "")))]
    inside = [record for record in records if record["test"] == "torch-node"]
    if inside:
        by_node = {str(record["node"]): float(record["speed"]) for record in inside}
        slowest = min(inside, key=lambda record: float(record["speed"]))
        sizes = tuple(SizeSpeed(**size) for size in slowest["sizes"])
        node_row = replace(rows[0], test=f"{rows[0].test} in a node", sizes=sizes, pairs=(), by_node=by_node)
        missing = [node for node in outcome.job.nodes if node not in by_node]
        wrong = [record for record in inside if record["wrong"]]
        problem = f"{compress(missing)} left no result" if missing else _wrong(wrong[0]) if wrong else ""
        status, value = ("failed" if problem else "passed"), min(by_node.values())
        rows.append(replace(node_row, status=status, value=value, detail=problem, ranks=int(inside[0]["ranks"])))  # type: ignore[arg-type]
    elif len(outcome.job.nodes) == 1 and rows[0].value is not None:
        rows[0] = replace(rows[0], by_node={outcome.job.nodes[0]: rows[0].value})
    return rows


def _read_sizes(record: Record, row: ValidationRow) -> ValidationRow:
    """An all-reduce. The largest size counts: it is limited by bandwidth, as training is."""
    sizes = tuple(SizeSpeed(**size) for size in record["sizes"])
    largest = sizes[-1]
    row = replace(row, sizes=sizes, ranks=int(record["ranks"]), value=largest.busbw, unit="GB/s")
    if wrong := next((size for size in sizes if size.wrong), None):
        detail = f"{wrong.wrong} of {wrong.count} values of {wrong.size} bytes are wrong"
        return replace(row, status="failed", detail=detail, fix="do not train here before the cause is known")
    return replace(row, status="passed", detail=f"bus bandwidth at {size_text(largest.size)}")


def _wrong(record: Record) -> str:
    return f"{record['wrong']} values are wrong on {record['node']}"


def _pairs(records: Iterable[Record]) -> tuple[PairSpeed, ...]:
    return tuple(
        PairSpeed(record["pair"][0], record["pair"][1], float(record["speed"]), record.get("latency_us"))
        for record in records
        if "pair" in record and "speed" in record
    )


def _read_mpi(outcome: JobOutcome, records: Sequence[Record], base: ValidationRow) -> list[ValidationRow]:
    whole = next((record for record in records if record["test"] == "mpi"), None)
    pairs = _pairs(records)
    if whole is None:
        reduce_row = replace(base, test="mpi all-reduce", detail=outcome.reason or "rank 0 left no result")
    else:
        reduce_row = _read_sizes(whole, replace(base, test="mpi all-reduce"))
    row = replace(base, test="mpi ping-pong", pairs=pairs, ranks=2, unit="GB/s")
    if not pairs:
        if len(outcome.job.nodes) == 1:
            return [reduce_row]
        return [reduce_row, replace(row, detail=outcome.reason or "no pair of nodes left a result", fix=outcome.fix)]
    latency = median(pair.latency_us or 0.0 for pair in pairs)
    slowest = min(pairs, key=lambda pair: pair.speed)
    detail = f"median latency {latency:.1f} us; slowest pair {slowest.first} and {slowest.second}"
    return [reduce_row, replace(row, status="passed", value=slowest.speed, detail=detail)]


def _read_links(outcome: JobOutcome, records: Sequence[Record], base: ValidationRow) -> list[ValidationRow]:
    pairs = _pairs(records)
    row = replace(base, test="links", pairs=pairs, unit="GB/s")
    measured = {node for pair in pairs for node in (pair.first, pair.second)}
    if silent := [node for node in outcome.job.nodes if node not in measured]:
        return [replace(row, detail=f"{compress(silent)} was not measured", fix="`shoal bench links` shows why")]
    slowest = min(pairs, key=lambda pair: pair.speed)
    detail = f"TCP; slowest from {slowest.first} to {slowest.second}"
    return [replace(row, status="passed", value=slowest.speed, detail=detail)]


def _read_hpcc(outcome: JobOutcome, records: Sequence[Record], base: ValidationRow) -> list[ValidationRow]:
    missing = [node for node in outcome.job.nodes if node not in {record["node"] for record in records}]
    problem = f"{compress(missing)} left no result" if missing else ""
    first, rows = records[0], []
    for test, name, unit in (("hpl", "gflops", "Gflop/s"), ("stream", "triad", "GB/s")):
        by_node = _lowest(records, name)
        row = replace(base, test=test, unit=unit, by_node=by_node, version=str(first["version"]), ranks=first["cpus"])
        wrong = [record["node"] for record in records if record["wrong"]] if test == "hpl" else []
        row_problem = problem or (f"HPL's result is wrong on {compress(wrong)}" if wrong else "")
        detail = f"N={first['size']}" if test == "hpl" else "triad on all CPUs"
        status = "failed" if row_problem else "passed"
        row = replace(row, status=status, value=min(by_node.values()), detail=row_problem or detail)  # type: ignore[arg-type]
        fix = "take the node out of service: its CPU or memory is faulty" if wrong else outcome.fix
        rows.append(replace(row, fix=fix if row_problem else ""))
    return rows


def _read_fio(outcome: JobOutcome, records: Sequence[Record], base: ValidationRow) -> list[ValidationRow]:
    rows = []
    for directory in dict.fromkeys(str(record["directory"]) for record in records):
        own = [record for record in records if record["directory"] == directory]
        row = replace(base, test=f"fio {directory}", unit="GB/s")
        if problems := [record for record in own if record.get("problem")]:
            detail = f"{problems[0]['node']}: {problems[0]['problem']}"
            # Not to be allowed to write is no fault of the disk.
            status = "not run" if "cannot write to" in detail else "failed"
            rows.append(replace(row, status=status, detail=detail, fix="" if status == "failed" else _WRITE_FIX))  # type: ignore[arg-type]
            continue
        by_node = _lowest(own, "write")
        missing = [node for node in outcome.job.nodes if node not in by_node]
        detail = f"written; read {min(float(record['read']) for record in own):.2f} GB/s"
        row = replace(row, version=str(own[0]["version"]), by_node=by_node, value=min(by_node.values()))
        if missing:
            rows.append(replace(row, detail=f"{compress(missing)} left no result", fix=outcome.fix))
        else:
            rows.append(replace(row, status="passed", detail=detail))
    return rows


_WRITE_FIX = "ask the operator for a directory of yours there"

READERS: Mapping[str, Callable[[JobOutcome, Sequence[Record], ValidationRow], list[ValidationRow]]] = {
    "cpu": _read_cpu,
    "mpirun": _read_mpirun,
    "gpu": _read_gpu,
    "torch": _read_torch,
    "mpi": _read_mpi,
    "links": _read_links,
    "hpcc": _read_hpcc,
    "fio": _read_fio,
}
ROW_NAMES: Mapping[str, tuple[str, ...]] = {
    **{"cpu": ("cpu",), "mpirun": ("mpirun",), "gpu": ("gpu",), "torch": ("all-reduce",), "links": ("links",)},
    **{"mpi": ("mpi all-reduce", "mpi ping-pong"), "hpcc": ("hpl", "stream"), "fio": ("fio",)},
}
"""The rows of each test."""
RECORD_NAMES: Mapping[str, tuple[str, ...]] = {
    **{test: (test,) for test in READERS},
    "torch": ("torch", "torch-node", "torch-pair"),
    "mpi": ("mpi", "mpi-pair"),
    "links": ("links", "link-pair"),
}
"""What the results of each test are called."""


def read_mpiruns(outcomes: Iterable[JobOutcome]) -> tuple[MpirunProgram, ...]:
    records = (record for outcome in outcomes for record in read_records(outcome.lines))
    return tuple(
        MpirunProgram(
            record["node"], record["path"], record["version"], record.get("pmix", ""), tuple(record.get("others", ()))
        )
        for record in records
        if record["test"] == "mpirun" and "path" in record
    )


def read_environments(outcomes: Iterable[JobOutcome]) -> tuple[StepEnvironment, ...]:
    """What rank 0 of each launcher gets."""
    environments: dict[str, StepEnvironment] = {}
    for outcome in outcomes:
        for record in read_records(outcome.lines):
            if record["test"] == "cpu" and record["rank"] == 0 and "environment" in record:
                title, names = outcome.job.title, ("node", "cpus", "python", "memlock", "environment")
                environments.setdefault(title, StepEnvironment(title, *(record[name] for name in names)))
    return tuple(environments.values())


def size_text(size: int) -> str:
    """Bytes as a person reads them: 64 KiB, 1 GiB."""
    units = ("B", "KiB", "MiB", "GiB")
    place = 0
    while size >= 1024 and size % 1024 == 0 and place < len(units) - 1:
        size, place = size // 1024, place + 1
    return f"{size} {units[place]}"
