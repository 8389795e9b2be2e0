"""`shoal keys rotate`: new keys for a running cluster, and how long Slurm did not answer meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from shoal.errors import HostError, ShoalError, SlurmError, UsageError
from shoal.hostlist import compress
from shoal.plan.connections import Fleet
from shoal.plan.ownership import records_of_others
from shoal.plan.rotation import Rotation, RotationContext, rotate_munge, rotate_tailscale
from shoal.plan.rotation_slurm import rotate_slurm
from shoal.plan.rotation_wireguard import rotate_wireguard
from shoal.plan.slurm_downtime import failed_seconds, measure_downtime
from shoal.roles.slurm_tree import uses_tree
from shoal.slurm.state import NODES_COMMAND, NodeState, parse_nodes
from shoal.spec.members import rented_members
from shoal.verbs.context import Context
from shoal.verbs.rentals import hold_joins
from shoal.verbs.slurmctld import require_configuration

ALL = "all"
NEEDS_MACHINE = frozenset({"POWERING_UP", "ALLOCATED", "MIXED"})
ROTATIONS: Mapping[str, Rotation] = {
    "munge": Rotation(
        "munge key", lambda spec: not uses_tree(spec), "use `slurm`: Shoal's own Slurm has no munge", rotate_munge
    ),
    "slurm": Rotation(
        "key of auth/slurm", lambda spec: spec.auth == "slurm", "write `auth: slurm` into the file", rotate_slurm
    ),
    "wireguard": Rotation(
        "WireGuard keys",
        lambda spec: spec.network.kind == "wireguard",
        "it needs `network: wireguard` in the file",
        rotate_wireguard,
    ),
    "tailscale": Rotation(
        "key in a tailnet",
        lambda spec: spec.network.kind == "tailscale" and spec.network.auth_key is not None,
        "it needs `network: {kind: tailscale, auth_key: env:TS_AUTHKEY}` in the file",
        rotate_tailscale,
        cuts_off=False,
    ),
}
"""All keys, in the order in which `all` rotates them."""


@dataclass(frozen=True)
class RotatedKey:
    key: str
    """`munge`, `wireguard` …"""
    hosts: tuple[str, ...]
    """All confirmed that they have the new key."""
    finished: bool
    """It is the key of an earlier run that was not finished."""
    failed_seconds: float
    """How long Slurm's commands failed meanwhile, on the host where that was longest."""
    failed_by_host: Mapping[str, float] = field(default_factory=dict)
    asked: int = 0
    """How often Slurm was asked, to measure that."""
    slowest_answer: float = 0.0
    """The slowest of these answers, in seconds."""


@dataclass(frozen=True)
class KeysResult:
    cluster: str
    rotated: tuple[RotatedKey, ...]
    left: Mapping[str, HostError] = field(default_factory=dict)
    """Hosts that did not answer and keep the old key until the next `shoal up`."""


async def rotate(context: Context, what: str, *, leave_unreachable: bool = False) -> KeysResult:
    """Rotate one kind of key, or all that the cluster has. Running jobs go on."""
    key_names = _choose_keys(context, what)
    async with await context.fleet() as fleet:
        await _connect(context, fleet, leave_unreachable)
        unreachable = dict(fleet.failures)
        rotated_keys = []
        async with AsyncExitStack() as stack:
            if any(ROTATIONS[name].cuts_off for name in key_names):
                if rented_members(context.spec):  # before the check, so that no node joins after it
                    await stack.enter_async_context(hold_joins(await fleet.host(context.controller.name)))
                await _reject_rented(context, fleet)
            for name in key_names:
                fleet.failures.clear()
                fleet.failures.update(unreachable)
                rotated_keys.append(await _rotate(context, fleet, name))
    return KeysResult(context.cluster, tuple(rotated_keys), unreachable)


def _choose_keys(context: Context, what: str) -> list[str]:
    if what == ALL:
        return [name for name, rotation in ROTATIONS.items() if rotation.used(context.spec)]
    if what not in ROTATIONS:
        raise UsageError(f"there is no key {what!r}", hint=f"use one of {', '.join((*ROTATIONS, ALL))}")
    if not ROTATIONS[what].used(context.spec):
        raise UsageError(f"cluster {context.cluster} has no {ROTATIONS[what].what}", hint=ROTATIONS[what].instead)
    return [what]


async def _connect(context: Context, fleet: Fleet, leave_unreachable: bool) -> None:
    """Connect to every host first: one that does not answer would keep the old key and lose the cluster."""
    with context.progress.phase("connect", len(fleet.targets)) as phase:
        await fleet.each(fleet.targets, fleet.agent, phase)
    fleet.require(context.controller.name)
    others = await records_of_others(context.cluster, fleet, fleet.targets)
    if others:
        problems = "; ".join(f"{name} belongs to cluster {record}" for name, record in others.items())
        raise ShoalError(f"{problems}; nothing was changed", hint=f"take {compress(others)} out of this file")
    if fleet.failures and not leave_unreachable:
        errors = "".join(f"\n  {error.message}" for error in fleet.failures.values())
        raise ShoalError(
            f"{compress(fleet.failures)} would keep the old key and be cut off; nothing was changed{errors}",
            hint="bring it back, or use --leave-unreachable: `shoal up` gives it the new key when it answers",
        )


async def _reject_rented(context: Context, fleet: Fleet) -> None:
    """Raise where rented nodes are up, or starting: they have the old key, and nothing replaces it."""
    result = await (await fleet.host(context.controller.name)).run(NODES_COMMAND, timeout=60)
    require_configuration(context.controller.name, result)
    if result.status != 0 and rented_members(context.spec):
        raise SlurmError(
            f"cannot list the rented nodes that are up; nothing was changed: {result.error_text.strip()}",
            hint="run `shoal up`, then this command again",
        )
    names = [node.name for node in parse_nodes(result.text) if node.cloud and not _is_asleep(node)]
    if names:
        nodes = compress(names)
        raise ShoalError(
            f"{nodes} (rented) would keep the old key and be cut off; nothing was changed",
            hint=f"run on {context.controller.name}: `scontrol update nodename={nodes} state=power_down_asap`; "
            "then wait until their jobs have ended and they are gone",
        )


def _is_asleep(node: NodeState) -> bool:
    """Whether it has no machine, or is losing it, and no job will start it."""
    return bool({"POWERED_DOWN", "POWERING_DOWN"} & set(node.state)) and not NEEDS_MACHINE & set(node.state)


async def _rotate(context: Context, fleet: Fleet, name: str) -> RotatedKey:
    controller = context.controller.name
    probe_hosts = [controller, *(host for host in fleet.live if host != controller)]
    with context.progress.phase(f"new {ROTATIONS[name].what}", len(fleet.live)) as phase:
        async with measure_downtime(fleet, probe_hosts) as probes:
            result = await ROTATIONS[name].run(
                RotationContext(context.spec, fleet, controller, tuple(fleet.live), phase)
            )
    return RotatedKey(
        name,
        result.hosts,
        result.finished,
        round(probes.failed_seconds, 3),
        {host: round(failed_seconds(answers), 3) for host, answers in probes.hosts.items()},
        probes.asked,
        round(probes.slowest, 3),
    )
