"""Which address other hosts use, on hosts with several interfaces."""

from tests.support.cases import cases

from shoal.agent.facts import Address, Facts
from shoal.network.addresses import lan_addresses


def facts(*addresses: tuple[str, str, int]) -> Facts:
    return Facts(addresses=tuple(Address(*address) for address in addresses))


def two(a: tuple[str, str, int], b: tuple[str, str, int]) -> dict[str, Facts]:
    """Two hosts in one subnet, each with another address."""
    return {"a": facts(a, ("eth0", "10.0.0.1", 24)), "b": facts(b, ("eth0", "10.0.0.2", 24))}


BOTH = {"a": "10.0.0.1", "b": "10.0.0.2"}


@cases(
    "hosts, connected, chosen",
    (
        {
            "a": facts(("eth0", "192.168.7.2", 24), ("eth1", "10.0.0.1", 24)),
            "b": facts(("eth0", "10.0.0.2", 24), ("wlan0", "192.168.9.3", 24)),
            "c": facts(("eno1", "10.0.0.3", 24)),
        },
        *({}, {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}),
    ),
    (two(("docker0", "172.17.0.1", 16), ("docker0", "172.17.0.1", 16)), {}, BOTH),
    (two(("eth1", "10.1.0.1", 24), ("eth1", "10.1.0.2", 24)), {"a": "10.1.0.1", "b": "10.1.0.2"}, None),
    (
        {"a": facts(("lo", "127.0.0.1", 8), ("eth0", "169.254.3.4", 16), ("eth0", "fe80::1", 64))},
        {"a": "10.0.0.9"},
        None,
    ),
    (two(("eth0", "2001:db8::1", 64), ("eth0", "2001:db8::2", 64)), {}, BOTH),
    (
        {
            "a": facts(("shoal0", "10.77.0.1", 16), ("eth0", "10.0.0.1", 24)),
            "b": facts(("shoal0", "10.77.0.2", 16), ("eth0", "10.1.0.2", 24)),
        },
        *({}, {"a": "10.0.0.1", "b": "10.1.0.2"}),
    ),
    ids=[
        *("the most shared subnet", "bridges that every host has do not count", "the connection's address breaks ties"),
        *("neither link-local nor loopback", "IPv4 rather than IPv6", "not the network of Shoal"),
    ],
)
def test_address_that_others_use_is_chosen(
    hosts: dict[str, Facts], connected: dict[str, str], chosen: dict[str, str] | None
) -> None:
    assert lan_addresses(hosts, connected) == (connected if chosen is None else chosen)
