"""The `shoal` command."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal import __version__
from shoal.cli import (
    account_commands,
    bench_commands,
    completion,
    env_commands,
    job_commands,
    key_commands,
    money_commands,
    prove_commands,
    simulate_commands,
    ui_commands,
)
from shoal.cli.examples import called
from shoal.cli.help import Headed, explain
from shoal.cli.options import Cluster, File, Json
from shoal.cli.session import Session, run_main
from shoal.errors import ShoalError

app = typer.Typer(
    name="shoal",
    cls=Headed,
    help="One Slurm cluster from the machines you have, as shoal.yaml says. Without a file, a sandbox on this machine.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`shoal COMMAND --help` shows how each is called. Begin with init, check and up; then run.",
)
node_app = typer.Typer(help="Drain, resume or remove a node.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(node_app, name="node")

DrainTimeout = Annotated[
    float | None,
    typer.Option(help="Seconds to wait for jobs on nodes that leave. Default: as long as they run.", min=0),
]


def main() -> None:
    """Run what the command line says."""
    run_main(only(sys.argv[1:2]))


def only(words: list[str]) -> typer.Typer:
    """The app with the one command that is called, for typer takes its time over each. With all, where it is none."""
    commands = [command for command in app.registered_commands if [called(command)] == words]
    groups = [group for group in app.registered_groups if [group.name] == words]
    if commands or groups:
        app.registered_commands, app.registered_groups = commands, groups
    return app


@app.command()
def init(
    hosts: Annotated[
        str | None, typer.Option(help="Hosts, as gpu01,gpu02 or gpu[01-16]; the first is the controller.")
    ] = None,
    ssh_config: Annotated[Path | None, typer.Option(help="Take the hosts from this SSH config.")] = None,
    cluster: Annotated[str, typer.Option(help="The cluster's name.")] = "reef",
    file: Annotated[Path, typer.Option("--file", "-f", help="The file to write.")] = Path("shoal.yaml"),
    json: Json = False,
) -> None:
    """Write a first shoal.yaml, with comments.

    For the hosts you name, for those of an SSH config, or, with neither, for the sandbox.
    """
    with Session(json) as session:
        from shoal.verbs.init import init as write

        # A comma inside brackets belongs to a hostlist: node[1,3],gpu01 names two entries.
        names = re.split(r",(?![^\[]*\])", hosts) if hosts is not None else None
        write(file, hosts=names, ssh_config=ssh_config, cluster=cluster)
        session.finish_init(file)


@app.command()
def schema(json: Annotated[bool, typer.Option("--json", help="The schema is JSON in any case.")] = False) -> None:
    """Print the JSON Schema of shoal.yaml, for editors."""
    with Session(True):
        from shoal.verbs.schema import schema_text

        print(schema_text())


@app.command()
def check(file: File = None, cluster: Cluster = None, json: Json = False) -> None:
    """Say all that stands in the way, and change nothing."""
    with Session(json) as session:
        from shoal.verbs.check import check as verb

        session.finish_check(session.run(verb(session.open(file, cluster))))


@app.command()
def plan(
    file: File = None,
    cluster: Cluster = None,
    diff: Annotated[bool, typer.Option("--diff", help="Show the changes inside files.")] = False,
    json: Json = False,
) -> None:
    """Show what `up` would change on each host and what that costs."""
    with Session(json) as session:
        from shoal.verbs.up import plan as verb

        session.finish_plan(session.run(verb(session.open(file, cluster))), diff)


@app.command()
def up(
    file: File = None,
    cluster: Cluster = None,
    drain_timeout: DrainTimeout = None,
    allow_job_loss: Annotated[bool, typer.Option("--allow-job-loss", help="Go on when a change ends jobs.")] = False,
    leave_rented: Annotated[
        bool, typer.Option("--leave-rented", help="Go on although nobody will give some rented machines back.")
    ] = False,
    leave_records: Annotated[
        bool, typer.Option("--leave-records", help="Go on when accounting moves and its records do not.")
    ] = False,
    json: Json = False,
) -> None:
    """Build the cluster, or bring it to what the file says."""
    with Session(json) as session:
        from shoal.plan.apply import Patience
        from shoal.verbs.up import up as verb

        context = session.open(file, cluster)
        patience = Patience(drain=drain_timeout)
        allowed = {"allow_job_loss": allow_job_loss, "leave_rented": leave_rented, "leave_records": leave_records}
        work = verb(context, patience, **allowed)
        session.finish_up(session.run(work))


@app.command()
def status(file: File = None, cluster: Cluster = None, json: Json = False) -> None:
    """Show nodes, partitions and jobs at a glance."""
    with Session(json) as session:
        from shoal.verbs.status import status as verb

        session.finish_status(session.run(verb(session.open(file, cluster))))


@app.command()
def down(
    file: File = None,
    cluster: Cluster = None,
    force: Annotated[bool, typer.Option("--force", help="Also when jobs run or rented machines may stay.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Take the cluster away.

    Sandbox hosts are removed. On other hosts Slurm is stopped and Shoal's files go; packages stay.
    """
    with Session(json) as session:
        from shoal.verbs.down import down as verb

        context = session.open(file, cluster)
        session.confirm_down(context, yes)
        session.finish_down(session.run(verb(context, force=force)))


