"""WireGuard as a part of the cluster: how hosts prepare, their documents, and what prevents it."""

from dataclasses import replace

from tests.goldens import assert_golden
from tests.support.fake_world import host_facts, spec_of
from tests.support.item_text import folded_text
from tests.support.role_items import in_force, items_of, text_of

from shoal.agent.document import Packages
from shoal.agent.facts import Address, Facts, FileFact
from shoal.network.wireguard import MODULE, PEERS, PRIVATE_KEY, PUBLIC_KEY, UNIT
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster
from shoal.roles.current_conf import HOSTS, read_current_conf
from shoal.roles.wireguard import WireGuardComponent, missing_wireguard
from shoal.slurm.conf import slurm_settings
from shoal.spec.members import members

TEXT = """
cluster: reef
network: wireguard
controller: {host: {name: c1, address: 10.0.0.1}}
nodesets:
  lab: {hosts: [{name: n1, address: 10.0.0.11}]}
  far: {hosts: [{name: f1, address: 192.168.1.5}], site: b}
"""
SPEC = spec_of(TEXT)
PART = WireGuardComponent()
REACHES = {"c1": {"n1": "10.0.0.11"}, "n1": {"c1": "10.0.0.1"}, "f1": {"c1": "10.0.0.1"}}


def facts(name: str, address: str, **changes: object) -> Facts:
    found = host_facts(name, address, tun=True, reaches=REACHES[name], **changes)
    key = FileFact(text=f"public-key-of-{name}=\n")
    return replace(found, files={**found.files, PUBLIC_KEY: key, HOSTS: FileFact(text="127.0.0.1 localhost\n")})


FACTS = {
    "c1": facts("c1", "10.0.0.1"),
    "n1": facts("n1", "10.0.0.11", modules=(MODULE,)),
    "f1": facts("f1", "192.168.1.5"),
}


def test_hub_and_nat_host_match_their_goldens() -> None:
    cluster = assemble(SPEC, FACTS, {})
    hub, _, nat = (PART.documents(cluster, member) for member in cluster.members)
    assert_golden("roles/wireguard-c1.txt", folded_text(hub))
    assert_golden("roles/wireguard-f1.txt", folded_text(nat, hub=hub))


def test_host_without_a_key_generates_a_key_first() -> None:
    member, fresh = members(SPEC)[2], host_facts("f1", "192.168.1.5")
    packages, _, command = PART.prepare(SPEC, member, fresh)
    assert packages == Packages(("iproute2", "wireguard-tools", "wireguard-go"))
    assert command.unless == ("test", "-s", PUBLIC_KEY) and PART.prepare(SPEC, member, FACTS["f1"]) == ()
    assert PART.prepare(spec_of(TEXT.replace("wireguard", "lan")), member, fresh) == ()


def test_private_key_is_not_a_fact() -> None:
    assert PRIVATE_KEY not in {**PART.files, **PART.fact_files(SPEC)}


def test_wireguard_packages_depend_on_the_kernel_and_the_hub_role() -> None:
    controller, near, far = members(SPEC)
    assert PART.packages(SPEC, near, FACTS["n1"]) == ("iproute2", "wireguard-tools")
    assert PART.packages(SPEC, far, FACTS["f1"]) == ("iproute2", "wireguard-tools", "wireguard-go")
    assert "nftables" in PART.packages(SPEC, controller, None)
    assert PART.packages(spec_of(TEXT.replace("wireguard", "lan")), near, None) == ()


def test_names_nodes_and_firewall_use_the_network() -> None:
    cluster = assemble(SPEC, FACTS, {})
    assert cluster.addresses == {"c1": "10.77.0.1", "n1": "10.77.0.2", "f1": "10.77.0.3"}
    assert "SlurmctldHost=c1(10.77.0.1)\n" in slurm_settings(cluster.conf)
    assert [node.address for node in cluster.conf.nodes] == ["10.77.0.2", "10.77.0.3"]
    assert 'iifname "shoal0" ip saddr @members4' in text_of(cluster, "n1", "/etc/shoal/firewall.nft")


