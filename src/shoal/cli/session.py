"""One run of the command: opens the cluster, runs the verb, and turns errors into messages and exit codes.

The terminal tells three cases apart: your mistake (exit 2, what to change), a failure elsewhere (exit 1 or 3, which
host and why), and a bug (exit 70, with a traceback to report).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import sys
import traceback
from collections.abc import Coroutine
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import typer

from shoal.cli.output import allow_any_encoding, dump, escape_controls, make_console
from shoal.errors import ControllerFailed, Interrupted, ShoalError, SpecError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.plan.progress import Phase
    from shoal.verbs.context import Context

T = TypeVar("T")

PARTLY = 3
BUG = 70

STOPPING = "stopping: each host finishes its current step; Ctrl-C again exits at once"
RUN_AGAIN = "run the same command again to continue"
SECOND_S = 2.0
"""So soon after the first Ctrl-C a second one counts, where it has a meaning of its own."""

OPERATORS_FIX = "ask the operator, who can run `shoal up` and `shoal check`"
"""Instead of a fix that ordinary users cannot apply."""

OS_ERROR_FIXES = {
    errno.EACCES: "run it as the owner of that file, or change the owner; root's files need root",
    errno.EPERM: "run it as the owner of that file, or change the owner; root's files need root",
    errno.EROFS: "set XDG_STATE_HOME and XDG_CACHE_HOME to directories that can be written",
    errno.ENOSPC: "free space on this machine's disk, then run the same command again",
    errno.EDQUOT: "free space in your home directory, then run the same command again",
    errno.EMFILE: "allow more open files (`ulimit -n 8192`), then run the same command again",
}
"""What to do about errors of this machine, by their number."""

ClickUsageError: Any = typer.BadParameter.__mro__[1]
"""What typer raises at a wrong command line. Releases differ in where it comes from."""


class Session:
    """Printing and exit code of one run."""

    def __init__(self, json: bool, file: Path | None = None, cluster: str | None = None) -> None:
        self.json = json
        self.status = 0
        self._spec = (file, cluster)
        self._context: Context | None = None

    # Made on first use: a job is submitted before rich is loaded.

    @cached_property
    def console(self) -> Console:
        return make_console()

    @cached_property
    def errors(self) -> Console:
        return make_console(stderr=True)

    def open(self, *, phases: bool = True, operator: bool = False) -> Context:
        """The cluster. `phases`: the verb takes long and shows progress; otherwise it needs the hosts only.

        `operator`: raise UsageError for an ordinary user, before anything is asked or done.
        """
        from shoal.verbs.context import open_context, open_hosts

        if not phases:
            self._context = open_hosts(*self._spec)
        elif self.json:
            self._context = open_context(*self._spec)
        else:
            from shoal.cli.progress import TerminalProgress

            self._context = open_context(*self._spec, TerminalProgress(self.errors))
        if operator:
            self._context.require_operator()
        return self._context

    def with_progress(self, context: Context) -> Context:
        """The same cluster for a verb that takes long only at times: bars are loaded when they are shown."""
        return context if self.json else replace(context, progress=_LateProgress(self))

    def run(self, work: Coroutine[Any, Any, T], *, watching: bool = False, second: str = "") -> T:
        """Run a verb. Ctrl-C stops it after the current step; the next run continues from there.

        `watching`: the verb only observes, so that there is no step to finish. `second`: see run_interruptible.
        """
        gc.freeze()  # what is loaded stays
        gc.enable()
        return run_interruptible(work, message="" if watching else STOPPING, second=second)

    def finish(self, value: Any, status: int = 0) -> bool:
        """Set the exit code, and print the value with --json. False: the caller shows it."""
        self.status = status
        if self.json:
            print(dump(value))
        return self.json

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._report_changes()
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(end_broken_pipe()) from None
        if isinstance(error, (KeyboardInterrupt, typer.Abort)):
            error = Interrupted("stopped", hint=RUN_AGAIN)
        error = map_os_error(error) or error
        if isinstance(error, ShoalError):
            if self._context is not None and self._context.joined is not None and "`shoal up`" in error.hint:
                error.hint = OPERATORS_FIX
            self._report(error)
            raise typer.Exit(error.exit_code) from None
        if isinstance(error, Exception):
            self._report_bug(error)
            raise typer.Exit(BUG) from None
        if error is None and self.status:
            raise typer.Exit(self.status)

    def _report_changes(self) -> None:
        """Tell a user that the operator has changed the cluster."""
        joined = self._context.joined if self._context else None
        if joined is not None and joined.changed and joined.login is not None and not self.json:
            text = f"the operator has changed cluster {joined.cluster}; its description here is up to date again"
            self.errors.print(text, markup=False, soft_wrap=True)

    def _report(self, error: ShoalError) -> None:
        if self.json:
            print(dump(error))
            return
        from rich.markup import escape

        from shoal.cli.screen import print_wrapped, show_failures

        if isinstance(error, SpecError):
            for line in error.message.splitlines():
                print_wrapped(self.errors, escape(line))
            return
        if isinstance(error, ControllerFailed):
            show_failures(self.errors, error.failures)
            return print_wrapped(self.errors, f"[red]error:[/] cannot go on without {error.host}, the controller")
        # Ctrl-C is no error, and there is nothing to fix.
        is_interrupt = isinstance(error, Interrupted)
        print_wrapped(self.errors, ("" if is_interrupt else "[red]error:[/] ") + escape(error.message))
        if error.hint:
            label = "" if is_interrupt else "fix: "
            self.errors.print(f"  {label}{error.hint}", markup=False, soft_wrap=True)

    def _report_bug(self, error: Exception) -> None:
        text = "".join(traceback.format_exception(error))
        if self.json:
            print(dump({"error": "bug", "message": str(error), "traceback": text}))
            return
        self.errors.print(text, markup=False, soft_wrap=True)
        self.errors.print("[red]This is a bug in Shoal.[/] Please report it with the lines above.", soft_wrap=True)


class _LateProgress:
    """Bars of a session, loaded when a phase begins."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def phase(self, title: str, total: int) -> contextlib.AbstractContextManager[Phase]:
        from shoal.cli.progress import TerminalProgress

        return TerminalProgress(self._session.errors).phase(title, total)


