"""The firewall: Slurm's ports are open to members only. Other ports are not touched."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from shoal.agent.document import HEADER, render_unit

NFT = "/usr/sbin/nft"
RULES = "/etc/shoal/firewall.nft"
UNIT = "/etc/systemd/system/shoal-firewall.service"


def firewall_rules(members: Iterable[str], ports: Iterable[str], interface: str = "") -> str:
    """An nftables file that replaces our table and nothing else, in one transaction.

    With `interface`, members are accepted only there: elsewhere their addresses can be forged.
    """
    sets = accepts = ""
    guarded = ", ".join(ports)
    way = f'iifname "{interface}" ' if interface else ""
    for family, addresses in _by_family(members).items():
        version = "6" if family == "ip6" else "4"
        elements = ", ".join(addresses)
        sets += f"\tset members{version} {{\n\t\ttype ipv{version}_addr\n\t\telements = {{ {elements} }}\n\t}}\n"
        accepts += f"\t\t{way}{family} saddr @members{version} tcp dport {{ {guarded} }} accept\n"
    return (
        f"{HEADER}"
        "table inet shoal\n"
        "delete table inet shoal\n"
        "table inet shoal {\n"
        f"{sets}"
        "\tchain input {\n"
        "\t\ttype filter hook input priority filter - 5; policy accept;\n"
        '\t\tiif "lo" accept\n'
        f"{accepts}"
        f"\t\ttcp dport {{ {guarded} }} drop\n"
        "\t}\n"
        "}\n"
    )


def firewall_unit(nft: str = NFT) -> str:
    """A systemd unit that loads the rules at boot, before the network is up."""
    return render_unit(
        Unit={
            "Description": "Slurm's ports are open to cluster members only",
            "DefaultDependencies": "no",
            "Before": "network-pre.target",
            "Wants": "network-pre.target",
            "RequiresMountsFor": None if nft.startswith("/usr/") else nft,
        },
        Service={
            "Type": "oneshot",
            "RemainAfterExit": "yes",
            "ExecStart": f"{nft} -f {RULES}",
            "ExecStop": f"{nft} delete table inet shoal",
        },
        Install={"WantedBy": "sysinit.target"},
    )


def open_commands(firewall: str, members: Iterable[str], ports: Iterable[str], udp: int | None = None) -> str:
    """Shell commands that open Slurm's ports to the members in a firewall that is not ours.

    A packet must pass every chain: what ours accepts, another one may still drop. `udp` is a port to open to all:
    WireGuard's, which answers known peers only.
    """
    families = _by_family(members)
    addresses = [address for of_family in families.values() for address in of_family]
    if firewall == "ufw":
        port_list = ",".join(ports).replace("-", ":")
        commands = [f"ufw allow proto tcp from {address} to any port {port_list}" for address in addresses]
        commands += [f"ufw allow {udp}/udp"] if udp else []
    elif firewall == "firewalld":
        commands = [f"firewall-cmd --permanent --zone=trusted --add-source={address}" for address in addresses]
        commands += [f"firewall-cmd --permanent --add-port={udp}/udp"] if udp else []
        commands.append("firewall-cmd --reload")
    else:
        chain, guarded = firewall.partition(" ")[2], ", ".join(ports)
        commands = [
            f"nft 'insert rule {chain} {family} saddr {{ {', '.join(of_family)} }} tcp dport {{ {guarded} }} accept'"
            for family, of_family in families.items()
            if chain.partition(" ")[0] in ("inet", family)
        ]
        commands += [f"nft 'insert rule {chain} udp dport {udp} accept'"] if udp else []
    return " && ".join(commands)


def _by_family(members: Iterable[str]) -> dict[str, list[str]]:
    """The addresses, each once and in order, by nftables' name of their family."""
    v4 = sorted((address for address in set(members) if ":" not in address), key=ipaddress.IPv4Address)
    v6 = sorted(address for address in set(members) if ":" in address)
    return {family: addresses for family, addresses in (("ip", v4), ("ip6", v6)) if addresses}
