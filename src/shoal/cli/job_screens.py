"""What a person sees of jobs: the queue, lines of logs, how a job ended."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.cells import set_cell_size
from rich.console import Console
from rich.control import Control
from rich.markup import escape
from rich.segment import ControlType
from rich.text import Text

from shoal.cli.output import neutralize
from shoal.cli.screen import Columns, escape_text, format_time_limit, show_failures
from shoal.jobs.logs import BATCH, LogLine

if TYPE_CHECKING:
    from shoal.jobs.failure import FailureReason
    from shoal.jobs.record import JobRecord
    from shoal.jobs.tree_files import LeftOut
    from shoal.verbs.fetch import FetchResult
    from shoal.verbs.jobs import JobsResult, JobView
    from shoal.verbs.submission import SubmittedJob

STATE_STYLE = {"RUNNING": "cyan", "COMPLETED": "green", "PENDING": "yellow", "CANCELLED": "magenta"}
MAX_SHOWN_NAMES = 5
RANK_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")


def show_submitted(console: Console, job: SubmittedJob, *, watched: bool = False) -> None:
    """`watched`: the command goes on with the job's output."""
    ranks = "1 process" if job.world_size == 1 else f"{job.world_size} processes"
    node_text = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
    sent_text = f"{job.sent / 1024:.0f} KiB sent" if job.sent else "its code was there already"
    console.print(
        f"[green]✓[/] job {job.id} ({escape(job.name)}): {ranks} on {node_text} of {job.partition}; {sent_text}"
    )
    if watched:
        console.print("  Ctrl-C leaves it running; a second one within two seconds cancels it")
    else:
        number, printer = (f"{job.id}_N", "its task N") if job.array else (job.id, "it")
        console.print(f"  `shoal logs -f {number}` shows what {printer} prints")
    if job.nodes > 1 and not job.shared:
        console.print("  checkpoints need storage that its nodes share: name it with --directory")
    if job.traces:
        console.print(f"  its profile will be on its nodes in {job.traces}")
    _show_left_out(console, job.left_out)


def _show_left_out(console: Console, left_out: LeftOut) -> None:
    """What the script may miss on the nodes."""
    if left_out.files:
        count = f"{'more than ' if left_out.more else ''}{left_out.files} file{'' if left_out.files == 1 else 's'}"
        names = ", ".join(left_out.names) + (", …" if left_out.files > len(left_out.names) else "")
        text = f"  .gitignore kept {count} ({format_bytes(left_out.bytes)}) from being sent: {names}"
        console.print(escape_text(text), soft_wrap=True)
        console.print("  --include PATTERN sends them", markup=False)
    if left_out.links:
        names = ", ".join(left_out.links[:MAX_SHOWN_NAMES]) + (", …" if len(left_out.links) > MAX_SHOWN_NAMES else "")
        text = f"  links that leave the tree lead nowhere on nodes without their targets: {names}"
        console.print(escape_text(text), soft_wrap=True)
    if left_out.submodules:
        text = f"  submodules without files: {', '.join(left_out.submodules)}; `git submodule update --init` gets them"
        console.print(escape_text(text), soft_wrap=True)