def test_slurm_listens_only_on_the_network_under_any_hostname() -> None:
    words = "NoInAddrAny,NoCtldInAddrAny"
    assert words in slurm_settings(assemble(SPEC, FACTS, {}).conf)
    other_name = assemble(SPEC, {**FACTS, "n1": replace(FACTS["n1"], hostname="ip-10-0-0-11")}, {})
    assert words in slurm_settings(other_name.conf)
    names = items_of(other_name, "n1")["block members in /etc/hosts"]
    assert "10.77.0.2  n1 ip-10-0-0-11\n" in names.content


def put_in_force(cluster: Cluster) -> dict[str, Facts]:
    """The facts once this cluster was applied."""
    found = {**cluster.facts, "c1": in_force(cluster)}
    peers = {name: {PEERS: FileFact(text=text_of(cluster, name, PEERS, PART))} for name in found}
    return {name: replace(fact, files={**fact.files, **peers[name]}) for name, fact in found.items()}


def test_silent_host_changes_nothing_for_the_others() -> None:
    whole = assemble(SPEC, FACTS, {})
    known = put_in_force(whole)
    silent = {name: fact for name, fact in known.items() if name != "f1"}
    again = assemble(SPEC, silent, {}, read_current_conf(known["c1"]))
    for name in ("c1", "n1"):
        assert text_of(again, name, PEERS, PART) == text_of(whole, name, PEERS, PART)
    assert again.conf.one_address


def test_leaving_member_frees_its_address_and_the_others_do_not_move() -> None:
    before = read_current_conf(put_in_force(assemble(SPEC, FACTS, {}))["c1"])
    less = spec_of(TEXT.replace("  lab: {hosts: [{name: n1, address: 10.0.0.11}]}\n", ""))
    found = {name: fact for name, fact in FACTS.items() if name != "n1"}
    assert assemble(less, found, {}, before).addresses == {"c1": "10.77.0.1", "f1": "10.77.0.3"}


def test_obstacles_are_reported() -> None:
    found = {
        **FACTS,
        "n1": replace(FACTS["n1"], addresses=(Address("eth0", "10.77.3.4", 24),)),
        "f1": replace(FACTS["f1"], tun=False, reaches={}),
    }
    assert [str(finding) for finding in PART.findings(assemble(SPEC, found, {}))] == [
        "n1: 10.77.0.0/16 is in use on the host, found 10.77.3.4, set another subnet: "
        "`network: {kind: wireguard, subnet: 10.78.0.0/16}`",
        "f1: WireGuard cannot run, found neither WireGuard in the kernel nor /dev/net/tun, load the module "
        "(`modprobe wireguard`), give the container /dev/net/tun, or use `network: tailscale`",
        "f1: cannot connect to c1 in either direction, and no other member relays for it, forward UDP port 51820 "
        "to c1 and set `endpoint: router.example.org`; or choose a host that all can reach: "
        "`network: {kind: wireguard, hub: ...}`",
    ]
    assert PART.findings(assemble(SPEC, FACTS, {})) == ()


def test_another_network_removes_wireguard_only_where_present() -> None:
    assert items_of(assemble(spec_of(TEXT.replace("wireguard", "lan")), FACTS, {}), "n1", PART) == {}
    was = {**FACTS, "n1": replace(FACTS["n1"], files={**FACTS["n1"].files, UNIT: FileFact(there=True)})}
    gone = assemble(spec_of(TEXT.replace("wireguard", "lan")), was, {})
    assert {f"file {PRIVATE_KEY}", f"file {UNIT}", "service shoal-wireguard"} <= items_of(gone, "n1", PART).keys()
    assert "command unreachable subnet" in items_of(gone, "n1", PART)


def test_host_whose_system_has_no_wireguard_is_rejected() -> None:
    old = {"os_id": "debian", "os_version": "11"}
    found = {
        "c1": replace(FACTS["c1"], **old),
        "n1": replace(FACTS["n1"], **old),  # its kernel has the module
        "f1": replace(FACTS["f1"], os_id="debian", os_version="12"),
    }
    [finding] = missing_wireguard(SPEC, found)
    assert (finding.level, finding.host, finding.what) == ("error", "c1", "WireGuard cannot run")
    assert finding.found == "the kernel has none, and debian 11 has no package wireguard-go"
    assert "modprobe wireguard" in finding.fix
    assert missing_wireguard(spec_of(TEXT.replace("network: wireguard", "network: lan")), found) == []
