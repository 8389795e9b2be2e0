"""Tailscale: what the host's own client says, cut down to what is used, in Tailscale's own words."""

from __future__ import annotations

from shoal.agent.program.fast_stdlib import loads
from shoal.agent.program.running import last_lines, run, which
from shoal.agent.program.wire import Item

OF_HOST = ("Version", "TUN", "BackendState", "TailscaleIPs")
OF_NODE = (
    *("HostName", "TailscaleIPs", "CurAddr", "Relay", "PeerRelay"),
    *("Online", "Active", "Expired", "KeyExpiry"),
)


def tailscale_status() -> Item:
    """Part of `tailscale status --json`. Empty on a host without Tailscale; a `problem` where it does not answer."""
    program = which("tailscale")
    if not program:
        return {}
    _, text = run([program, "status", "--json"], timeout=10.0)
    try:
        # The client may warn of something before.
        found = loads(text[text.index("{") :])
        return {
            **{name: found[name] for name in OF_HOST if name in found},
            "Self": _node(found.get("Self") or {}),
            "Peer": [_node(peer) for peer in (found.get("Peer") or {}).values()],
        }
    except (ValueError, AttributeError, TypeError):
        return {"problem": last_lines(text, 1) or "it says nothing"}


def _node(found: Item) -> Item:
    return {name: found[name] for name in OF_NODE if name in found}