def format_bytes(size: int) -> str:
    if size < 1024:
        return f"{size} bytes"
    power = min(3, (size.bit_length() - 1) // 10)
    return f"{size / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"


def show_jobs(console: Console, result: JobsResult) -> None:
    show_failures(console, result.failures)
    if not result.jobs:
        console.print("no jobs")
        return
    titles = ("job", "name", "user", "state", "time", "limit", "nodes", "progress or reason")
    table = Columns(*titles, wraps=("name", "user", "nodes", "progress or reason"))
    for view in result.jobs:
        record = view.record
        profile = record.traces and f"profile in {record.traces}"
        table.add_row(
            record.id,
            escape_text(record.name),
            escape_text(record.user),
            Text(_format_state(record), style=STATE_STYLE.get(record.state, "red" if record.failed else "")),
            record.run_time,
            format_time_limit(record.time_limit),
            escape_text(record.nodes) or str(record.node_count),
            escape_text("; ".join(filter(None, (_condition_text(view), profile)))),
        )
    console.print(table)
    if result.left_out:
        console.print(f"{result.left_out} more ended within a day: `shoal jobs --all` lists them", markup=False)


def show_line(console: Console, line: LogLine, timestamps: bool = False) -> None:
    """One line as its program wrote it, without colours: behind its rank, and after a restart behind its number."""
    prefix = "-" if line.rank == BATCH else f"{line.rank}.{line.restart}" if line.restart else str(line.rank)
    timestamp = datetime.fromtimestamp(line.time).strftime("%H:%M:%S.%f ") if timestamps else ""
    style = "dim" if line.rank == BATCH else RANK_STYLES[line.rank % len(RANK_STYLES)]
    if console.is_terminal:
        console.out(f"{timestamp}[{prefix}] ", style=style, end="")
        console.file.write(f"{neutralize(line.text)}\n")
    else:
        console.file.write(f"{timestamp}[{prefix}] {neutralize(line.text)}\n")
    console.file.flush()


class BarArea:
    """The unfinished lines of the ranks, such as progress bars, below what is printed. Only on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._drawn: list[str] = []

    def show(self, lines: Iterable[LogLine]) -> None:
        """Draw these in place of what is there. With more ranks than have room, the first ones."""
        if not self._console.is_terminal:
            return
        bars = sorted(lines, key=lambda line: line.rank)
        room = max(1, self._console.height // 2)
        texts = [f"[{line.rank}] {neutralize(line.text)}" for line in bars[:room]]
        if len(bars) > room:
            texts[-1] = f"… and {len(bars) - room + 1} more ranks"
        # A line that is broken in two could not be removed again.
        texts = [set_cell_size(text, self._console.width - 1).rstrip() for text in texts]
        if texts != self._drawn:
            self.clear()
            for text in texts:
                self._console.file.write(f"{neutralize(text)}\n")
            self._console.file.flush()
            self._drawn = texts

    def clear(self) -> None:
        """Remove them, so that a line can be printed there."""
        if self._drawn:
            up_and_erase = (ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)
            self._console.control(Control(*up_and_erase * len(self._drawn)))
            self._drawn = []


def show_job_end(console: Console, record: JobRecord | None, reason: FailureReason | None) -> None:
    """How the job ended, and why where that was not well."""
    if record is None:
        return
    if reason is None:
        mark = "[green]✓[/]" if record.state == "COMPLETED" else "[cyan]…[/]"
        console.print(f"{mark} job {record.id}: {_format_state(record)} ({record.run_time})")
        return
    console.print(f"[red]✗[/] job {record.id}: {_format_state(record)}: {escape_text(reason.text)}", soft_wrap=True)
    for text in reason.details:
        console.print(f"    {escape_text(text)}", soft_wrap=True)
    if reason.fix:
        console.print(f"  fix: {escape_text(reason.fix)}", soft_wrap=True)


def show_job_directory(console: Console, record: JobRecord) -> None:
    """Where the files of a job are, and how to get them."""
    nodes = f" on {record.nodes}" if record.nodes else ""
    text = f"  its files are in {record.work_dir}/{record.id}{nodes}; `shoal fetch {record.id}` copies them"
    console.print(escape_text(text), soft_wrap=True)


def show_fetched(console: Console, errors: Console, result: FetchResult) -> None:
    show_failures(errors, result.failures)
    for skipped in result.skipped[:MAX_SHOWN_NAMES]:
        errors.print(escape_text(f"not copied: {skipped.name}: {skipped.why}"), soft_wrap=True)
    if len(result.skipped) > MAX_SHOWN_NAMES:
        errors.print(f"not copied: {len(result.skipped) - MAX_SHOWN_NAMES} more; --json names them")
    files = "1 file" if result.files == 1 else f"{result.files} files"
    here = f"; {result.unchanged} were here already" if result.unchanged else ""
    text = f"{files} ({format_bytes(result.bytes)}) of job {result.job} in {result.to}{here}"
    console.print(f"[green]✓[/] {escape_text(text)}", soft_wrap=True)


def show_task_end(console: Console, record: JobRecord) -> None:
    mark = "[red]✗[/]" if record.failed else "[green]✓[/]"
    console.print(f"{mark} job {record.id}: {_format_state(record)} ({record.run_time})")


def progress_text(progress: Mapping[str, Any]) -> str:
    """The progress that a training reports, in one line: `step 120/1000, loss 0.31, 5400 samples/s, 3 min left`."""
    numbers = {key: value for key, value in progress.items() if isinstance(value, int | float)}
    texts = []
    if "step" in numbers:
        total = f"/{numbers['total_steps']}" if "total_steps" in numbers else ""
        texts.append(f"step {numbers['step']}{total}")
    if progress.get("diverged") is True:
        texts.append("the loss is no longer a number")
    elif "loss" in numbers:
        texts.append(f"loss {numbers['loss']:.4g}")
    if "samples_per_second" in numbers:
        texts.append(f"{numbers['samples_per_second']:.4g} samples/s")
    if "mfu" in numbers:
        texts.append(f"MFU {numbers['mfu']:.0%}")
    if "eta_seconds" in numbers:
        texts.append(f"{_format_duration(numbers['eta_seconds'])} left")
    return ", ".join(texts)


def _format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _condition_text(view: JobView) -> str:
    if view.reason is not None:
        return view.reason.text
    if view.no_step_seconds is not None and view.no_step_seconds >= 60:
        minutes = int(view.no_step_seconds) // 60
        return f"no step for {minutes} minute{'' if minutes == 1 else 's'}"
    if view.progress:
        from shoal.jobs.hang import hung_text  # `shoal run` loads this file, and not that one

        if text := hung_text(view.progress, time.time()):
            return f"{text}: `shoal doctor --job {view.record.id}`"
        return progress_text(view.progress)
    if view.record.waits_for:
        return view.record.waits_for
    if view.record.failed and view.record.state != "CANCELLED":
        return f"`shoal logs {view.record.id}` says why"
    if view.record.state == "PENDING":
        from shoal.health.diagnosis import job_hint  # `shoal run` loads this file, and not that one

        if text := job_hint(view.record.reason):
            return f"{text}: `shoal doctor --job {view.record.id}`"
    return "" if view.record.reason == "None" else view.record.reason


def _format_state(record: JobRecord) -> str:
    restart_text = f", restart {record.restarts}" if record.restarts else ""
    state = "rejected" if record.rejected else record.state.lower().replace("_", " ")
    return state + restart_text
