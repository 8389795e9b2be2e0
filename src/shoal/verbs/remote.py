"""`shoal exec` and `shoal ssh`: a command on many hosts at once, and a shell on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.errors import HostError, UsageError
from shoal.hosts.api import Result
from shoal.hosts.fanout import group_equal
from shoal.hosts.host_keys import forget
from shoal.verbs.context import Context


@dataclass(frozen=True)
class ExecResult:
    """What a command printed, hosts with equal output and status together."""

    groups: tuple[tuple[tuple[str, ...], Result], ...]
    failures: Mapping[str, HostError] = field(default_factory=dict)

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
            return await host.run(argv, root=root, timeout=timeout)

        results = await fleet.each(fleet.targets, run)
    keyed = {name: b"%d\0%s\0%s" % (r.status, r.stdout, r.stderr) for name, r in results.items()}
    groups = tuple((tuple(names), results[names[0]]) for names, _ in group_equal(keyed))
    return ExecResult(groups, dict(fleet.failures))


async def ssh_command(context: Context, host: str, argv: Sequence[str]) -> list[str]:
    """The `ssh` command line for a host, with this cluster's known host keys. Connects once to meet the host first."""
    member = context.choose_one(host)
    [target] = await context.targets([member])
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
    return [*command, target.address or target.name, *argv]


def forget_host(context: Context, host: str) -> bool:
    """Forget the key of a host that was reinstalled, so that the next connection meets it anew."""
    member = context.choose_one(host)
    return forget(context.known_hosts, member.name)
