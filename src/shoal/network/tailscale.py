"""Tailscale: the output of `tailscale status --json`, and the flags with which a host joins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from shoal.agent.facts import Facts
from shoal.spec.network import Network

STATUS_COMMAND = ("tailscale", "status", "--json")
INTERFACE = "tailscale0"
RUNNING = "Running"
PING = "tailscale ping --c 5 --timeout 2s"
LINK_PING = "tailscale ping --tsmp --c 1 --timeout 5s"
PATH_TIMEOUT_S = 20.0
EXPIRES_SOON_S = 14 * 24 * 3600.0
"""A key that expires within this time is reported."""

Way = Literal["direct", "relayed", "idle", "offline", "unknown"]


@dataclass(frozen=True)
class TailnetNode:
    """A node of the tailnet as another one sees it."""

    name: str = ""
    addresses: tuple[str, ...] = ()
    online: bool = False
    active: bool = False
    """Packets went there within the last minutes; else the path is unknown."""
    endpoint: str = ""
    """The address of a direct path; empty without one."""
    relay: str = ""
    """The region of the relay that is used, or would be."""
    expires: float | None = None
    """When its key expires, in seconds since the epoch; None for never."""
    expired: bool = False
    tags: tuple[str, ...] = ()

    @property
    def way(self) -> Way:
        """How packets get there."""
        if not self.online:
            return "offline"
        if self.endpoint:
            return "direct"
        return "relayed" if self.active else "idle"


@dataclass(frozen=True)
class Tailnet:
    """The tailnet as one host sees it."""

    state: str = ""
    """Tailscale's BackendState: Running, NeedsLogin, NeedsMachineAuth, Stopped, Starting, NoState; empty without it."""
    problem: str = ""
    """Why the daemon did not answer."""
    tun: bool = True
    """Packets use a network interface; else the daemon uses userspace networking."""
    own: TailnetNode = TailnetNode()
    peers: tuple[TailnetNode, ...] = ()

    @property
    def running(self) -> bool:
        return self.state == RUNNING and not self.own.expired and bool(self.own.addresses)

    @property
    def address(self) -> str:
        """The host's address, IPv4 where it has both."""
        return next(iter(sorted(self.own.addresses, key=lambda address: ":" in address)), "")

    def at(self, address: str) -> TailnetNode | None:
        """The node that has this address."""
        return next((node for node in (self.own, *self.peers) if address in node.addresses), None)


def read_status(status: Mapping[str, Any]) -> Tailnet:
    """Parse `tailscale status --json`, or the part that an agent sends. Tolerates unknown and missing keys."""
    if status.get("problem") or not status:
        return Tailnet(problem=str(status.get("problem", "")))
    peers = status.get("Peer") or []
    listed = peers.values() if isinstance(peers, Mapping) else peers
    own_node = status.get("Self") or {}
    addresses = status.get("TailscaleIPs") or own_node.get("TailscaleIPs") or ()
    return Tailnet(
        state=str(status.get("BackendState", "")),
        tun=bool(status.get("TUN", True)),
        own=_node({**own_node, "TailscaleIPs": addresses}),
        peers=tuple(_node(peer) for peer in listed),
    )


def unsettled_paths(tailnet: Tailnet, addresses: Iterable[str]) -> list[str]:
    """The addresses of nodes that look relayed. Tailscale shows a node so for some seconds after a first packet."""
    nodes = ((address, tailnet.at(address)) for address in addresses)
    return [address for address, node in nodes if node is not None and node.way == "relayed"]


def path_command(addresses: Iterable[str]) -> tuple[str, ...]:
    """Sends packets to nodes until their paths are direct, or known to be relayed."""
    return ("sh", "-c", f"printf '%s\\n' \"$@\" | xargs -P 32 -n 1 {PING}; true", "ping", *addresses)


def unreachable_command(addresses: Iterable[str]) -> tuple[str, ...]:
    """Prints the addresses of the nodes to which no packet passes through the encrypted link."""
    test = f"xargs -P 32 -I '{{}}' sh -c '{LINK_PING} {{}} > /dev/null 2>&1 || echo {{}}'"
    return ("sh", "-c", f"printf '%s\\n' \"$@\" | {test}", "ping", *addresses)


def tailscale_addresses(facts: Mapping[str, Facts]) -> dict[str, str]:
    """The addresses of the hosts that are in the tailnet."""
    tailnets = {name: read_status(fact.tailscale) for name, fact in facts.items()}
    return {name: tailnet.address for name, tailnet in tailnets.items() if tailnet.running}


def tailnet_name(cluster: str, member: str) -> str:
    """The name of a host in the tailnet, unique among clusters: a DNS label."""
    return f"{cluster}-{member}".lower().replace(".", "-").replace("_", "-")[:63].rstrip("-")


def up_flags(network: Network, hostname: str) -> tuple[str, ...]:
    """The flags of `tailscale up` without the key. It rejects a later call that omits one of them."""
    # On Headscale a node gets the tags of its auth key, and may request none.
    tags = network.tags if not (network.login_server and network.auth_key) else ()
    return (
        f"--hostname={hostname}",
        "--accept-dns=false",
        *([f"--advertise-tags={','.join(tags)}"] if tags else ()),
        *([f"--login-server={network.login_server}"] if network.login_server else ()),
    )


def _node(status: Mapping[str, Any]) -> TailnetNode:
    return TailnetNode(
        name=str(status.get("HostName", "")),
        addresses=tuple(status.get("TailscaleIPs") or ()),
        online=bool(status.get("Online")),
        active=bool(status.get("Active")),
        endpoint=str(status.get("CurAddr") or ""),
        relay=str(status.get("PeerRelay") or status.get("Relay") or ""),
        expires=_seconds(status.get("KeyExpiry")),
        expired=bool(status.get("Expired")),
        tags=tuple(status.get("Tags") or ()),
    )


def _seconds(text: object) -> float | None:
    """A time in Go's format, where the year 1 means never."""
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time.replace(tzinfo=time.tzinfo or UTC).timestamp() if time.year > 1 else None
