"""`shoal exec` and `shoal ssh`: a command on many hosts at once, and a shell on one."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.errors import CommandTimeout, HostError, UsageError
from shoal.hosts.api import Result
from shoal.hosts.fanout import group_equal
from shoal.hosts.host_keys import HostKeys
from shoal.hosts.process import program_name
from shoal.verbs.context import Context


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
    context: Context, argv: Sequence[str], hosts: str | None, nodeset: str | None, *, root: bool, timeout: float | None
) -> ExecResult:
    """Run a command on the chosen hosts."""
    if not argv:
        raise UsageError("exec needs a command", hint="shoal exec -- uptime")
    async with await context.fleet(context.choose(hosts, nodeset)) as fleet:

        async def run(name: str) -> Result:
            host = await fleet.host(name)
            try:
                return await host.run(argv, root=root, timeout=timeout)
            except CommandTimeout:
                cause = f"{program_name(argv)} did not end within the {timeout:g} s you gave it, and was ended"
                raise CommandTimeout(name, cause, hint="give it longer: --timeout SECONDS") from None

        results = await fleet.each(fleet.targets, run)
    outputs = {name: b"%d\0%s\0%s" % (r.status, r.stdout, r.stderr) for name, r in results.items()}
    groups = tuple((tuple(names), results[names[0]]) for names, _ in group_equal(outputs))
    return ExecResult(groups, dict(fleet.failures), _suggest_shell(argv, results.values()))


def _suggest_shell(argv: Sequence[str], results: Iterable[Result]) -> str:
    """A shell line given as one word is not a program's name: it needs `sh -c`."""
    is_shell_line = len(argv) == 1 and len(argv[0].split()) > 1
    return (
        f"shoal exec -- sh -c {shlex.quote(argv[0])}" if is_shell_line and any(r.status == 127 for r in results) else ""
    )


async def ssh_command(context: Context, host: str, argv: Sequence[str]) -> list[str]:
    """The `ssh` command line for a host, with this cluster's host keys. Connects first, to learn the host's key."""
    argv = argv[1:] if argv[:1] == ["--"] else _reject_options(host, argv)
    member = context.choose_one(host)
    [target] = (await context.targets([member])).values()
    async with await context.fleet([member]) as fleet:
        await fleet.host(member.name)
    command = ["ssh", "-o", f"UserKnownHostsFile={context.known_hosts}", "-o", "StrictHostKeyChecking=yes"]
    command += ["-o", f"HostKeyAlias={member.name}"]
    if target.port:
        command += ["-p", str(target.port)]
    if target.user:
        command += ["-l", target.user]
    if target.identity:
        command += ["-i", str(target.identity), "-o", "IdentitiesOnly=yes"]
    # Without `--`, ssh takes options after the address as its own.
    return [*command, target.address or target.name, *(["--", *argv] if argv else [])]


def _reject_options(host: str, argv: Sequence[str]) -> Sequence[str]:
    """Raise UsageError for an option after the host, where the command begins."""
    if not argv or not argv[0].startswith("-"):
        return argv
    option = argv[0].partition("=")[0]
    if option in ("--json", "--file", "-f", "--cluster", "--forget-key", "--help"):
        hint = f"put {option} before the host"
    else:
        hint = f"for options of ssh, run ssh itself: `shoal ssh --json {host}` prints its command line"
    raise UsageError(f"{option} is after the host, where the command begins", hint=hint)


def forget_host(context: Context, host: str) -> bool:
    """Forget the key of a host that was reinstalled: the next connection accepts the new one."""
    member = context.choose_one(host)
    return HostKeys(context.known_hosts).forget(member.name)
