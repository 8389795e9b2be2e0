"""Subnets, addresses and firewall text of the sandbox."""

import ipaddress
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.goldens import assert_golden
from tests.support.cases import cases

from shoal.errors import ProviderError
from shoal.sandbox.layout import HostRecord, Layout, Site
from shoal.sandbox.network import POOL, choose_subnet, free_address, gateway, hardware_address, render_table
from shoal.spec.member import WIREGUARD_SUBNET, Shape

LAYOUT = Layout(Path("/var/cache/shoal"), "reef-2")
SITES = [Site("a", 0, "10.70.1.0/24"), Site("b", 1, "10.70.2.0/24")]
blocks = st.integers(0, (1 << 14) - 1).map(lambda n: ipaddress.IPv4Network((int(POOL.network_address) + (n << 8), 24)))


@given(st.text(max_size=20), st.lists(blocks, max_size=50))
def test_chosen_subnet_overlaps_no_taken_subnet(seed: str, taken: list[ipaddress.IPv4Network]) -> None:
    subnet = choose_subnet(seed, taken)
    assert subnet.subnet_of(POOL) and subnet.prefixlen == 24 and not any(subnet.overlaps(other) for other in taken)


def test_wireguard_subnet_is_never_chosen() -> None:
    private = ipaddress.IPv4Network(WIREGUARD_SUBNET)
    others = [one for one in POOL.subnets(new_prefix=16) if one != private]
    assert private.subnet_of(POOL)
    with pytest.raises(ProviderError, match="no free subnet is left"):
        choose_subnet("reef", others)


def test_cluster_gets_the_same_subnet_again() -> None:
    assert choose_subnet("reef/a", []) == choose_subnet("reef/a", [])
    assert choose_subnet("reef/a", []) != choose_subnet("reef/b", [])


def test_pool_covered_by_a_network_has_no_free_subnet() -> None:
    with pytest.raises(ProviderError, match=r"no free subnet is left in 10\.64\.0\.0/10\n  fix: take other sandbox"):
        choose_subnet("reef", [ipaddress.IPv4Network("10.0.0.0/8")])


def test_hosts_get_the_first_free_address_after_the_gateway() -> None:
    assert gateway(SITES[0]) == "10.70.1.1" and free_address(SITES[0], []) == "10.70.1.2"
    assert free_address(SITES[0], ["10.70.1.2", "10.70.1.4"]) == "10.70.1.3"


def test_full_site_is_an_error() -> None:
    taken = [f"10.70.1.{n}" for n in range(2, 255)]
    with pytest.raises(ProviderError, match="site a is full"):
        free_address(SITES[0], taken)


@cases("count", 1, 2)
def test_firewall_matches_its_golden(count: int) -> None:
    assert_golden(f"sandbox/{count}-sites.nft", render_table(LAYOUT, reversed(SITES[:count])))


@pytest.mark.skipif(not shutil.which("nft"), reason="nft is not installed")
def test_nft_accepts_the_firewall() -> None:
    done = subprocess.run(["nft", "-c", "-f", "-"], input=render_table(LAYOUT, SITES), capture_output=True, text=True)
    if "Operation not permitted" in done.stderr:
        pytest.skip("checking rules takes root")
    assert (done.returncode, done.stderr) == (0, "")


def test_hardware_addresses_are_local_and_differ() -> None:
    one, two = (hardware_address(LAYOUT, name) for name in ("n1", "bridge a"))
    assert one != two and one.startswith("02:") and len(one) == 17


def test_container_is_reachable_through_a_single_port_and_reaches_no_site() -> None:
    pods = Site("containers", 2, "10.70.3.0/24")
    pod = HostRecord("pod1", 4, "10.70.3.2", "", "", Shape(container=True))
    plain = HostRecord("n1", 5, "10.70.1.2", "", "", Shape())
    text = render_table(LAYOUT, [*SITES[:1], pods], [pod, plain])
    assert_golden("sandbox/container.nft", text)
    assert "22005" not in text, "only containers are behind a port"
