"""Which address other hosts use, on hosts with several interfaces."""

from shoal.agent.facts import Address, Facts
from shoal.network.addresses import lan_addresses


def facts(*addresses: tuple[str, str, int]) -> Facts:
    return Facts(addresses=tuple(Address(*address) for address in addresses))


def test_most_shared_subnet_is_chosen() -> None:
    hosts = {
        "a": facts(("eth0", "192.168.7.2", 24), ("eth1", "10.0.0.1", 24)),
        "b": facts(("eth0", "10.0.0.2", 24), ("wlan0", "192.168.9.3", 24)),
        "c": facts(("eno1", "10.0.0.3", 24)),
    }
    assert lan_addresses(hosts, {}) == {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


def test_bridges_that_every_host_has_do_not_count_as_shared() -> None:
    hosts = {
        "a": facts(("docker0", "172.17.0.1", 16), ("eth0", "10.0.0.1", 24)),
        "b": facts(("docker0", "172.17.0.1", 16), ("eth0", "10.0.0.2", 24)),
    }
    assert lan_addresses(hosts, {}) == {"a": "10.0.0.1", "b": "10.0.0.2"}


def test_connection_address_breaks_ties() -> None:
    hosts = {
        "a": facts(("eth0", "10.0.0.1", 24), ("eth1", "10.1.0.1", 24)),
        "b": facts(("eth0", "10.0.0.2", 24), ("eth1", "10.1.0.2", 24)),
    }
    assert lan_addresses(hosts, {"a": "10.1.0.1", "b": "10.1.0.2"}) == {"a": "10.1.0.1", "b": "10.1.0.2"}


def test_link_local_and_loopback_are_never_chosen() -> None:
    hosts = {"a": facts(("lo", "127.0.0.1", 8), ("eth0", "169.254.3.4", 16), ("eth0", "fe80::1", 64))}
    assert lan_addresses(hosts, {"a": "10.0.0.9"}) == {"a": "10.0.0.9"}


def test_ipv4_is_preferred_over_ipv6() -> None:
    hosts = {
        "a": facts(("eth0", "2001:db8::1", 64), ("eth0", "10.0.0.1", 24)),
        "b": facts(("eth0", "2001:db8::2", 64), ("eth0", "10.0.0.2", 24)),
    }
    assert lan_addresses(hosts, {}) == {"a": "10.0.0.1", "b": "10.0.0.2"}


def test_shoal_network_is_not_chosen() -> None:
    hosts = {
        "a": facts(("shoal0", "10.77.0.1", 16), ("eth0", "10.0.0.1", 24)),
        "b": facts(("shoal0", "10.77.0.2", 16), ("eth0", "10.1.0.2", 24)),
    }
    assert lan_addresses(hosts, {}) == {"a": "10.0.0.1", "b": "10.1.0.2"}
