"""Why a job failed, worked out from what was observed: Slurm's record, how each rank ended, and what it printed. Pure.

When one rank fails, the others die after it: of a broken connection, or because srun ends them. So the first one by
time counts, and a rank that was ended by someone else's signal is not first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.contract import EXIT_REQUEUE, EXIT_UNSAVED
from shoal.jobs.logs import BATCH, JobLogs, LogLine, RankEnd
from shoal.jobs.mpi_failure import explain_mpi
from shoal.jobs.record import JobRecord

Kind = Literal[
    "cancelled", "time limit", "node failure", "out of memory", "rendezvous", "checkpoint", "script", "start", "unknown"
]

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|^MemoryError|Cannot allocate memory|DefaultCPUAllocator"
)
_RENDEZVOUS = re.compile(
    r"RendezvousError|Rendezvous\w*Error|DistStoreError|DistNetworkError|EADDRINUSE|Address already in use"
    r"|TCPStore|Connect\w* timed? ?out|client socket has timed out|wait timeout"
)
_UNSAVED = re.compile(r"the checkpoint of step \d+ \(.*?\) FAILED: (.*) \(failure \d+ of this process\)")
_DEAD_WORKER = re.compile("DataLoader worker .* killed by signal: (Terminated|User defined)")
_COLLECTIVE_TIMEOUT = re.compile(r"Timed out waiting \d+ ?ms|collective operation timeout|timed out in call to wait")
_MISSING_FILE = re.compile(r"FileNotFoundError: \[Errno 2\] No such file or directory: '(.+)'")
_TRACEBACK = "Traceback (most recent call last):"
_SLURM_OOM = re.compile(r"oom[-_ ]?kill|Out Of Memory", re.IGNORECASE)
_OWN_WARNING = re.compile("tracking: ")
"""How lines begin that the training library prints of its own accord, at any time."""
NO_OUTPUT_SIGNAL = 53
"""The "signal" of a job whose batch script did not start: its node could not open the file for its output."""
_UNREACHED = "shoal: torchrun on "
"""How the runner's report about an unreachable first node begins."""
_NO_MPIRUN = "shoal: no mpirun of Open MPI on "
"""How the batch script's report about nodes begins that lack it."""
_LOST = "shoal: lost in turn {}: "
"""How the report about ranks begins that are gone without Slurm's notice."""
_NODE = re.compile(r"Node failure on (\S+)")  # srun's words; slurmstepd names the node it runs on itself
_LINES = 50
_LINES_AFTER_RAISE = 16
"""Of so many lines an error's text is shown."""


@dataclass(frozen=True)
class FailureReason:
    """Why a job failed."""

    kind: Kind
    text: str
    """One sentence."""
    rank: int | None = None
    node: str = ""
    details: tuple[str, ...] = ()
    """The lines that show it: the traceback of the first rank that failed."""
    fix: str = ""


_UNFINISHED = FailureReason(
    "checkpoint",
    "it was stopped before its end, saved its work, and was not queued again",
    fix="run it again with the same directory for its checkpoints: it goes on from there; without --no-requeue it "
    "does so by itself",
)
_MEMORY_FIX = "give it more with --mem, or use less: a smaller batch, fewer data workers"


def explain_failure(record: JobRecord, logs: JobLogs) -> FailureReason | None:
    """Why the job failed; None when it did not."""
    if not record.failed:
        return None
    restart = max([record.restarts, *(end.restart for end in logs.ends)])
    ends = [end for end in logs.ends if end.restart == restart]
    lines = [line for line in logs.lines if line.restart == restart and line.rank != BATCH]
    batch = [line.text for line in logs.lines if line.rank == BATCH]
    first = first_failure(ends)
    if record.rejected:
        text = "Slurm rejected the job when it was submitted, and told who submitted it why"
        return FailureReason("start", text, fix="submit it again: `shoal run` prints the reason")
    if record.state == "CANCELLED":
        return FailureReason("cancelled", "the job was cancelled")
    if record.state == "PREEMPTED":
        text = "the job was preempted by one of a higher partition"
        return FailureReason("cancelled", text, fix="submit it with --requeue")
    if record.state in ("TIMEOUT", "DEADLINE"):
        return _time_limit(record, ends)
    if record.state in ("NODE_FAIL", "BOOT_FAIL"):
        return _node_failure(record, batch)
    if record.exit_code == EXIT_REQUEUE:
        return _UNFINISHED
    lost = _LOST.format(restart)
    if report := next((text for text in reversed(batch) if text.startswith(lost)), ""):
        return _lost_ranks(report.removeprefix(lost))
    if EXIT_UNSAVED in (record.exit_code, first.status if first else 0):
        return _checkpoint_failure(first, lines)
    if memory := _out_of_memory(record, ends, lines, batch, first):
        return memory
    if mpi := _mpi_failure(record, first, lines, batch):
        return mpi
    if first is not None:
        return _script(first, lines)
    if record.exit_signal == NO_OUTPUT_SIGNAL:
        return _output_failure(record)
    if lines:
        return _killed_ranks(lines)
    return _start_failure(record, batch)


