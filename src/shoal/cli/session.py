"""One run of the command: opens the cluster, runs the verb, prints the result, and turns errors into exit codes.

The terminal tells three stories apart: your mistake (exit 2, what to change), what failed out there (exit 1 or 3, which
host and why), and our bug (exit 70, with a traceback to report).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Coroutine
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import typer

from shoal.cli import interrupt
from shoal.cli.as_json import dump, plain
from shoal.cli.encoding import write_anywhere
from shoal.cli.this_machine import trouble_here
from shoal.errors import ControllerFailed, Interrupted, ShoalError, SpecError, UsageError

if TYPE_CHECKING:
    import asyncio

    from rich.console import Console

    from shoal.plan.model import Plan
    from shoal.spec.finding import Finding
    from shoal.verbs.context import Context
    from shoal.verbs.down import DownResult
    from shoal.verbs.remote import ExecResult
    from shoal.verbs.status import Status
    from shoal.verbs.up import UpResult

T = TypeVar("T")

PARTLY = 3
BUG = 70

ClickUsageError: Any = typer.BadParameter.__mro__[1]
"""What typer raises at a wrong command line. Releases differ in where it comes from."""


class Session:
    """Printing and exit codes of one run."""

    def __init__(self, json: bool) -> None:
        self.json = json
        self.status = 0

    # Made when something is to be said: a job is in the queue before rich is loaded.

    @cached_property
    def console(self) -> Console:
        from shoal.cli.terminal import console

        return console()

    @cached_property
    def errors(self) -> Console:
        from shoal.cli.terminal import console

        return console(stderr=True)

    def open(self, file: Path | None, cluster: str | None, *, phases: bool = True) -> Context:
        """The cluster. `phases`: the verb takes long, and says where it is; otherwise it needs the hosts only."""
        from shoal.verbs.context import open_context, open_hosts

        if not phases:
            return open_hosts(file, cluster)
        if self.json:
            return open_context(file, cluster)
        from shoal.cli.progress import TerminalProgress

        return open_context(file, cluster, TerminalProgress(self.errors))

    def run(
        self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None, *, watching: bool = False
    ) -> T:
        """Run a verb. Ctrl-C stops it at the next step; the next run goes on from there.

        `watching`: it looks on at what goes on without it, so that there is no step to finish.
        """
        gc.freeze()  # what is loaded stays
        gc.enable()
        return interrupt.run(work, loop, said="" if watching else interrupt.STOPPING)

    def finish_value(self, value: Any) -> None:
        print(dump(value))

    def finish_init(self, path: Path) -> None:
        if self.json:
            return self.finish_value({"file": str(path)})
        self.console.print(f"wrote {path}; look at it, run `shoal check`, then `shoal up`", highlight=False)

    def finish_check(self, findings: list[Finding]) -> None:
        from shoal.cli.say import show_findings

        errors = sum(finding.level == "error" for finding in findings)
        if self.json:
            self.finish_value({"ok": not errors, "findings": findings})
        else:
            show_findings(self.console, findings)
            self.console.print("[green]✓[/] nothing in the way" if not errors else f"[red]✗[/] {errors} in the way")
        if errors:
            self.status = 1

    def finish_plan(self, plan: Plan, diff: bool) -> None:
        from shoal.cli.render import show_plan

        if self.json:
            hosts = [{"name": host.name, "changes": host.changes} for host in plan.hosts]
            self.finish_value(
                {
                    "cluster": plan.cluster,
                    "cost": plan.cost,
                    "changes": plan.changes,
                    "loses": plan.loses,
                    "hosts": hosts,
                    "findings": plan.findings,
                    "unreached": plan.unreached,
                }
            )
        else:
            show_plan(self.console, plan, diff)
        if plan.unreached:
            self.status = PARTLY

    def finish_up(self, result: UpResult) -> None:
        from shoal.cli.render import show_up

        if self.json:
            self.finish_value({**plain(result), "unchanged": result.unchanged, "whole": result.whole})
        else:
            show_up(self.console, result)
        if not result.whole:
            self.status = PARTLY

    def finish_down(self, result: DownResult) -> None:
        from shoal.cli.render import show_down

        if self.json:
            self.finish_value(result)
        else:
            show_down(self.console, result)
        if result.failures:
            self.status = PARTLY

    def finish_status(self, status: Status) -> None:
        from shoal.cli.render import show_status

        if self.json:
            self.finish_value(status)
        else:
            show_status(self.console, status)

    def finish_exec(self, result: ExecResult) -> None:
        from shoal.cli.render import show_exec

        if self.json:
            groups = [
                {"hosts": names, "status": r.status, "stdout": r.text, "stderr": r.error_text}
                for names, r in result.groups
            ]
            self.finish_value({"groups": groups, "failures": result.failures, "fix": result.hint})
        else:
            show_exec(self.console, result)
        if result.failures:
            self.status = PARTLY
        elif result.worst:
            self.status = result.worst if result.worst < 126 else 1

    def finish_nodes(self, verb: str, names: list[str]) -> None:
        from shoal.hostlist import compress

        if self.json:
            return self.finish_value({verb: names})
        told = f"{verb} {compress(names)}" if names else "nothing to do: every node of these takes jobs already"
        self.console.print(told, highlight=False)

    def finish_forget(self, host: str, known: bool) -> None:
        if self.json:
            return self.finish_value({"host": host, "forgotten": known})
        self.console.print(f"forgot the key of {host}" if known else f"no key of {host} was kept", highlight=False)

    def confirm_down(self, context: Context, yes: bool) -> None:
        """Hosts that are not ours to delete are released only when asked for plainly."""
        lent = [member.name for member in context.members if member.provider is None]
        if not lent or yes:
            return
        from shoal.hostlist import compress

        if not sys.stdin.isatty():
            raise UsageError(f"this stops Slurm on {compress(lent)}", hint="use --yes")
        if not typer.confirm(f"Stop Slurm and remove Shoal's files on {compress(lent)}?", err=True):
            raise Interrupted("nothing was changed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(nobody_reads()) from None
        if isinstance(error, (KeyboardInterrupt, typer.Abort)):
            error = Interrupted("stopped", hint=interrupt.AGAIN)
        error = trouble_here(error) or error
        if isinstance(error, ShoalError):
            self._report(error)
            raise typer.Exit(error.exit_code) from None
        if isinstance(error, Exception):
            self._bug(error)
            raise typer.Exit(BUG) from None
        if error is None and self.status:
            raise typer.Exit(self.status)

    def _report(self, error: ShoalError) -> None:
        if self.json:
            print(dump(error))
            return
        from rich.markup import escape

        from shoal.cli.say import say, show_failures

        if isinstance(error, SpecError):
            for finding in error.findings:
                say(self.errors, escape(str(finding)))
            return
        if isinstance(error, ControllerFailed):
            show_failures(self.errors, error.failures)
            return say(self.errors, f"[red]error:[/] nothing can be done without {error.host}, the controller")
        # Who pressed Ctrl-C has made no error, and there is nothing to correct.
        stopped = isinstance(error, Interrupted)
        say(self.errors, ("" if stopped else "[red]error:[/] ") + escape(error.message))
        if error.hint:
            label = "" if stopped else "fix: "
            self.errors.print(f"  {label}{error.hint}", markup=False, highlight=False, soft_wrap=True)

    def _bug(self, error: Exception) -> None:
        text = "".join(traceback.format_exception(error))
        if self.json:
            print(dump({"error": "bug", "message": str(error), "traceback": text}))
            return
        self.errors.print(text, markup=False, highlight=False, soft_wrap=True)
        self.errors.print("[red]This is a bug in Shoal.[/] Please report it with the lines above.", soft_wrap=True)


def run_main(app: typer.Typer) -> None:
    """Run the command line. A wrong one exits 2, and with --json says so in JSON like every other error."""
    words = sys.argv[1:]
    json = "--json" in words[: words.index("--") if "--" in words else None]
    write_anywhere()
    try:
        status = app(prog_name="shoal", standalone_mode=False)
        sys.stdout.flush()
    except ClickUsageError as error:
        wrong = UsageError(error.format_message(), hint="see --help")
        print(dump(wrong)) if json else error.show()
        status = wrong.exit_code
    except (KeyboardInterrupt, typer.Abort):
        stopped = Interrupted("stopped")
        print(dump(stopped)) if json else print(stopped, file=sys.stderr)
        status = stopped.exit_code
    except BrokenPipeError:
        status = nobody_reads()
    except OSError as error:
        told = trouble_here(error)
        if told is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        status = told.exit_code
        discard_output()
    sys.exit(status if isinstance(status, int) else 0)


def nobody_reads() -> int:
    """The reader of our output has gone, as in `shoal status | head -1`: end quietly, as other programs do."""
    discard_output()
    return 128 + signal.SIGPIPE


def discard_output() -> None:
    """What is still to be written goes nowhere: Python would try again at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
