"""`shoal ssh` and `shoal exec` on the nodes of running jobs.

An ordinary user's command becomes a step of the user's own job there: Slurm starts it with the rights, the GPUs and the
limits of the job, and ends it with the job. It needs no login to the node.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.errors import CommandTimeout, UsageError
from shoal.hostlist import compress, expand
from shoal.hosts.api import Host, Result
from shoal.hosts.process import program_name
from shoal.hosts.ssh_route import terminal_command
from shoal.jobs.record import step_command
from shoal.remote import python_command
from shoal.verbs.context import Context
from shoal.verbs.slurmctld import slurm_output

_FORMAT = ("-h", "-t", "R", "-o", "%A|%i|%N")
MY_JOBS_COMMAND = ("squeue", "--me", *_FORMAT)
_EXIT_LINE = re.compile(r"^srun: error: \S+: task 0: Exited with exit code \d+\n?", re.M)
"""srun's own line about a program that failed. Its status says the same."""
TERMINAL = ("-t", "-o", "LogLevel=ERROR")
"""Options of ssh for a command with a terminal, without a line about the end of the connection."""
LOGIN_SHELL = ("sh", "-c", 'exec "$(command -v "${SHELL:-}" || command -v bash || echo sh)" -l')
"""An image may lack the user's shell."""


@dataclass(frozen=True)
class RunningJob:
    """A running job and its nodes."""

    number: str
    """As srun takes it."""
    id: str
    """As Slurm shows it: `12`, or `12_3` of an array."""
    nodes: tuple[str, ...]

    def command(self, argv: Sequence[str], *, outside: bool) -> tuple[str, ...]:
        """What runs the command in the image that the job runs in on a node: only the node knows whether it has one."""
        return tuple(argv) if outside else (*python_command("job_container"), *argv)


def parse_running(text: str) -> list[RunningJob]:
    """The jobs in the output of squeue, newest first."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    jobs = [RunningJob(number, id, tuple(expand(nodes))) for number, id, nodes in rows if nodes]
    return sorted(jobs, key=lambda job: -int(job.number) if job.number.isdecimal() else 0)


async def own_jobs(host: Host) -> list[RunningJob]:
    """The running jobs of the user that the connection is for."""
    return parse_running(await slurm_output(host, MY_JOBS_COMMAND))


async def job_hosts(context: Context, job: str, hosts: str | None = None) -> list[str]:
    """The nodes of any running job, or these of them, for the operator. Raises UsageError where no such job runs."""
    async with context.controller_host() as host:
        # Not `-j`: squeue fails for a job that Slurm has forgotten.
        jobs = parse_running(await slurm_output(host, ("squeue", *_FORMAT)))
    return list(choose_nodes([one for one in jobs if job in (one.id, one.number)], job, hosts))


def choose_nodes(jobs: Sequence[RunningJob], job: str | None, hosts: str | None) -> dict[str, RunningJob]:
    """The nodes that a user means, each with the newest job of the user's there. Raises UsageError."""
    chosen = [one for one in jobs if job is None or job in (one.id, one.number)]
    if not chosen and job is not None:
        raise _not_running(job, jobs)
    if not chosen:
        raise UsageError(
            "you have no running job",
            hint="nodes are open to you while a job of yours runs on them; `srun --pty bash`, where you log in, is one",
        )
    nodes: dict[str, RunningJob] = {}
    for one in chosen:
        for node in one.nodes:
            nodes.setdefault(node, one)
    if hosts is None:
        return nodes
    try:
        names = expand(hosts)
    except ValueError as error:
        raise UsageError(f"{hosts!r} is not a hostlist: {error}", hint="write gpu01,gpu02 or gpu[01-16]") from None
    missing = [name for name in names if name not in nodes]
    if missing:
        whose = f"job {job} does not run" if job else "no running job of yours is"
        raise UsageError(f"{whose} on {compress(missing)}", hint=f"use one of {compress(nodes)}")
    return {name: nodes[name] for name in names}


def _not_running(job: str, jobs: Iterable[RunningJob]) -> UsageError:
    known = ", ".join(one.id for one in jobs)
    whose = "running job of yours" if known else "running job"
    return UsageError(
        f"{job} is no {whose}", hint=f"use one of {known}" if known else "`shoal jobs` lists jobs with their states"
    )


async def run_step(
    host: Host, job: RunningJob, node: str, argv: Sequence[str], timeout: float | None, *, outside: bool = False
) -> Result:
    """Run a program on a node inside a job, and in its image. The result is the program's own."""
    try:
        command = step_command(job.number, [node], job.command(argv, outside=outside))
        result = await host.run(command, timeout=timeout, root=False)
    except CommandTimeout:
        cause = f"{program_name(argv)} did not end within the {timeout:g} s you gave it, and was ended"
        raise CommandTimeout(node, cause, hint="give it longer: --timeout SECONDS") from None
    return Result(result.status, result.stdout, _EXIT_LINE.sub("", result.error_text).encode())


async def user_ssh_command(
    context: Context,
    host: str | None,
    job: str | None,
    argv: Sequence[str],
    *,
    terminal: bool = False,
    outside: bool = False,
) -> list[str]:
    """The command line that opens a shell inside a job of the user's, or on the host that the user logs in to."""
    joined = context.joined
    assert joined is not None
    async with context.controller_host() as entry:
        jobs = await own_jobs(entry)
    login = _login_command(context, ("-t",) if not argv else TERMINAL if terminal else ())
    open_hosts = [member.name for member in joined.record.members]
    if job is None and host is not None and not any(host in one.nodes for one in jobs):
        if (joined.login is not None and host == joined.login.host) or host in open_hosts:
            return _open_login(context, host, login, argv)
        if jobs:
            choose_nodes(jobs, None, host)  # says which nodes there are
    node, running = next(iter(choose_nodes(jobs, job, host).items()))
    # As ssh does, a command is a line for the user's shell.
    program = running.command(("sh", "-c", " ".join(argv)) if argv else LOGIN_SHELL, outside=outside)
    step = step_command(running.number, [node], program, ("--pty",) if terminal or not argv else ())
    return [*login, shlex.join(step)] if login else list(step)


def _login_command(context: Context, options: Iterable[str]) -> list[str]:
    """The ssh command line to the host that the user logs in to; empty where this machine is that host."""
    assert context.joined is not None
    login = context.joined.login
    if login is None:
        return []
    return terminal_command(context.joined.target(), context.known_hosts, options)


def _open_login(context: Context, host: str, login: list[str], argv: Sequence[str]) -> list[str]:
    """A plain login, where the name is that of the user's own login. Raises UsageError for another host."""
    assert context.joined is not None
    entry = context.joined.login
    if entry is None or (host != entry.host and len(context.joined.record.members) > 1):
        user = f"{entry.user}@" if entry is not None and entry.user else ""
        raise UsageError(f"no running job of yours is on {host}", hint=f"users log in there with `ssh {user}{host}`")
    return [*login, *([" ".join(argv)] if argv else [])]
