"""The commands about a cluster as a whole: init, schema, check, plan, up, status, down."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import DrainTimeout, Json, Yes, with_session
from shoal.cli.output import plain
from shoal.cli.session import PARTLY, Session, confirm

if TYPE_CHECKING:
    from shoal.plan.model import Plan
    from shoal.spec.finding import Finding
    from shoal.verbs.down import DownResult
    from shoal.verbs.status import ClusterStatus
    from shoal.verbs.up import UpResult

TakeOver = Annotated[
    bool, typer.Option("--take-over", help="Take hosts that other clusters have; ends the jobs on them.")
]


def init(
    hosts: Annotated[
        str | None,
        typer.Option(metavar="HOSTS", help="Hosts, as gpu01,gpu02 or gpu[01-16]; the first is the controller."),
    ] = None,
    ssh_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the hosts from this SSH config.")
    ] = None,
    rent: Annotated[
        str | None, typer.Option(metavar="PROVIDER:TYPE", help="Also rent machines, as lambda:gpu_1x_a10.")
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
        verb(file, hosts=names, ssh_config=ssh_config, cluster=cluster, rent=rent)
        if not session.finish({"file": str(file)}):
            session.console.print(f"wrote {file}; review it, run `shoal check`, then `shoal up`")


def schema(json: Annotated[bool, typer.Option("--json", help="The schema is JSON in any case.")] = False) -> None:
    """Print the JSON Schema of shoal.yaml, for editors."""
    with Session(True):
        from shoal.verbs.init import schema_text

        print(schema_text())


@with_session
def check(session: Session) -> None:
    """Report every problem that would stop `up`; change nothing."""
    from shoal.verbs.check import check as verb

    finish_check(session, session.run(verb(session.open(operator=True))))


def finish_check(session: Session, findings: list[Finding]) -> None:
    errors = sum(finding.level == "error" for finding in findings)
    if not session.finish({"ok": not errors, "findings": findings}, 1 if errors else 0):
        from shoal.cli.screen import count, show_findings

        show_findings(session.console, findings)
        session.console.print(f"[red]✗[/] {count(errors, 'error')}" if errors else "[green]✓[/] no errors")


@with_session
def plan(
    session: Session,
    diff: Annotated[bool, typer.Option("--diff", help="Show the changes inside files.")] = False,
    take_over: TakeOver = False,
) -> None:
    """Show what `up` would change on each host, and its cost."""
    from shoal.verbs.up import plan as verb

    finish_plan(session, session.run(verb(session.open(operator=True), take_over=take_over)), diff)


def finish_plan(session: Session, result: Plan, diff: bool) -> None:
    values = {key: getattr(result, key) for key in ("cluster", "cost", "changes", "findings", "unreached")}
    hosts = [{"name": host.name, "changes": host.changes} for host in result.hosts]
    if not session.finish({**values, "loses": result.lost_jobs, "hosts": hosts}, PARTLY if result.unreached else 0):
        from shoal.cli.cluster_screens import show_plan

        show_plan(session.console, result, diff)


@with_session
def up(
    session: Session,
    drain_timeout: DrainTimeout = None,
    allow_job_loss: Annotated[
        bool, typer.Option("--allow-job-loss", help="Proceed even if a change ends jobs.")
    ] = False,
    leave_rented: Annotated[
        bool,
        typer.Option(
            "--leave-rented",
            help="Proceed even if rented machines can no longer be released, or a former controller cannot be asked.",
        ),
    ] = False,
    leave_records: Annotated[
        bool, typer.Option("--leave-records", help="Proceed even if records of jobs stay behind.")
    ] = False,
    take_over: TakeOver = False,
    yes: Yes = False,
) -> None:
    """Build the cluster, or change it to match the file.

    Asks before it rents a controller or login hosts, with their price.
    """
    from shoal.plan.apply import ApplyTimeouts
    from shoal.verbs.up import rental_costs
    from shoal.verbs.up import up as verb

    context = session.open(operator=True)
    if any(member.machine for member in context.members):
        costs = session.run(rental_costs(context))
        if costs:
            confirm(costs, f"This {costs}. Rent?", yes)

    permissions = {
        "allow_job_loss": allow_job_loss,
        "leave_rented": leave_rented,
        "leave_records": leave_records,
        "take_over": take_over,
        "rent": True,
    }
    finish_up(session, session.run(verb(context, ApplyTimeouts(drain_s=drain_timeout), **permissions)))


def finish_up(session: Session, result: UpResult) -> None:
    value = {**plain(result), "unchanged": result.unchanged, "whole": result.whole}
    if not session.finish(value, 0 if result.whole else PARTLY):
        from shoal.cli.cluster_screens import show_up

        show_up(session.console, result)


@with_session
def status(session: Session) -> None:
    """Show nodes, partitions, services and jobs."""
    from shoal.verbs.status import status as verb

    finish_status(session, session.run(verb(session.open())))


def finish_status(session: Session, result: ClusterStatus) -> None:
    if not session.finish(result):
        from shoal.cli.cluster_screens import show_status

        show_status(session.console, result)


@with_session
def down(
    session: Session,
    force: Annotated[
        bool, typer.Option("--force", help="Proceed even if jobs run or rented machines may remain.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Remove the cluster.

    Sandbox hosts are deleted, and rented hosts given back. On other hosts Slurm is stopped and Shoal's files are
    removed; packages stay.
    """
    from shoal.hostlist import compress
    from shoal.verbs.down import down as verb

    context = session.open(operator=True)
    hosts = [member.name for member in context.members if member.provider is None]
    if hosts:
        names = compress(hosts)
        confirm(f"stops Slurm on {names}", f"Stop Slurm and remove Shoal's files on {names}?", yes)
    if rented := [member.name for member in context.members if member.machine]:
        names = compress(rented)
        effect = f"gives {names} back, with all that is on their disks"
        confirm(effect, f"Give {names} back to the provider, with all that is on their disks?", yes)
    finish_down(session, session.run(verb(context, force=force)))


def finish_down(session: Session, result: DownResult) -> None:
    if not session.finish(result, PARTLY if result.failures else 0):
        from shoal.cli.cluster_screens import show_down

        show_down(session.console, result)
