"""External addresses that a simulated cloud reserves: as in a real one, the machine itself does not have its address.

This computer translates them to the sandbox hosts behind, for itself and for the hosts on the cluster's network.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.sandbox.layout import Layout, Site
from shoal.sandbox.programs import call

BLOCK = "198.18"
"""For benchmarks only (RFC 2544): nothing answers there."""


def address_prefix(layout: Layout) -> str:
    """The first three numbers of the addresses of one cluster."""
    return f"{BLOCK}.{int(layout.id, 16) % 256}"


async def translate(layout: Layout, site: Site, chain: str, routes: Mapping[str, str]) -> None:
    """Translate these external addresses to those of hosts, and no others. They go with the cluster's network."""
    if routes:  # a packet needs a route before it is translated
        await call("ip", "route", "replace", f"{address_prefix(layout)}.0/24", "dev", layout.bridge(site))
    await call("nft", "-f", "-", stdin=translation_rules(layout, site, chain, routes))


def translation_rules(layout: Layout, site: Site, chain: str, routes: Mapping[str, str]) -> str:
    """nftables rules, as text that replaces those of the same chains. `routes`: external address -> the host's."""
    to = ", ".join(f"{address} : {host}" for address, host in sorted(routes.items()))
    bridge, table = layout.bridge(site), f"ip {layout.table}"
    hooks = {"in": "prerouting priority dstnat", "out": "output priority -100", "back": "postrouting priority srcnat"}
    chains = "".join(
        f"    chain {chain}_{name} {{\n        type nat hook {hook}; policy accept;\n    }}\n"
        for name, hook in hooks.items()
    )
    flushes = "".join(f"flush chain {table} {chain}_{name}\n" for name in hooks)
    rules = {
        "in": f'iifname "{bridge}" dnat to ip daddr map {{ {to} }}',
        "out": f"dnat to ip daddr map {{ {to} }}",
        # the answer of a host on the same bridge must come back through this computer
        "back": f'ip saddr {site.subnet} oifname "{bridge}" ct status dnat masquerade',
    }
    added = "".join(f"add rule {table} {chain}_{name} {rule}\n" for name, rule in rules.items()) if to else ""
    return f"table {table} {{\n{chains}}}\n{flushes}{added}"
