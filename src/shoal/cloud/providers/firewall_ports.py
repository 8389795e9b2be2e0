"""From where a provider's firewall admits the ports of a cluster. Pure."""

from __future__ import annotations

import ipaddress
import re

SSH = "tcp:22"
ANYWHERE = ("0.0.0.0/0",)
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
"""What a network such as a VPC has inside, and what a VPN or a peering leads to."""


def is_public(port: str) -> bool:
    """Whether others than a private network need a port such as `tcp:22` or `udp:51820`: SSH and WireGuard.

    All other ports are Slurm's, with `network: lan`: then the cluster is in one private network.
    """
    return port == SSH or port.startswith("udp:")


def split_port(port: str) -> tuple[str, int, int]:
    """Protocol, first and last port: `tcp:60001-63000` is a range."""
    protocol, _, numbers = port.partition(":")
    first, _, last = numbers.partition("-")
    return protocol, int(first), int(last or first)


def address_ranges(setting: str | None) -> tuple[str, ...]:
    """The ranges in a setting such as `203.0.113.7, 198.51.100.0/24`; anywhere without one."""
    return tuple(address_range(one) for one in re.split(r"[ ,]+", setting or "") if one) or ANYWHERE


def address_range(text: str) -> str:
    """A range as providers show it: `203.0.113.7` is `203.0.113.7/32`. Other text stays, for the provider to reject."""
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        return text
