"""`shoal node drain|resume|remove`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.errors import UsageError
from shoal.plan.apply import Patience
from shoal.plan.nodes import drain, resume
from shoal.spec.edit import remove_host
from shoal.spec.load import load_all
from shoal.spec.member import Member
from shoal.verbs.context import Context
from shoal.verbs.down import release
from shoal.verbs.up import UpResult, up


async def drain_nodes(context: Context, hosts: str, reason: str) -> list[str]:
    """Let the jobs on these nodes end and start no new ones."""
    names = _nodes(context, hosts)
    async with await context.fleet([context.controller]) as fleet:
        await drain(await fleet.host(context.controller.name), names, reason)
    return names


async def resume_nodes(context: Context, hosts: str) -> list[str]:
    """Give these nodes jobs again. Returns those that took none before."""
    names = _nodes(context, hosts)
    async with await context.fleet([context.controller]) as fleet:
        return await resume(await fleet.host(context.controller.name), names)


async def remove_node(context: Context, name: str, patience: Patience) -> UpResult:
    """Take a node out of the file and out of the cluster: drained, waited for, removed."""
    [node] = _nodes(context, context.choose_one(name).name)
    if context.file is None:
        raise UsageError(
            f"there is no file to take {node} out of", hint="write one with `shoal init`, then run the command again"
        )
    lent = [member for member in context.choose(node) if member.provider is None]
    remove_host(context.file, node)
    spec, warnings = load_all(context.file)
    result = await up(replace(context, spec=spec, warnings=tuple(warnings)), patience)
    if lent and not result.staying:
        _, failures = await release(context, lent)
        return replace(result, failures={**result.failures, **failures})
    return result


def _nodes(context: Context, hosts: str) -> list[str]:
    chosen: Sequence[Member] = context.choose(hosts)
    others = [member.name for member in chosen if "compute" not in member.roles]
    if others:
        raise UsageError(f"not a compute node: {', '.join(others)}", hint="name a node that `shoal status` lists")
    return [member.name for member in chosen]
