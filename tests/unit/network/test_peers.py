"""Which members reach each other over WireGuard: directly, by an incoming connection, or through the hub."""

from dataclasses import replace

from tests.support.cases import cases

from shoal.agent.facts import Address, Facts
from shoal.network.wireguard import (
    MemberFacts,
    Peer,
    addresses_to_try,
    assign_addresses,
    member_config,
    with_port,
    worth_trying,
)

PORT = 51820


def end(name: str, number: int, site: str, reaches: dict[str, str] | None, **more: object) -> MemberFacts:
    return replace(MemberFacts(name, f"10.77.0.{number}", f"key-of-{name}", site, reaches), **more)  # type: ignore[arg-type]


# c and n are on one site that others reach; f and m are behind NAT, each on its own.
ENDS = {
    "c": end("c", 1, "a", {"n": "10.0.0.2"}),
    "n": end("n", 2, "a", {"c": "10.0.0.1"}),
    "f": end("f", 3, "b", {"c": "10.0.0.1", "n": "10.0.0.2"}),
    "m": end("m", 4, "c", {"c": "10.0.0.1", "n": "10.0.0.2"}),
}


def peers(name: str, ends: dict[str, MemberFacts] = ENDS, known: dict[str, Peer] | None = None) -> dict[str, Peer]:
    return {peer.name: peer for peer in member_config(name, ends, "c", PORT, known or {}).peers}


def test_reachable_hosts_have_direct_endpoints() -> None:
    assert peers("c")["n"] == Peer("n", "key-of-n", ("10.77.0.2",), "10.0.0.2:51820")
    assert peers("n")["c"] == Peer("c", "key-of-c", ("10.77.0.1",), "10.0.0.1:51820")


def test_host_behind_nat_initiates_with_keepalive() -> None:
    assert peers("f")["n"] == Peer("n", "key-of-n", ("10.77.0.2",), "10.0.0.2:51820", keepalive=True)
    assert peers("n")["f"] == Peer("f", "key-of-f", ("10.77.0.3",))


def test_unreachable_pair_uses_the_hub() -> None:
    assert peers("f")["c"].allowed == ("10.77.0.1", "10.77.0.4")
    assert peers("m")["c"].allowed == ("10.77.0.1", "10.77.0.3") and "m" not in peers("f")
    assert member_config("c", ENDS, "c", PORT, {}).relays and not member_config("n", ENDS, "c", PORT, {}).relays


def test_each_address_is_allowed_for_exactly_a_single_peer() -> None:
    for name in ENDS:
        allowed = [address for peer in peers(name).values() for address in peer.allowed]
        assert sorted(allowed) == sorted(other.address for other in ENDS.values() if other.name != name)


def test_another_hub_relays_the_traffic() -> None:
    found = {peer.name: peer.allowed for peer in member_config("f", ENDS, "n", PORT, {}).peers}
    assert found == {"c": ("10.77.0.1",), "n": ("10.77.0.2", "10.77.0.4")}


def test_configured_endpoint_applies_only_between_sites() -> None:
    ends = {**ENDS, "m": replace(ENDS["m"], endpoint="lab.example.org:9")}
    assert peers("f", ends)["m"] == Peer("m", "key-of-m", ("10.77.0.4",), "lab.example.org:9", keepalive=True)
    assert peers("m", ends)["f"] == Peer("f", "key-of-f", ("10.77.0.3",))
    beside = {**ends, "f": end("f", 3, "c", {"m": "192.168.1.4"})}
    assert peers("f", beside)["m"].endpoint == "192.168.1.4:51820"


def test_silent_host_keeps_its_link() -> None:
    silent = {**ENDS, "n": replace(ENDS["n"], reaches=None), "m": replace(ENDS["m"], reaches=None)}
    known = {"n": Peer("n", "key-of-n", ("10.77.0.2",), "10.0.0.99:51820", keepalive=True)}
    assert peers("f", silent, known)["n"] == known["n"]
    assert peers("f", silent, known)["c"].allowed == ("10.77.0.1", "10.77.0.4")


def test_host_without_a_key_is_not_a_peer() -> None:
    assert "n" not in peers("c", {**ENDS, "n": replace(ENDS["n"], public_key="")})


def test_mtu_fits_the_path() -> None:
    ends = {
        "c": end("c", 1, "a", {"n": "10.0.0.2"}, mtu=9000),
        "n": end("n", 2, "a", {"c": "10.0.0.1"}, mtu=9000),
        "f": end("f", 3, "b", {"c": "1.1.1.1", "n": "1.1.1.2"}, mtu=1460),
        "g": end("g", 4, "d", {"c": "1.1.1.1", "n": "1.1.1.2"}, mtu=9000),
    }
    inside = member_config("c", ends, "c", PORT, {})
    assert (inside.mtu, inside.slower) == (8920, (("10.77.0.3", 1380), ("10.77.0.4", 1420)))
    assert (member_config("f", ends, "c", PORT, {}).mtu, member_config("f", ends, "c", PORT, {}).slower) == (1380, ())
    assert member_config("n", ENDS, "c", PORT, {}).mtu == 1420


@cases(
    "text, wanted",
    ("10.0.0.1", "10.0.0.1:51820"),
    ("lab.example.org:99", "lab.example.org:99"),
    ("2001:db8::1", "[2001:db8::1]:51820"),
    ("[2001:db8::1]:99", "[2001:db8::1]:99"),
)
def test_endpoint_gets_a_default_port(text: str, wanted: str) -> None:
    assert with_port(text, PORT) == wanted


def test_existing_addresses_stay_and_new_members_get_the_first_free() -> None:
    first = assign_addresses("10.77.0.0/16", ["c", "n1", "n2"], {})
    assert first == {"c": "10.77.0.1", "n1": "10.77.0.2", "n2": "10.77.0.3"}
    assert assign_addresses("10.77.0.0/16", ["c", "n2", "n3"], first) == {
        "c": "10.77.0.1",
        "n2": "10.77.0.3",
        "n3": "10.77.0.2",
    }
    assert assign_addresses("10.78.0.0/24", ["c"], first) == {"c": "10.78.0.1"}
    assert assign_addresses("10.77.0.0/16", ["c"], {"c": "2001:db8::1"}) == {"c": "10.77.0.1"}


def facts(*addresses: str) -> Facts:
    return Facts(addresses=tuple(Address(f"eth{i}", address, 24) for i, address in enumerate(addresses)))


def test_own_and_unique_public_addresses_are_tried() -> None:
    hosts = {"c": facts("10.0.0.1"), "n": facts("172.16.0.5", "10.0.0.2"), "f": facts("192.168.1.4")}
    sites = {"c": "a", "n": "a", "f": "b"}
    tries = addresses_to_try(hosts, sites, {"c": "10.0.0.1", "f": "8.8.8.8"})
    assert tries == {"c": ["10.0.0.1"], "n": ["10.0.0.2", "172.16.0.5"], "f": ["192.168.1.4", "8.8.8.8"]}
    assert addresses_to_try(hosts, sites, {"c": "8.8.8.8", "f": "8.8.8.8"})["f"] == ["192.168.1.4"]
    assert addresses_to_try(hosts, sites, {"f": "100.64.0.1"})["f"] == ["192.168.1.4"]


def test_private_address_of_another_site_in_the_local_subnet_is_not_tried() -> None:
    here = facts("192.168.1.5")
    assert not worth_trying(here, "a", "b", "192.168.1.4") and worth_trying(here, "a", "a", "192.168.1.4")
    assert worth_trying(here, "a", "b", "10.0.0.4") and worth_trying(here, "a", "b", "8.8.8.8")
