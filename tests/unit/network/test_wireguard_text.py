"""The files of the WireGuard network, as whole texts."""

import subprocess

from tests.goldens import assert_golden
from tests.support.cases import cases

from shoal.network.addresses import own_names
from shoal.network.firewall import firewall_rules
from shoal.network.wireguard import (
    MAKE_KEYS,
    MemberConfig,
    Peer,
    apply_script,
    knock_script,
    peers_conf,
    peers_in,
    unit,
)

PEERS = (
    Peer("controller", "a" * 43 + "=", ("10.77.0.1", "10.77.0.4"), "10.0.0.1:51820", keepalive=True),
    Peer("near1", "b" * 43 + "=", ("10.77.0.2",), "[2001:db8::2]:51820"),
    Peer("far1", "c" * 43 + "=", ("10.77.0.3",)),
)
SUBNET = "10.77.0.0/16"
HOSTS = """127.0.0.1 localhost fish1
127.0.1.1\tfish1.reef fish1
10.0.0.5 fish1 # by hand
10.0.0.6 fish12
#10.0.0.7 fish1
# BEGIN shoal members
10.77.0.2  fish1
# END shoal members
10.77.0.2 FISH1
"""


def test_peers_match_their_golden() -> None:
    assert_golden("network/wireguard-peers.conf", peers_conf(PEERS, 51820))


def test_peers_round_trip() -> None:
    assert peers_in(peers_conf(PEERS, 51820)) == {peer.name: peer for peer in PEERS}
    assert peers_in(peers_conf((), 51820)) == peers_in("") == {}


def test_apply_scripts_of_hub_and_member_match_their_goldens() -> None:
    hub = apply_script(MemberConfig("10.77.0.1", PEERS, 8920, (("10.77.0.3", 1380),), relays=True), SUBNET)
    assert_golden("network/wireguard-apply-on-hub", hub)
    assert_golden("network/wireguard-apply", apply_script(MemberConfig("10.77.0.5", PEERS, 1420), SUBNET))


def test_unit_with_wireguard_in_the_kernel_matches_its_golden() -> None:
    assert_golden("network/shoal-wireguard-kernel.service", unit(SUBNET, kernel=True))


def test_knock_script_pings_only_peers_that_cannot_initiate() -> None:
    assert knock_script(PEERS[1:]).splitlines()[2:] == ["exec sleep infinity"]
    subprocess.run(["bash", "-n"], input=knock_script(PEERS), text=True, check=True)


@cases("text", apply_script(MemberConfig("10.77.0.1", PEERS, 1420, relays=True), SUBNET), MAKE_KEYS)
def test_scripts_are_valid_shell(text: str) -> None:
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)


def test_keys_are_not_program_arguments() -> None:
    script = apply_script(MemberConfig("10.77.0.1", PEERS, 1420), SUBNET)
    assert "wg syncconf shoal0 /dev/stdin" in script and "$(" not in script + MAKE_KEYS and "umask 077" in MAKE_KEYS


def test_firewall_uses_the_interface() -> None:
    rules = firewall_rules(["10.77.0.1", "10.77.0.2"], ("6817", "6818"), "shoal0")
    assert '\t\tiifname "shoal0" ip saddr @members4 tcp dport { 6817, 6818 } accept\n' in rules


def test_foreign_hosts_entries_of_a_member_are_detected() -> None:
    lines = own_names(HOSTS, "members", ("fish1", "fish1.reef"), "10.77.0.2")
    assert lines == ("127.0.0.1 localhost fish1", "127.0.1.1\tfish1.reef fish1", "10.0.0.5 fish1 # by hand")
    assert own_names("127.0.0.1 localhost\n", "members", ("fish1",), "10.77.0.2") == ()
