"""`shoal exec` and `shoal ssh`: a command on many hosts at once, and a shell on one."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.errors import CommandTimeout, HostError, UsageError
from shoal.hostlist import compress, expand
from shoal.hosts.api import Result
from shoal.hosts.fanout import group_equal
from shoal.hosts.host_keys import HostKeys
from shoal.hosts.process import program_name
from shoal.hosts.ssh_route import terminal_command
from shoal.verbs.context import Context
from shoal.verbs.own_jobs import TERMINAL, choose_nodes, job_hosts, own_jobs, run_step, user_ssh_command


@dataclass(frozen=True)
class ExecResult:
    """The output of a command, grouped by hosts with equal output and status."""

    groups: tuple[tuple[tuple[str, ...], Result], ...]
    failures: Mapping[str, HostError] = field(default_factory=dict)
    hint: str = ""
    """The command that was probably meant, where no host has this one."""

    @property
    def worst(self) -> int:
        """The highest exit status of any host."""
        return max((result.status for _, result in self.groups), default=0)


async def execute(
    context: Context,
    argv: Sequence[str],
    hosts: str | None,
    nodeset: str | None,
    *,
    root: bool,
    timeout: float | None,
    job: str | None = None,
    outside: bool = False,
) -> ExecResult:
    """Run a command on the chosen hosts; for an ordinary user, on the nodes of their running jobs.

    `outside`: on the node, where the job runs in an image.
    """
    if not argv:
        raise UsageError("exec needs a command", hint="shoal exec -- uptime")
    if context.joined is not None:
        return await _execute_in_jobs(context, argv, hosts, nodeset, timeout, job, outside)
    if job is not None:
        hosts = compress(await job_hosts(context, job, hosts))
    async with await context.fleet(context.choose(hosts, nodeset)) as fleet:

        async def run(name: str) -> Result:
            host = await fleet.host(name)
            try:
                return await host.run(argv, root=root, timeout=timeout)
            except CommandTimeout:
                cause = f"{program_name(argv)} did not end within the {timeout:g} s you gave it, and was ended"
                raise CommandTimeout(name, cause, hint="give it longer: --timeout SECONDS") from None

        results = await fleet.each(fleet.targets, run)
    return _group(argv, results, dict(fleet.failures))


async def _execute_in_jobs(
    context: Context,
    argv: Sequence[str],
    hosts: str | None,
    nodeset: str | None,
    timeout: float | None,
    job: str | None,
    outside: bool,
) -> ExecResult:
    """Run a command as a step of each node's job."""
    results: dict[str, Result] = {}
    failures: dict[str, HostError] = {}
    async with context.controller_host() as host:
        nodes = choose_nodes(await own_jobs(host), job, hosts)
        assert context.joined is not None
        nodesets = context.joined.record.nodesets
        if nodeset is not None and nodeset not in nodesets:
            raise UsageError(
                f"there is no nodeset {nodeset!r} in cluster {context.cluster}",
                hint=f"use one of {', '.join(nodesets)}",
            )
        inside = set(nodes if nodeset is None else expand(nodesets[nodeset].nodes))
        if not inside & set(nodes):
            raise UsageError(
                f"no running job of yours is on nodes of {nodeset}", hint=f"yours are on {compress(nodes)}"
            )

        async def run(node: str) -> None:
            try:
                results[node] = await run_step(host, nodes[node], node, argv, timeout, outside=outside)
            except CommandTimeout as error:
                failures[node] = error

        await asyncio.gather(*(run(node) for node in nodes if node in inside))
    return _group(argv, {node: results[node] for node in sorted(results)}, failures)


def _group(argv: Sequence[str], results: Mapping[str, Result], failures: Mapping[str, HostError]) -> ExecResult:
    outputs = {name: b"%d\0%s\0%s" % (r.status, r.stdout, r.stderr) for name, r in results.items()}
    groups = tuple((tuple(names), results[names[0]]) for names, _ in group_equal(outputs))
    return ExecResult(groups, failures, _suggest_shell(argv, results.values()))


def _suggest_shell(argv: Sequence[str], results: Iterable[Result]) -> str:
    """A shell line given as one word is not a program's name: it needs `sh -c`."""
    is_shell_line = len(argv) == 1 and len(argv[0].split()) > 1
    return (
        f"shoal exec -- sh -c {shlex.quote(argv[0])}" if is_shell_line and any(r.status == 127 for r in results) else ""
    )


async def ssh_command(
    context: Context,
    host: str | None,
    argv: Sequence[str],
    job: str | None = None,
    *,
    terminal: bool = False,
    outside: bool = False,
) -> list[str]:
    """The command line for a shell on a host, with this cluster's host keys, or inside a job of an ordinary user.

    Connects first, to learn the host's key. `terminal`: a command gets a terminal, too, as `srun --pty` needs one.
    """
    argv = argv[1:] if argv[:1] == ["--"] else _reject_options(host or "HOST", argv)
    if host is None and job is None:
        raise UsageError("ssh needs a host or a job", hint="shoal ssh HOST, or shoal ssh --job NUMBER")
    if context.joined is not None:
        return await user_ssh_command(context, host, job, argv, terminal=terminal, outside=outside)
    if job is not None:
        host = (await job_hosts(context, job, host))[0]
    assert host is not None
    member = context.choose_one(host)
    [target] = (await context.targets([member])).values()
    async with await context.fleet([member]) as fleet:
        await fleet.host(member.name)
    return [*terminal_command(target, context.known_hosts, TERMINAL if argv and terminal else ()), *argv]


def _reject_options(host: str, argv: Sequence[str]) -> Sequence[str]:
    """Raise UsageError for an option after the host, where the command begins."""
    if not argv or not argv[0].startswith("-"):
        return argv
    option = argv[0].partition("=")[0]
    if option in ("--json", "--file", "-f", "--cluster", "--forget-key", "--job", "--help"):
        hint = f"put {option} before the host"
    else:
        hint = f"for options of ssh, run ssh itself: `shoal ssh --json {host}` prints its command line"
    raise UsageError(f"{option} is after the host, where the command begins", hint=hint)


def forget_host(context: Context, host: str | None) -> bool:
    """Forget the key of a host that was reinstalled: the next connection accepts the new one."""
    if host is None:
        raise UsageError("--forget-key needs a host", hint="shoal ssh --forget-key HOST")
    if context.joined is not None:
        return HostKeys(context.known_hosts).forget(host)
    member = context.choose_one(host)
    return HostKeys(context.known_hosts).forget(member.name)
