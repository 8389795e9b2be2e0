"""The commands about a cluster as a whole: init, schema, check, plan, up, status, down."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import Cluster, File, Json, Yes
from shoal.cli.output import plain
from shoal.cli.session import PARTLY, Session
from shoal.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from shoal.plan.model import Plan
    from shoal.spec.finding import Finding
    from shoal.verbs.context import Context
    from shoal.verbs.down import DownResult
    from shoal.verbs.status import ClusterStatus
    from shoal.verbs.up import UpResult

DrainTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="How long to wait for jobs on nodes that leave. Default: until they end.", min=0
    ),
]


def init(
    hosts: Annotated[
        str | None,
        typer.Option(metavar="HOSTS", help="Hosts, as gpu01,gpu02 or gpu[01-16]; the first is the controller."),
    ] = None,
    ssh_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the hosts from this SSH config.")
    ] = None,
    cluster: Annotated[str, typer.Option(metavar="NAME", help="The cluster's name.")] = "reef",
    file: Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The file to write.")] = Path("shoal.yaml"),
    json: Json = False,
) -> None:
    """Write a first shoal.yaml, with comments.

    For the hosts you name, for those of an SSH config, or, with neither, for the sandbox.
    """
    with Session(json) as session:
        from shoal.verbs.init import init as verb

        # A comma inside brackets belongs to a hostlist: node[1,3],gpu01 names two entries.
        names = re.split(r",(?![^\[]*\])", hosts) if hosts is not None else None
        verb(file, hosts=names, ssh_config=ssh_config, cluster=cluster)
        if json:
            return session.finish_value({"file": str(file)})
        session.console.print(f"wrote {file}; review it, run `shoal check`, then `shoal up`", highlight=False)


def schema(json: Annotated[bool, typer.Option("--json", help="The schema is JSON in any case.")] = False) -> None:
    """Print the JSON Schema of shoal.yaml, for editors."""
    with Session(True):
        from shoal.verbs.init import schema_text

        print(schema_text())


def check(file: File = None, cluster: Cluster = None, json: Json = False) -> None:
    """Report every problem that would stop `up`; change nothing."""
    with Session(json) as session:
        from shoal.verbs.check import check as verb

        finish_check(session, session.run(verb(session.open(file, cluster))))


def finish_check(session: Session, findings: list[Finding]) -> None:
    errors = sum(finding.level == "error" for finding in findings)
    if session.json:
        session.finish_value({"ok": not errors, "findings": findings})
    else:
        from shoal.cli.screen import show_findings

        show_findings(session.console, findings)
        count = f"{errors} error" + "s" * (errors != 1)
        session.console.print(f"[red]✗[/] {count}" if errors else "[green]✓[/] no errors")
    if errors:
        session.status = 1


def plan(
    file: File = None,
    cluster: Cluster = None,
    diff: Annotated[bool, typer.Option("--diff", help="Show the changes inside files.")] = False,
    json: Json = False,
) -> None:
    """Show what `up` would change on each host, and its cost."""
    with Session(json) as session:
        from shoal.verbs.up import plan as verb

        finish_plan(session, session.run(verb(session.open(file, cluster))), diff)


def finish_plan(session: Session, result: Plan, diff: bool) -> None:
    if session.json:
        keys = ("cluster", "cost", "changes", "findings", "unreached")
        hosts = [{"name": host.name, "changes": host.changes} for host in result.hosts]
        values = {key: getattr(result, key) for key in keys}
        session.finish_value({**values, "loses": result.lost_jobs, "hosts": hosts})
    else:
        from shoal.cli.cluster_screens import show_plan

        show_plan(session.console, result, diff)
    if result.unreached:
        session.status = PARTLY


def up(
    file: File = None,
    cluster: Cluster = None,
    drain_timeout: DrainTimeout = None,
    allow_job_loss: Annotated[
        bool, typer.Option("--allow-job-loss", help="Proceed even if a change ends jobs.")
    ] = False,
    leave_rented: Annotated[
        bool,
        typer.Option("--leave-rented", help="Proceed even if some rented machines can no longer be released."),
    ] = False,
    leave_records: Annotated[
        bool, typer.Option("--leave-records", help="Proceed even if accounting moves without its records.")
    ] = False,
    json: Json = False,
) -> None:
    """Build the cluster, or change it to match the file."""
    with Session(json) as session:
        from shoal.plan.apply import ApplyTimeouts
        from shoal.verbs.up import up as verb

        context = session.open(file, cluster)
        allowed = {"allow_job_loss": allow_job_loss, "leave_rented": leave_rented, "leave_records": leave_records}
        finish_up(session, session.run(verb(context, ApplyTimeouts(drain_s=drain_timeout), **allowed)))


def finish_up(session: Session, result: UpResult) -> None:
    if session.json:
        session.finish_value({**plain(result), "unchanged": result.unchanged, "whole": result.whole})
    else:
        from shoal.cli.cluster_screens import show_up

        show_up(session.console, result)
    if not result.whole:
        session.status = PARTLY


def status(file: File = None, cluster: Cluster = None, json: Json = False) -> None:
    """Show nodes, partitions, services and jobs."""
    with Session(json) as session:
        from shoal.verbs.status import status as verb

        finish_status(session, session.run(verb(session.open(file, cluster))))


def finish_status(session: Session, result: ClusterStatus) -> None:
    if session.json:
        return session.finish_value(result)
    from shoal.cli.cluster_screens import show_status

    show_status(session.console, result)


def down(
    file: File = None,
    cluster: Cluster = None,
    force: Annotated[
        bool, typer.Option("--force", help="Proceed even if jobs run or rented machines may remain.")
    ] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Remove the cluster.

    Sandbox hosts are deleted. On other hosts Slurm is stopped and Shoal's files are removed; packages stay.
    """
    with Session(json) as session:
        from shoal.verbs.down import down as verb

        context = session.open(file, cluster)
        _confirm_down(context, yes)
        finish_down(session, session.run(verb(context, force=force)))


def finish_down(session: Session, result: DownResult) -> None:
    if session.json:
        session.finish_value(result)
    else:
        from shoal.cli.cluster_screens import show_down

        show_down(session.console, result)
    if result.failures:
        session.status = PARTLY


def _confirm_down(context: Context, yes: bool) -> None:
    """Ask before Slurm is stopped on hosts that Shoal did not make."""
    hosts = [member.name for member in context.members if member.provider is None]
    if not hosts or yes:
        return
    from shoal.hostlist import compress

    if not sys.stdin.isatty():
        raise UsageError(f"this stops Slurm on {compress(hosts)}", hint="use --yes")
    if not typer.confirm(f"Stop Slurm and remove Shoal's files on {compress(hosts)}?", err=True):
        raise Interrupted("nothing was changed")


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (init, schema, check, plan, up, status, down):
        app.command()(command)