def missing_file(reason: FailureReason) -> str:
    """The path of the file that the script did not find; empty where it failed of something else."""
    return next((match[1] for text in reversed(reason.details) if (match := _MISSING_FILE.match(text))), "")


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that failed first, by itself if there is one that did."""
    failed = sorted((end for end in ends if end.status != 0), key=lambda end: end.end)
    causes = [end for end in failed if not _is_ended_by_others(end)]
    return next(iter(causes or failed), None)


def last_traceback(lines: Sequence[str]) -> tuple[str, ...]:
    """The last Python traceback, with those it was raised from; the last lines where there is none."""
    starts = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return tuple([line for line in lines if not _OWN_WARNING.match(line)][-10:])
    first = starts[-1]
    for earlier in reversed(starts[:-1]):
        between = " ".join(lines[earlier:first])
        if "The above exception was the direct cause" in between or "During handling of the above" in between:
            first = earlier
        else:
            break
    excerpt = lines[first : _error_line(lines) + _LINES_AFTER_RAISE]
    if len(excerpt) <= _LINES:
        return tuple(excerpt)
    half = _LINES // 2  # where it began and what it came to: what is in between tells least
    return (*excerpt[:half], "...", *excerpt[1 - half :])


def _error_line(lines: Sequence[str]) -> int:
    """Where the error of the last traceback stands: behind its frames, which are indented."""
    start = max((number for number, line in enumerate(lines) if _TRACEBACK in line), default=len(lines))
    behind = (number for number in range(start + 1, len(lines)) if lines[number] and not lines[number][0].isspace())
    return next(behind, len(lines))


def _message(lines: Sequence[str]) -> str:
    """What a traceback ends in: the first line of the error, whose text may have more. Without one, the last line."""
    at = _error_line(lines)
    return lines[at] if at < len(lines) else next((text.strip() for text in reversed(lines) if text.strip()), "")


def _is_ended_by_others(end: RankEnd) -> bool:
    """Ended because another rank had failed, or the job was ended: Slurm and torchrun kill no rank unwarned."""
    number = -end.status if end.status < 0 else end.status - 128
    if number == signal.SIGKILL:
        return bool(end.signals) and not end.out_of_memory
    return number == signal.SIGTERM


def _time_limit(record: JobRecord, ends: Sequence[RankEnd]) -> FailureReason:
    warned = any(name in ("SIGUSR1", "SIGUSR2") for end in ends for name in end.signals)
    after = "; it was warned before, and did not ask to be queued again" if warned else ""
    return FailureReason(
        "time limit",
        f"the job reached its time limit of {record.time_limit}{after}",
        fix="give it more with --time, or save and exit at the warning signal so that it goes on in another turn",
    )


def _node_failure(record: JobRecord, batch: Sequence[str]) -> FailureReason:
    node_name = next((match[1] for text in reversed(batch) if (match := _NODE.search(text))), "")
    node = node_name.strip(".,:*'\"") or record.nodes
    return FailureReason(
        "node failure",
        f"a node of the job failed: {node or 'Slurm does not say which'}",
        node=node,
        fix="`shoal status` shows the node; with --requeue the job starts again on others",
    )


def _lost_ranks(text: str) -> FailureReason:
    node = match[1] if (match := re.search(r" on ([^\s,:]+)", text)) else ""
    fix = f"`shoal ssh {node} journalctl` tells why; with --requeue the job starts again by itself"
    return FailureReason("node failure", f"ranks of the job are gone: {text}", node=node, fix=fix)


def _out_of_memory(
    record: JobRecord, ends: Sequence[RankEnd], lines: Sequence[LogLine], batch: Sequence[str], first: RankEnd | None
) -> FailureReason | None:
    killed = next((end for end in sorted(ends, key=lambda end: end.end) if end.out_of_memory), None)
    if killed is not None:
        text = f"rank {killed.rank} on {killed.node} was killed: the memory was used up"
        return FailureReason("out of memory", text, killed.rank, killed.node, fix=_MEMORY_FIX)
    if first is not None:
        printed = last_traceback(_rank_lines(first, lines))
        message = next((text for text in reversed(printed) if _OUT_OF_MEMORY.search(text)), "")
        if message:
            place = "on its GPU" if "CUDA" in message or "OutOfMemoryError" in message else "on the node"
            text = f"rank {first.rank} on {first.node} ran out of memory {place}: {message.strip()[:200]}"
            fix = "use a smaller batch, activation checkpointing or fsdp"
            return FailureReason("out of memory", text, first.rank, first.node, printed, fix)
    if record.state == "OUT_OF_MEMORY" or any(_SLURM_OOM.search(text) for text in batch):
        text = "was killed: the job's memory was used up"
        dead = next((end for end in ends if end.status in (-9, 137)), None)
        if dead is None:
            return FailureReason("out of memory", f"a process of the job {text}", node=record.nodes, fix=_MEMORY_FIX)
        text = f"rank {dead.rank} on {dead.node} {text}"
        return FailureReason("out of memory", text, dead.rank, dead.node, fix=_MEMORY_FIX)
    return None


def _checkpoint_failure(first: RankEnd | None, lines: Sequence[LogLine]) -> FailureReason:
    """The end of the training, or all of a turn. On a full disk the logs may have ended before."""
    cause = next((match[1] for line in reversed(lines) if (match := _UNSAVED.search(line.text))), "")
    return FailureReason(
        "checkpoint",
        "its last state could not be saved" + (f": {cause[:300]}" if cause else ""),
        first.rank if first else None,
        first.node if first else "",
        fix="solve that, and run it again with the same directory for its checkpoints: it goes on from the newest",
    )


def _mpi_failure(
    record: JobRecord, first: RankEnd | None, lines: Sequence[LogLine], batch: Sequence[str]
) -> FailureReason | None:
    """MPI that did not start: told by what the first rank printed, or mpirun in the batch script."""
    printed = _rank_lines(first, lines) if first is not None else [line.text for line in lines]
    result = explain_mpi(printed) or explain_mpi(batch)
    if result is None or any(_TRACEBACK in text for text in printed):
        return None
    failure, shown = result
    rank, node = (first.rank, first.node) if first is not None else (None, record.batch_host)
    return FailureReason("start", f"MPI did not start: {failure.cause}", rank, node, shown, failure.fix)


def _script(first: RankEnd, lines: Sequence[LogLine]) -> FailureReason:
    rank_lines = _rank_lines(first, lines)
    printed = last_traceback(rank_lines)
    last = _message(rank_lines)
    rank = f"rank {first.rank} on {first.node}"
    if any(_RENDEZVOUS.search(text) for text in printed):
        text = f"the ranks did not find each other; {rank} gave up first: {last[:300]}"
        fix = "the ranks' output says which are missing; can the nodes reach each other on every port?"
        return FailureReason("rendezvous", text, first.rank, first.node, printed, fix)
    if first.status == 127 and last.startswith("shoal: cannot start"):
        fix = _NSYS_FIX if last.startswith("shoal: cannot start nsys") else _START_FIX
        return FailureReason("start", f"{rank}: {last.removeprefix('shoal: ')}", first.rank, first.node, fix=fix)
    if last.endswith(("No module named kernprof", "No module named line_profiler")):
        text = f"{rank} could not be profiled: {last}"
        return FailureReason("start", text, first.rank, first.node, fix=_LINE_FIX)
    if any(_COLLECTIVE_TIMEOUT.search(text) for text in printed):
        fix = _COLLECTIVE_TIMEOUT_FIX
    elif last.startswith("ModuleNotFoundError:"):
        fix = _MODULE_FIX
    elif last.startswith("OSError: [Errno 30]"):
        fix = _READ_ONLY_FIX
    else:
        fix = _WORKER_FIX if _DEAD_WORKER.search(last) else ""
    if first.status < 0:
        if first.status == -signal.SIGKILL:
            fix = f"Slurm did not do that: `shoal ssh {first.node} journalctl -k` tells if memory ran out"
        text = f"{rank} was ended by {_signal(-first.status)}"
        return FailureReason("script", text, first.rank, first.node, printed, fix)
    message = f": {last[:300]}" if last else ""
    text = f"{rank} failed first, with exit status {first.status}{message}"
    return FailureReason("script", text, first.rank, first.node, printed, fix)


def _killed_ranks(lines: Sequence[LogLine]) -> FailureReason:
    """Ranks that were killed together with what records their end, as MPI_Abort does."""
    last = lines[-1]
    printed = last_traceback([line.text for line in lines if line.rank == last.rank])
    place = f" on {last.node}" if last.node else ""
    text = f"the ranks were killed; rank {last.rank}{place} printed last: {last.text.strip()[:300]}"
    return FailureReason("script", text, last.rank, last.node, printed)


def _rank_lines(end: RankEnd, lines: Sequence[LogLine]) -> list[str]:
    """What a rank printed, without its name, which torch puts before each line of a traceback."""
    return [re.sub(r"^\[rank\d+\]: ?", "", line.text) for line in lines if line.rank == end.rank]


_MODULE_FIX = (
    "the Python of the job does not have it. A package: name it in an environment of the file, then `shoal env build` "
    "and `shoal run --env NAME`; with --image, add it with `shoal image build`. Your own: is it in the working tree?"
)
_READ_ONLY_FIX = (
    "with --image, what is in the image cannot be changed: write to SHOAL_JOB_DIR or a --mount, or use "
    "--container-name; without, ask the operator why the disk is read-only"
)
_COLLECTIVE_TIMEOUT_FIX = (
    "it waited for another rank, which hangs, is slow, or took another way: `shoal logs` shows what each did last. "
    "Where one rank works long while the others wait: init(collective_timeout=SECONDS)"
)
_WORKER_FIX = (
    "the signal that asked the job to stop ended its data workers first: DataLoader(worker_init_fn=worker_signals)"
)
_START_FIX = "name a program that the nodes have: --python /path/to/python"
_MPIRUN_FIX = "install its package there, openmpi-bin on Debian and Ubuntu; or use --launcher pmix, which needs none"
_NSYS_FIX = "install NVIDIA Nsight Systems on the nodes, or leave out --profile"
_LINE_FIX = "install line_profiler for the Python of the job, or leave out --profile"


def _output_failure(record: JobRecord) -> FailureReason:
    node = record.batch_host or record.nodes
    path = f", {record.output}" if record.output else ""  # the records of ended jobs do not have it
    return FailureReason(
        "start",
        f"no rank of the job has started: {node} could not open the file for its output{path}",
        node=node,
        fix="make its directory there, with the right to write for the job's user, or name another with --output",
    )


def _start_failure(record: JobRecord, batch: Sequence[str]) -> FailureReason:
    if unreached := next((text for text in reversed(batch) if text.startswith(_UNREACHED)), ""):
        text = f"no rank of the job has started: {unreached.removeprefix('shoal: ')}"
        fix = "let the nodes reach each other on all ports"
        return FailureReason("rendezvous", text, node=record.batch_host, fix=fix)
    if without := next((text for text in reversed(batch) if text.startswith(_NO_MPIRUN)), ""):
        text = f"no rank of the job has started: {without.removeprefix('shoal: ')}"
        return FailureReason("start", text, node=record.batch_host, fix=_MPIRUN_FIX)
    output = tuple(text for text in batch if text.strip())[-10:]
    code = f"signal {_signal(record.exit_signal)}" if record.exit_signal else f"exit status {record.exit_code}"
    why = f" ({record.reason})" if record.reason else ""
    if record.note is None:  # of plain sbatch or srun: Shoal does not see its ranks
        first = next((text for text in output if "error:" in text), output[-1] if output else "")
        message = _message(batch) if any(_TRACEBACK in text for text in batch) else first.strip()
        cause = f": {message[:300]}" if message else why
        return FailureReason("unknown", f"it ended with {code}{cause}", node=record.batch_host, details=output)
    if not output:
        text = f"no rank of the job has started; it ended with {code}{why}"
        return FailureReason("unknown", text, node=record.batch_host)
    first = next((text for text in output if "error:" in text), output[-1])
    text = f"no rank of the job has started: {first.strip()[:300]}"
    fix = _START_FIX if "execve" in text else ""
    return FailureReason("start", text, node=record.batch_host, details=output, fix=fix)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