@app.command(context_settings={"allow_interspersed_args": False})
def ssh(
    host: Annotated[str, typer.Argument(help="A host of the cluster.", autocompletion=completion.hosts)],
    command: Annotated[list[str] | None, typer.Argument(help="What to run there; a shell when left out.")] = None,
    file: File = None,
    cluster: Cluster = None,
    forget_key: Annotated[
        bool, typer.Option("--forget-key", help="Forget the host's key: it was reinstalled.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the ssh command line instead of running it.")] = False,
) -> None:
    """Open a shell on a host, with this cluster's keys."""
    with Session(json) as session:
        from shoal.verbs.remote import forget_host, ssh_command

        context = session.open(file, cluster)
        if forget_key:
            return session.finish_forget(host, forget_host(context, host))
        line = session.run(ssh_command(context, host, command or []))
        if json:
            return session.finish_value({"command": line})
        try:
            os.execvp(line[0], line)
        except FileNotFoundError:
            raise ShoalError("this machine has no ssh command", hint="install openssh-client") from None


@app.command("exec", context_settings={"allow_interspersed_args": False})
def exec_(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.")],
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            "-w",
            help="Which hosts: gpu01,gpu02 or gpu[01-16]. Default: all.",
            autocompletion=completion.hosts,
        ),
    ] = None,
    nodeset: Annotated[str | None, typer.Option(help="Only the hosts of this nodeset.")] = None,
    user: Annotated[bool, typer.Option("--user", help="As the login user instead of root.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait on each host.", min=0)] = None,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Run a command on many hosts; equal outputs are shown once."""
    with Session(json) as session:
        from shoal.verbs.remote import execute

        context = session.open(file, cluster)
        session.finish_exec(session.run(execute(context, command, hosts, nodeset, root=not user, timeout=timeout)))


@node_app.command("drain")
def node_drain(
    hosts: Annotated[str, typer.Argument(help="Nodes: gpu01 or gpu[01-04].", autocompletion=completion.hosts)],
    reason: Annotated[str, typer.Option(help="Why; shown by `status`.")] = "drained by hand",
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Let running jobs end and start no new ones."""
    with Session(json) as session:
        from shoal.verbs.node import drain_nodes

        session.finish_nodes("draining", session.run(drain_nodes(session.open(file, cluster), hosts, reason)))


@node_app.command("resume")
def node_resume(
    hosts: Annotated[str, typer.Argument(help="Nodes: gpu01 or gpu[01-04].", autocompletion=completion.hosts)],
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Give drained nodes jobs again."""
    with Session(json) as session:
        from shoal.verbs.node import resume_nodes

        session.finish_nodes("resumed", session.run(resume_nodes(session.open(file, cluster), hosts)))


@node_app.command("remove")
def node_remove(
    host: Annotated[str, typer.Argument(help="One node.", autocompletion=completion.hosts)],
    file: File = None,
    cluster: Cluster = None,
    drain_timeout: DrainTimeout = None,
    json: Json = False,
) -> None:
    """Take a node out of the file and the cluster.

    It is drained, and removed once its jobs have ended.
    """
    with Session(json) as session:
        from shoal.plan.apply import Patience
        from shoal.verbs.node import remove_node

        context = session.open(file, cluster)
        session.finish_up(session.run(remove_node(context, host, Patience(drain=drain_timeout))))


job_commands.register(app)
prove_commands.register(app)
account_commands.register(app)
key_commands.register(app)
money_commands.register(app)
bench_commands.register(app)
env_commands.register(app)
ui_commands.register(app)
simulate_commands.register(app)
explain(app)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print Shoal's version.")] = False) -> None:
    if version:
        print(f"shoal {__version__}")
        sys.exit(0)