def run_app(app: typer.Typer) -> None:
    """Run the command line. A wrong one exits 2, with --json as an object like every other error."""
    arguments = sys.argv[1:]
    json = "--json" in arguments[: arguments.index("--") if "--" in arguments else None]
    allow_any_encoding()
    status = 0
    try:
        with Session(json) as session:
            try:
                session.status = app(prog_name="shoal", standalone_mode=False) or 0
                sys.stdout.flush()
            except ClickUsageError as error:
                hint = _sbatch_hint(error)
                if json:
                    raise UsageError(error.format_message(), hint=hint or "see --help") from None
                error.show()
                if hint:
                    session.errors.print(f"  fix: {hint}", markup=False, soft_wrap=True)
                session.status = UsageError.exit_code
    except typer.Exit as exit_request:
        status = exit_request.exit_code
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.exit(status)
    discard_output()  # what cannot be written was reported
    sys.exit(status)


def _sbatch_hint(error: Any) -> str:
    """How to give an option that sbatch has and `shoal run` has not."""
    name = getattr(error, "option_name", "")  # only the error of an unknown option has it
    if error.ctx is None or error.ctx.info_name != "run" or not name.startswith("--"):
        return ""
    return f"if it is an option of sbatch, put --sbatch before it: --sbatch {name}=VALUE"


def run_interruptible(work: Coroutine[Any, Any, T], *, message: str = STOPPING, second: str = "") -> T:
    """Run a verb to its end. The first Ctrl-C prints `message`, the second exits at once.

    `second` says what a second Ctrl-C within SECOND_S does, and is printed at the first: the caller does it, where
    Interrupted has two signals. Raises Interrupted after a Ctrl-C or a SIGTERM, once the verb has cleaned up.
    """
    signals: list[int] = []
    try:
        return asyncio.run(_with_signals(work, message, second, signals))
    except asyncio.CancelledError:
        interrupted = Interrupted("stopped", hint=RUN_AGAIN)
        interrupted.signals = tuple(signals)
        raise interrupted from None


async def _with_signals(work: Coroutine[Any, Any, T], message: str, second: str, signals: list[int]) -> T:
    task, again = asyncio.current_task(), asyncio.Event()
    assert task is not None

    def stop(number: int) -> None:
        signals.append(number)
        is_first, is_second = len(signals) == 1, bool(second) and len(signals) == 2
        if not is_first and not is_second:
            # Agents notice the closed connection and stop after the current item.
            from shoal.verbs.context import exit_notes

            for line in ("", *exit_notes(), *((f"stopped at once; {RUN_AGAIN}",) if message else ())):
                print(escape_controls(line), file=sys.stderr, flush=True)
            os._exit(Interrupted.exit_code)
        text = "" if is_second else second if second and number == signal.SIGINT else message
        print(escape_controls(f"\n{text}" if text else ""), file=sys.stderr, flush=True)
        if is_first:
            task.cancel()
        else:
            again.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await work
    except asyncio.CancelledError:
        if second and signals == [signal.SIGINT]:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(again.wait(), SECOND_S)
        raise


def confirm(effect: str, question: str, yes: bool) -> None:
    """Ask before what cannot be undone. Raises where the answer is no, or there is nobody to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"this {effect}", hint="use --yes")
    if not typer.confirm(question, err=True):
        raise Interrupted("nothing was changed")


def map_os_error(error: BaseException | None) -> ShoalError | None:
    """An error of this machine's operating system with its fix; None where it may be a bug of ours."""
    if not isinstance(error, OSError) or error.errno not in OS_ERROR_FIXES:
        return None
    path = f"{error.filename}: " if error.filename else ""
    return ShoalError(f"on this machine: {path}{error.strerror}", hint=OS_ERROR_FIXES[error.errno])


def end_broken_pipe() -> int:
    """End quietly, as other programs do, where the reader has gone, as in `shoal status | head -1`."""
    discard_output()
    return 128 + signal.SIGPIPE


def discard_output() -> None:
    """Send what is still buffered nowhere: Python would try to write it at exit, and complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(null, stream.fileno())
