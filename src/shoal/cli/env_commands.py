"""The commands about Python environments: env build, env list, env remove, env clean."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shoal.cli.options import with_session
from shoal.cli.screen import Columns, count, show_failures, show_findings
from shoal.cli.session import PARTLY, Session
from shoal.errors import UsageError
from shoal.hostlist import compress

if TYPE_CHECKING:
    from shoal.spec.environments import Environment
    from shoal.verbs.env import CleanResult, EnvironmentState
    from shoal.verbs.env_build import BuildResult

env = typer.Typer(
    help="Build, list and remove Python environments: those in the file, and a user's own.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@env.command("build")
@with_session
def env_build(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Which ones. Default: all in the file.")
    ] = None,
    requirements: Annotated[
        str | None, typer.Option(metavar="FILE", help="Without a spec: the packages of your own environment NAME.")
    ] = None,
    lock: Annotated[
        str | None, typer.Option(metavar="FILE", help="The same, from a file with the version of every package.")
    ] = None,
    pyproject: Annotated[
        str | None, typer.Option(metavar="FILE", help="The same: the dependencies of a pyproject.toml.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="VERSION", help="The Python of your own environment. Default: python3.")
    ] = None,
    *,
    session: Session,
) -> None:
    """Build environments.

    With a spec, those in it: on the controller, copied to the nodes. Without one, your own, in your directory for jobs.
    Existing environments stay as they are, so running jobs keep theirs. Run it again after you change packages or add
    nodes.
    """
    context = session.open()
    options = {"requirements": requirements, "lock": lock, "pyproject": pyproject, "python": python}
    given = {name: value for name, value in options.items() if value is not None}
    if context.joined is not None:
        from shoal.verbs.env_user import build_own

        result = session.run(build_own(context, *_own_environment(names or [], given)))
    else:
        from shoal.verbs.env_build import build

        if given:
            option = f"--{next(iter(given))}"
            raise UsageError(
                f"{option} is for users without a spec", hint="put the environment into `environments` of the file"
            )
        result = session.run(build(context, names or []))
    has_errors = any(finding.level == "error" for finding in result.findings)
    if not session.finish(result, 1 if has_errors else PARTLY if result.failures else 0):
        show_built(session.console, result)


def _own_environment(names: list[str], given: dict[str, str]) -> tuple[str, Environment]:
    """The environment that a user describes on the command line."""
    from pydantic import TypeAdapter, ValidationError

    from shoal.spec.checks import InvalidValue
    from shoal.spec.environments import SOURCES, Environment, EnvironmentName

    sources = [name for name in SOURCES if name in given]
    if len(names) != 1 or len(sources) != 1:
        finding = (
            "several files are" if len(sources) > 1 else "no file is" if not sources else f"{len(names)} names are"
        )
        raise UsageError(
            f"your own environment has one name and one file with its packages, and {finding} given",
            hint="write `shoal env build NAME --requirements FILE`, or --lock or --pyproject in its place",
        )
    try:
        return TypeAdapter(EnvironmentName).validate_python(names[0]), Environment.model_validate(given)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        option = f"--{detail['loc'][0]} " if detail["loc"] else ""
        reason = detail.get("ctx", {}).get("error")
        what, fix = (reason.what, reason.fix) if isinstance(reason, InvalidValue) else (detail["msg"], "correct it")
        raise UsageError(f"{option}{str(detail['input'])!r}: {what}", hint=fix) from None


@env.command("list")
@with_session
def env_list(session: Session) -> None:
    """Show the environments, which are built, and their paths."""
    context = session.open()
    if context.joined is not None:
        from shoal.verbs.env_user import list_user_environments

        environments = session.run(list_user_environments(context))
    else:
        from shoal.verbs.env import list_environments

        environments = session.run(list_environments(context))
    if not session.finish({"environments": environments}):
        show_list(session.console, environments, is_user=context.joined is not None)


@env.command("remove")
@with_session
def env_remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An environment that you have built.")],
    *,
    session: Session,
) -> None:
    """Remove an environment of your own. What a job uses stays until `shoal env clean`."""
    from shoal.verbs.env_user import remove_own

    context = session.open()
    if context.joined is None:
        raise UsageError(
            "this removes the environments of users without a spec",
            hint="delete it from `environments` of the file, then run `shoal env clean`",
        )
    result = session.run(remove_own(context, name))
    if not session.finish(result):
        session.console.print(f"[green]✓[/] {name}: the name is free again")
        if result.removed or result.kept:
            show_cleaned(session.console, result, False)


@env.command("clean")
@with_session
def env_clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    *,
    session: Session,
) -> None:
    """Remove environments that were replaced and that no job uses."""
    context = session.open()
    if context.joined is not None:
        from shoal.verbs.env_user import clean_own

        result = session.run(clean_own(context, dry_run=dry_run))
    else:
        from shoal.verbs.env import clean

        result = session.run(clean(context, dry_run=dry_run))
    if not session.finish(result, PARTLY if result.failures else 0):
        show_cleaned(session.console, result, dry_run)


def show_built(console: Console, result: BuildResult) -> None:
    show_findings(console, result.findings)
    show_failures(console, result.failures)
    for environment in result.made:
        action = "built" if environment.name in result.fresh else "no changes"
        packages = count(len(environment.packages), "package")
        cuda = f" for CUDA {environment.cuda}" if environment.cuda else ""
        torch = f", torch {environment.torch}{cuda}" if environment.torch else ""
        console.print(
            f"[green]✓[/] {environment.name}: {action}; {packages}, Python {environment.python}{torch}; "
            f"{environment.link}",
            soft_wrap=True,
        )
        if environment.name in result.copied:
            console.print(f"  copied to {compress(result.copied[environment.name])}")


def show_list(console: Console, listed: list[EnvironmentState], is_user: bool = False) -> None:
    if not listed:
        console.print("no environments; `shoal env build NAME --requirements FILE` builds one of your own")
        return
    titles = ("environment", "owner", "state", "place", "python", "packages", "torch", "built")
    table = Columns(*titles, wraps=("environment", "built"))
    for entry in listed:
        owner = entry.owner or "cluster"
        if entry.made is None:
            table.add_row(entry.name, owner, entry.state, entry.place, "-", "-", "-", "-")
            continue
        torch = " ".join(filter(None, (entry.made.torch, entry.made.cuda and f"cuda {entry.made.cuda}"))) or "-"
        made_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made.made_at))
        count = str(len(entry.made.packages))
        table.add_row(entry.name, owner, entry.state, entry.place, entry.made.python, count, torch, made_at)
    console.print(table)
    # Paths are copied, so they are not broken into a column.
    for entry in listed:
        if entry.made is not None:
            console.print(f"{entry.name} is in {entry.path}", soft_wrap=True)
    own = {entry.name for entry in listed if entry.owner}
    for name in sorted({entry.name for entry in listed if not entry.owner} & own):
        console.print(f"\n{name}: yours is used, not the one of the cluster; `shoal env remove {name}` removes yours")
    stale = " ".join(entry.name for entry in listed if entry.state != "built" and not (entry.owner or is_user))
    if stale:
        console.print(f"\n`shoal env build {stale}` builds what is missing")
    for entry in listed:
        if is_user and entry.state != "built":
            fix = "build it again, with its file" if entry.owner else "ask the operator to build it"
            console.print(f"\n{entry.name} is {entry.state}: {fix}")


def show_cleaned(console: Console, result: CleanResult, dry_run: bool) -> None:
    show_failures(console, result.failures)
    for host, ids in result.removed.items():
        console.print(f"{'would remove' if dry_run else 'removed'} {', '.join(ids)} from {host}")
    for number, reason in result.kept.items():
        console.print(f"kept {number}: {reason}")
    if not result.removed and not result.kept:
        console.print("nothing to clean")
