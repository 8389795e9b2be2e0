"""When the controller last heard from each member over WireGuard, for `shoal status`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.errors import TimedOut
from shoal.hosts.api import Host
from shoal.network.wireguard import INTERFACE, PEERS, peers_in
from shoal.spec.model import Spec

PATIENCE = 10.0
RECENTLY = 360
"""Seconds. Slurm sends something to every node within 100, and WireGuard shakes hands again every 120 while it does."""
MARK = "---"
LOOK = ("sh", "-c", f"date +%s; echo {MARK}; cat {PEERS}; echo {MARK}; wg show {INTERFACE} latest-handshakes")


@dataclass(frozen=True)
class WireGuardView:
    """The network as the controller has it."""

    heard: Mapping[str, int | None] = field(default_factory=dict)
    """Seconds since the last handshake with each member; None where there was none."""
    problem: str = ""

    @property
    def quiet(self) -> tuple[str, ...]:
        """Members that were not heard from recently."""
        return tuple(name for name, ago in self.heard.items() if ago is None or ago > RECENTLY)


async def wireguard_view(spec: Spec, controller: Host) -> WireGuardView | None:
    """What `wg` says on the controller; None on other networks."""
    if spec.network.kind != "wireguard":
        return None
    try:
        result = await controller.run(LOOK, timeout=PATIENCE)
    except TimedOut:
        return WireGuardView(problem="wg does not answer")
    if result.status != 0:
        said = result.error_text.strip().splitlines()
        return WireGuardView(problem=said[-1] if said else "wg does not answer")
    return parse_view(result.text)


def parse_view(text: str) -> WireGuardView:
    now, peers, handshakes = text.split(f"{MARK}\n", 2)
    pairs = [line.split() for line in handshakes.splitlines()]
    last = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    known = peers_in(peers)
    return WireGuardView(
        {
            name: max(0, int(now) - last[peer.public_key]) if last.get(peer.public_key) else None
            for name, peer in known.items()
        }
    )
