"""The commands about hosts: ssh, exec, node drain, node resume, node remove, keys rotate."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.cluster_commands import finish_up
from shoal.cli.options import Cluster, DrainTimeout, File, suggest, suggest_hosts, with_session
from shoal.cli.output import neutralize
from shoal.cli.session import PARTLY, Session
from shoal.errors import ShoalError
from shoal.hostlist import compress

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.verbs.exec import ExecResult
    from shoal.verbs.keys import KeysResult

node = typer.Typer(help="Drain, resume or remove a node.", no_args_is_help=True, rich_markup_mode=None)
keys = typer.Typer(help="Replace the keys of a running cluster.", no_args_is_help=True, rich_markup_mode=None)

PACKAGES = {"ssh": "openssh-client", "srun": "slurm-client"}

Nodes = Annotated[
    list[str],
    typer.Argument(metavar="HOSTS", help="Nodes: gpu01, gpu[01-04], or several.", autocompletion=suggest_hosts),
]


Job = Annotated[str | None, typer.Option("--job", metavar="NUMBER", help="Only the nodes of this running job.")]
Outside = Annotated[bool, typer.Option("--outside", help="On the node itself, where the job runs in an image.")]


def ssh(
    host: Annotated[
        str | None,
        typer.Argument(help="A host of the cluster. Default with --job: its first node.", autocompletion=suggest_hosts),
    ] = None,
    command: Annotated[list[str] | None, typer.Argument(help="What to run there. Default: a shell.")] = None,
    job: Job = None,
    outside: Outside = False,
    file: File = None,
    cluster: Cluster = None,
    forget_key: Annotated[
        bool, typer.Option("--forget-key", help="Forget the host's key, because it was reinstalled.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the ssh command line instead of running it.")] = False,
) -> None:
    """Open a shell on a host, with this cluster's keys.

    Ordinary users get one on the nodes of their running jobs, inside the job and its image, with its GPUs and limits.
    """
    with Session(json, file, cluster) as session:
        from shoal.hosts.ssh_route import remove_directory
        from shoal.verbs.exec import forget_host, ssh_command

        context = session.open()
        if forget_key:
            forgotten = forget_host(context, host)
            if not session.finish({"host": host, "forgotten": forgotten}):
                session.console.print(f"forgot the key of {host}" if forgotten else f"there was no key of {host}")
            return
        terminal = all(os.isatty(number) for number in (0, 1, 2))
        line = session.run(ssh_command(context, host, command or [], job, terminal=terminal, outside=outside))
        if session.finish({"command": line}):
            return
        remove_directory()
        try:
            os.execvp(line[0], line)
        except FileNotFoundError:
            raise ShoalError(f"this machine has no {line[0]} command", hint=f"install {PACKAGES[line[0]]}") from None


@with_session
def exec(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.")],
    hosts: Annotated[
        str | None,
        typer.Option(
            *("--hosts", "-w"),
            metavar="HOSTS",
            help="Which hosts: gpu01,gpu02 or gpu[01-16]. Default: all.",
            autocompletion=suggest_hosts,
        ),
    ] = None,
    nodeset: Annotated[str | None, typer.Option(metavar="NAME", help="Only the hosts of this nodeset.")] = None,
    job: Job = None,
    outside: Outside = False,
    user: Annotated[bool, typer.Option("--user", help="As the login user instead of root.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long to wait on each host.", min=0)
    ] = None,
    *,
    session: Session,
) -> None:
    """Run a command on many hosts; equal outputs are shown once.

    For ordinary users: as themselves, on the nodes of their running jobs, inside the job and its image.
    """
    from shoal.verbs.exec import execute

    work = execute(session.open(), command, hosts, nodeset, root=not user, timeout=timeout, job=job, outside=outside)
    finish_exec(session, session.run(work))


def finish_exec(session: Session, result: ExecResult) -> None:
    groups = [
        {"hosts": names, "status": outcome.status, "stdout": outcome.text, "stderr": outcome.error_text}
        for names, outcome in result.groups
    ]
    status = PARTLY if result.failures else result.worst if result.worst < 126 else 1
    if not session.finish({"groups": groups, "failures": result.failures, "fix": result.hint}, status):
        show_exec(session.console, result)


def show_exec(console: Console, result: ExecResult) -> None:
    """Hosts with equal output share one heading, as clush -b does."""
    from shoal.cli.screen import print_fix, show_failures

    for names, outcome in result.groups:
        status = f" (exit {outcome.status})" if outcome.status else ""
        console.print(f"[bold]{compress(names)}[/] ({len(names)}){status}", soft_wrap=True)
        _print_verbatim(console, outcome.text)
        _print_verbatim(console, outcome.error_text, style="red")
    print_fix(console, result.hint, indent=2)
    show_failures(console, result.failures)


def _print_verbatim(console: Console, text: str, style: str = "") -> None:
    """What a program printed: no line is broken, and no tab is replaced."""
    if not text:
        return
    if style and console.is_terminal:
        console.out(neutralize(text).rstrip("\n"), style=style)
    else:
        console.file.write(neutralize(text) if text.endswith("\n") else f"{neutralize(text)}\n")


@node.command("drain")
@with_session
def node_drain(
    hosts: Nodes,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="The reason that `status` shows.")] = "drained by hand",
    *,
    session: Session,
) -> None:
    """Let running jobs end and start no new ones."""
    from shoal.verbs.node import drain_nodes

    finish_nodes(session, "draining", session.run(drain_nodes(session.open(operator=True), ",".join(hosts), reason)))


@node.command("resume")
@with_session
def node_resume(hosts: Nodes, session: Session) -> None:
    """Give drained nodes jobs again."""
    from shoal.verbs.node import resume_nodes

    finish_nodes(session, "resumed", session.run(resume_nodes(session.open(operator=True), ",".join(hosts))))


def finish_nodes(session: Session, verb: str, names: list[str]) -> None:
    if not session.finish({verb: names}):
        text = f"{verb} {compress(names)}" if names else "no changes: these nodes accept jobs already"
        session.console.print(text)


@node.command("remove")
@with_session
def node_remove(
    host: Annotated[str, typer.Argument(help="One node.", autocompletion=suggest_hosts)],
    session: Session,
    drain_timeout: DrainTimeout = None,
) -> None:
    """Remove a node from the file and the cluster.

    It is drained, and removed once its jobs have ended.
    """
    from shoal.plan.apply import ApplyTimeouts
    from shoal.verbs.node import remove_node

    finish_up(
        session, session.run(remove_node(session.open(operator=True), host, ApplyTimeouts(drain_s=drain_timeout)))
    )


@keys.command("rotate")
@with_session
def rotate(
    key: Annotated[
        str,
        typer.Argument(
            help="Which: munge, slurm, wireguard, tailscale or all.",
            autocompletion=suggest("munge", "slurm", "wireguard", "tailscale", "all"),
        ),
    ],
    leave_unreachable: Annotated[
        bool, typer.Option("--leave-unreachable", help="Proceed without hosts that do not answer; `up` repairs them.")
    ] = False,
    *,
    session: Session,
) -> None:
    """Replace a key on all hosts at once.

    Running jobs go on. It measures and prints how long Slurm did not answer. If it is interrupted, run it again: it
    continues with the same new key.
    """
    from shoal.verbs.keys import rotate as verb

    result = session.run(verb(session.open(operator=True), key, leave_unreachable=leave_unreachable))
    if not session.finish(result, PARTLY if result.left else 0):
        show_keys(session.console, result)


def show_keys(console: Console, result: KeysResult) -> None:
    from shoal.cli.screen import show_failures

    for key in result.rotated:
        key_state = "an earlier rotation is finished" if key.finished else "a new key"
        console.print(f"[green]✓[/] {key.key}: {key_state} on {compress(key.hosts)}")
        outage = "Slurm always answered" if not key.failed_seconds else f"Slurm failed for {key.failed_seconds:.2f} s"
        probe_text = f"{key.asked} requests, the slowest answer took {key.slowest_answer:.1f} s"
        console.print(f"  {outage} ({probe_text})")
    show_failures(console, result.left)
    if result.left:
        verb = "has" if len(result.left) == 1 else "have"
        console.print(f"  {compress(result.left)} still {verb} the old key: run `shoal up` once reachable")
