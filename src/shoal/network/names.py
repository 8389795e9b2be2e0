"""Names: every member resolves every other without DNS."""

from __future__ import annotations

from collections.abc import Mapping


def hosts_block(addresses: Mapping[str, str]) -> str:
    """The lines of `/etc/hosts` that name the members."""
    width = max((len(address) for address in addresses.values()), default=0)
    return "".join(f"{address:<{width}}  {name}\n" for name, address in addresses.items() if address)


def addresses_in(hosts: str, block: str) -> dict[str, str]:
    """The addresses that an earlier run wrote into the named block of `/etc/hosts`, by name."""
    inside = hosts.partition(f"# BEGIN shoal {block}\n")[2].partition(f"# END shoal {block}\n")[0]
    pairs = [line.split() for line in inside.splitlines()]
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2}
