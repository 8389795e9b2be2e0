"""`shoal node drain|resume|remove`: take nodes out of service, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shoal.errors import UsageError
from shoal.plan import nodes
from shoal.plan.apply import ApplyTimeouts
from shoal.spec.editor import without_host, write
from shoal.spec.finding import Finding
from shoal.spec.loader import load_text, load_text_all, read_text
from shoal.spec.members import members
from shoal.verbs.context import Context
from shoal.verbs.down import release
from shoal.verbs.slurmctld import running_version
from shoal.verbs.up import UpResult, up


async def drain_nodes(context: Context, hosts: str, reason: str) -> list[str]:
    """Let the jobs on these nodes end, and start no new ones."""
    names = _nodes(context, hosts)
    async with context.controller_host() as controller:
        await running_version(controller)  # fails at once where scontrol would wait half a minute
        await nodes.drain_nodes(controller, names, reason)
    return names


async def resume_nodes(context: Context, hosts: str) -> list[str]:
    """Let these nodes take jobs again. Returns those that were drained or down."""
    names = _nodes(context, hosts)
    async with context.controller_host() as controller:
        await running_version(controller)
        return await nodes.resume_nodes(controller, names)


async def remove_node(context: Context, name: str, timeouts: ApplyTimeouts) -> UpResult:
    """Remove a node from the cluster and the file: drain, wait, remove, release.

    The file is written last, so that a run that is killed can be repeated.
    """
    [node] = _nodes(context, context.choose_one(name).name)
    if context.file is None:
        raise UsageError(
            f"cannot remove {node}: the cluster has no file",
            hint="write one with `shoal init`, then run the command again",
        )
    lent_members = [member for member in context.choose(node) if member.provider is None]
    command = f"shoal node remove {node}"
    spec, warnings = load_text_all(without_host(read_text(context.file), node, context.file), str(context.file))
    result = await up(replace(context, known=spec, warnings=tuple(warnings)), timeouts)
    # `up` reports what would stay on a host that leaves; `release` removes it next.
    result = replace(result, again=command, findings=tuple(f for f in result.findings if f.host != node))
    if result.staying:
        return result
    _, failures = await release(context, lent_members, command)
    if failures:
        finding = Finding(
            "warning",
            "is removed from Slurm and still in the file",
            fix=f"run `{command}` again when it answers; if it is gone for good, remove it from the file by hand",
            host=node,
        )
        return replace(result, failures={**result.failures, **failures}, findings=(*result.findings, finding))
    _remove_from_file(context.file, node)
    return replace(result, removed=tuple(dict.fromkeys((*result.removed, node))))


def _remove_from_file(file: Path, node: str) -> None:
    """Edit the file as it is now: hours may have passed while the jobs ended."""
    text = read_text(file)
    if node in {member.name for member in members(load_text(text, str(file)))}:
        write(file, without_host(text, node, file))


def _nodes(context: Context, hosts: str) -> list[str]:
    chosen_members = context.choose(hosts, rented=True)
    other_names = [member.name for member in chosen_members if "compute" not in member.roles]
    if other_names:
        raise UsageError(f"not a compute node: {', '.join(other_names)}", hint="name a node that `shoal status` lists")
    return [member.name for member in chosen_members]
