"""Names: every member resolves every other without DNS."""

from __future__ import annotations

from collections.abc import Mapping


def hosts_block(addresses: Mapping[str, str]) -> str:
    """The lines of `/etc/hosts` that name the members."""
    width = max((len(address) for address in addresses.values()), default=0)
    return "".join(f"{address:<{width}}  {name}\n" for name, address in addresses.items() if address)
