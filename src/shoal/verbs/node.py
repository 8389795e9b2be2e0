"""`shoal node drain|resume|remove`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shoal.errors import UsageError
from shoal.plan.apply import Patience
from shoal.plan.nodes import drain, resume
from shoal.spec.edit import without_host, write
from shoal.spec.finding import Finding
from shoal.spec.load import load_text, load_text_all, read_text
from shoal.spec.member import Member
from shoal.spec.members import members
from shoal.verbs.context import Context
from shoal.verbs.down import release
from shoal.verbs.status import running_version
from shoal.verbs.up import UpResult, up


async def drain_nodes(context: Context, hosts: str, reason: str) -> list[str]:
    """Let the jobs on these nodes end and start no new ones."""
    names = _nodes(context, hosts)
    async with await context.fleet([context.controller]) as fleet:
        controller = await fleet.host(context.controller.name)
        await running_version(controller)  # says at once what scontrol would say after half a minute
        await drain(controller, names, reason)
    return names


async def resume_nodes(context: Context, hosts: str) -> list[str]:
    """Give these nodes jobs again. Returns those that took none before."""
    names = _nodes(context, hosts)
    async with await context.fleet([context.controller]) as fleet:
        controller = await fleet.host(context.controller.name)
        await running_version(controller)
        return await resume(controller, names)


async def remove_node(context: Context, name: str, patience: Patience) -> UpResult:
    """Take a node out of the cluster and out of the file: drained, waited for, removed, given back.

    The file is written last. Killed before that, the next run still knows the node and goes on with it.
    """
    [node] = _nodes(context, context.choose_one(name).name)
    if context.file is None:
        raise UsageError(
            f"there is no file to take {node} out of", hint="write one with `shoal init`, then run the command again"
        )
    lent = [member for member in context.choose(node) if member.provider is None]
    again = f"shoal node remove {node}"
    spec, warnings = load_text_all(without_host(read_text(context.file), node, context.file), str(context.file))
    result = await up(replace(context, known=spec, warnings=tuple(warnings)), patience)
    # `up` says of a host that leaves what would stay on it: that is what comes next.
    result = replace(result, again=again, findings=tuple(f for f in result.findings if f.host != node))
    if result.staying:
        return result
    _, failures = await release(context, lent, again)
    if failures:
        still = Finding(
            "warning",
            "is out of Slurm and still in the file",
            fix=f"run `{again}` again when it answers; if it is gone for good, take it out of the file by hand",
            host=node,
        )
        return replace(result, failures={**result.failures, **failures}, findings=(*result.findings, still))
    _forget(context.file, node)
    return replace(result, removed=tuple(dict.fromkeys((*result.removed, node))))


def _forget(file: Path, node: str) -> None:
    """Take the node out of the file as it is now: hours may have passed while its jobs ended."""
    text = read_text(file)
    if node in {member.name for member in members(load_text(text, str(file)))}:
        write(file, without_host(text, node, file))


def _nodes(context: Context, hosts: str) -> list[str]:
    chosen: Sequence[Member] = context.choose(hosts)
    others = [member.name for member in chosen if "compute" not in member.roles]
    if others:
        raise UsageError(f"not a compute node: {', '.join(others)}", hint="name a node that `shoal status` lists")
    return [member.name for member in chosen]
