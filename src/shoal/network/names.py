"""Names: every member resolves every other without DNS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def hosts_block(addresses: Mapping[str, str]) -> str:
    """The lines of `/etc/hosts` that name the members."""
    width = max((len(address) for address in addresses.values()), default=0)
    return "".join(f"{address:<{width}}  {name}\n" for name, address in addresses.items() if address)


def own_names(hosts: str, block: str, names: Iterable[str], address: str) -> tuple[str, ...]:
    """The lines of `/etc/hosts` that give the host's own names another address than its one on our network.

    Debian puts the host's name beside 127.0.1.1, and programs that ask for their own name would listen there.
    """
    wanted, inside, found = {name.lower() for name in names}, False, []
    for line in hosts.splitlines():
        inside = line == f"# BEGIN shoal {block}" or (inside and line != f"# END shoal {block}")
        words = line.partition("#")[0].lower().split()
        if not inside and words and words[0] != address and wanted.intersection(words[1:]):
            found.append(line)
    return tuple(found)


def addresses_in(hosts: str, block: str) -> dict[str, str]:
    """The addresses that an earlier run wrote into the named block of `/etc/hosts`, by name."""
    inside = hosts.partition(f"# BEGIN shoal {block}\n")[2].partition(f"# END shoal {block}\n")[0]
    pairs = [line.split() for line in inside.splitlines()]
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2}
