"""The files that the network package renders."""

import subprocess

import pytest
from tests.goldens import assert_golden
from tests.support.cases import cases

from shoal.network.addresses import hosts_block
from shoal.network.firewall import firewall_rules, open_commands
from shoal.network.wireguard import hub_rules

ADDRESSES = {"desktop": "10.0.0.1", "gpu01": "10.0.0.20", "gpu02": "10.0.0.3"}
PORTS = ("6817", "6818", "60001-63000")


def test_hosts_block_matches_its_golden() -> None:
    assert_golden("network/hosts", hosts_block({**ADDRESSES, "unreached": ""}))


def test_firewall_rules_with_ipv4_and_ipv6_match_their_golden() -> None:
    assert_golden("network/firewall.nft", firewall_rules([*ADDRESSES.values(), "2001:db8::1"], PORTS))


@cases(
    "rules",
    firewall_rules([*ADDRESSES.values(), "2001:db8::1"], PORTS),
    firewall_rules(["10.77.0.1", "10.77.0.2"], PORTS, "shoal0"),
    hub_rules(),
    ids=["addresses", "an interface", "the hub"],
)
def test_nft_accepts_the_rules(rules: str) -> None:
    try:
        subprocess.run(["nft", "--check", "--file", "-"], input=rules, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("nft is not installed: apt-get install nftables")


BOTH = ["10.0.0.20", "10.0.0.3", "2001:db8::1"]
ACCEPT = "tcp dport { 6817, 6818, 60001-63000 } accept'"


@cases(
    "firewall, commands",
    ("ufw", [f"ufw allow proto tcp from {a} to any port 6817,6818,60001:63000" for a in sorted(BOTH, key=len)]),
    (
        "firewalld",
        [
            *(f"firewall-cmd --permanent --zone=trusted --add-source={a}" for a in sorted(BOTH, key=len)),
            "firewall-cmd --reload",
        ],
    ),
    (
        "nft inet filter input",
        [
            f"nft 'insert rule inet filter input ip saddr {{ 10.0.0.3, 10.0.0.20 }} {ACCEPT}",
            f"nft 'insert rule inet filter input ip6 saddr {{ 2001:db8::1 }} {ACCEPT}",
        ],
    ),
    ("nft ip filter INPUT", [f"nft 'insert rule ip filter INPUT ip saddr {{ 10.0.0.3, 10.0.0.20 }} {ACCEPT}"]),
)
def test_foreign_firewall_has_its_own_commands(firewall: str, commands: list[str]) -> None:
    assert open_commands(firewall, BOTH, PORTS) == " && ".join(commands)


@cases(
    "firewall, command",
    ("ufw", "ufw allow 51820/udp"),
    ("firewalld", "firewall-cmd --permanent --add-port=51820/udp && firewall-cmd --reload"),
    ("nft inet filter input", "nft 'insert rule inet filter input udp dport 51820 accept'"),
)
def test_foreign_firewall_also_opens_wireguard(firewall: str, command: str) -> None:
    assert open_commands(firewall, ["10.77.0.1"], PORTS, 51820).endswith(command)
    assert "51820" not in open_commands(firewall, ["10.77.0.1"], PORTS)
