"""The tailnet in `shoal status`: how the controller reaches each member, and whose key ends soon."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import TimedOut
from shoal.hosts.api import Host
from shoal.network.tailscale import SOON, STATUS_COMMAND, Tailnet, TailnetNode, Way, read_status, tailnet_name
from shoal.slurm.state import NodeState
from shoal.verbs.context import Context

PATIENCE = 10.0


@dataclass(frozen=True)
class TailnetMember:
    """A member as the controller sees it."""

    name: str
    address: str = ""
    way: Way = "unknown"
    """direct, relayed, idle (nothing was sent lately, so nobody knows), offline; unknown to the tailnet."""
    relay: str = ""
    """The relay that packets go through, where they do."""
    days: int | None = None
    """Days until its key ends, where that is soon."""


@dataclass(frozen=True)
class TailnetView:
    """The tailnet as the controller sees it."""

    state: str
    """Tailscale's own word: Running, NeedsLogin."""
    problem: str = ""
    members: tuple[TailnetMember, ...] = ()


async def tailnet_view(context: Context, host: Host) -> Tailnet | None:
    """What the controller's Tailscale says; None where the network is another."""
    if context.spec.network.kind != "tailscale":
        return None
    try:
        said = await host.run(STATUS_COMMAND, timeout=PATIENCE)
    except TimedOut:
        return Tailnet(problem=f"says nothing for {PATIENCE:g} s")
    try:
        return read_status(json.loads(said.text))
    except (ValueError, AttributeError):
        return Tailnet(problem=(said.error_text.strip().splitlines() or ["says nothing"])[-1])


def tailnet_members(
    context: Context, tailnet: Tailnet | None, nodes: Sequence[NodeState], now: float | None = None
) -> TailnetView | None:
    """The members in it, by the addresses that Slurm has, or else by the names we gave them."""
    if tailnet is None:
        return None
    at = {node.name: node.address for node in nodes}
    called = {node.name: node for node in tailnet.peers}
    found = []
    for member in context.members:
        if member == context.controller:
            node: TailnetNode | None = tailnet.own
        else:
            known = tailnet.at(at.get(member.name, ""))
            node = known or called.get(tailnet_name(context.cluster, member.name))
        found.append(_member(member.name, node, member == context.controller, time.time() if now is None else now))
    return TailnetView(tailnet.state, tailnet.problem, tuple(found))


def _member(name: str, node: TailnetNode | None, own: bool, now: float) -> TailnetMember:
    if node is None or not node.addresses:
        return TailnetMember(name)
    left = node.expires - now if node.expires is not None else None
    return TailnetMember(
        name,
        node.addresses[0],
        "direct" if own else node.way,
        node.relay if not own and node.way == "relayed" else "",
        max(0, int(left / 86400)) if left is not None and left < SOON else None,
    )
