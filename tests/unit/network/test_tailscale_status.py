"""What `tailscale status --json` means."""

from typing import Any

from tests.support.cases import cases

from shoal.agent.facts import Facts
from shoal.network.tailscale import Tailnet, read_status, tailnet_name, tailscale_addresses, up_flags
from shoal.spec.network import Network

# As version 1.80 prints it, cut down.
STATUS: dict[str, Any] = {
    **{"Version": "1.80.2-tb6b5a5d4c", "TUN": True, "BackendState": "Running", "HaveNodeKey": True, "AuthURL": ""},
    "TailscaleIPs": ["fd7a:115c:a1e0::1", "100.64.0.1"],
    "Self": {
        **{"ID": "nFoo", "HostName": "reef-c1", "Tags": ["tag:slurm"], "DNSName": "reef-c1.tail0.ts.net."},
        **{"TailscaleIPs": ["fd7a:115c:a1e0::1", "100.64.0.1"], "Online": True, "KeyExpiry": "2027-01-30T10:00:00Z"},
    },
    "Health": [],
    "Peer": {
        "nodekey:a": {
            **{"HostName": "reef-n1", "TailscaleIPs": ["100.64.0.2"], "CurAddr": "192.0.2.7:41641", "Relay": "fra"},
            **{"Online": True, "Active": True},
        },
        "nodekey:b": {
            **{"HostName": "reef-n2", "TailscaleIPs": ["100.64.0.3"], "CurAddr": "", "Relay": "fra"},
            **{"Online": True, "Active": True, "KeyExpiry": "0001-01-01T00:00:00Z"},
        },
        "nodekey:c": {"HostName": "reef-n3", "TailscaleIPs": ["100.64.0.4"], "Relay": "nyc", "Online": True},
        "nodekey:d": {"HostName": "reef-n4", "TailscaleIPs": ["100.64.0.5"], "Online": False, "Expired": True},
    },
    "SomethingNew": [1, 2, 3],
}


def test_direct_relayed_and_unknown_connections_differ() -> None:
    tailnet = read_status(STATUS)
    assert tailnet.running and tailnet.address == "100.64.0.1"
    ways = {node.name: node.way for node in tailnet.peers}
    assert ways == {"reef-n1": "direct", "reef-n2": "relayed", "reef-n3": "idle", "reef-n4": "offline"}
    relayed = tailnet.at("100.64.0.3")
    assert relayed is not None and relayed.relay == "fra" and relayed.expires is None
    assert tailnet.own.expires == 1801303200.0 and tailnet.at("100.64.0.99") is None


def test_peer_relay_counts_as_a_relay() -> None:
    peer = {"TailscaleIPs": ["100.64.0.3"], "PeerRelay": "198.51.100.1:7777", "Online": True, "Active": True}
    [node] = read_status({**STATUS, "Peer": {"k": peer}}).peers
    assert node.way == "relayed" and node.relay == "198.51.100.1:7777"


@cases(
    "found",
    {},
    {"problem": "failed to connect to local tailscaled"},
    {"BackendState": "NeedsLogin", "TailscaleIPs": None, "Self": {}, "Peer": None},
    {**STATUS, "BackendState": "Stopped"},
    {**STATUS, "Self": {**STATUS["Self"], "Expired": True}},
)
def test_host_outside_the_tailnet_has_no_tailnet_address(found: dict[str, Any]) -> None:
    assert not read_status(found).running
    assert tailscale_addresses({"c1": Facts(tailscale=found), "c2": Facts(tailscale=STATUS)}) == {"c2": "100.64.0.1"}


def test_silent_daemon_is_reported_with_its_error() -> None:
    assert read_status({"problem": "no daemon"}) == Tailnet(problem="no daemon")


def test_trimmed_agent_status_is_read_like_the_full_status() -> None:
    trimmed = {**STATUS, "Peer": list(STATUS["Peer"].values())}
    assert read_status(trimmed) == read_status(STATUS)


@cases(
    "cluster, member, name",
    ("reef", "gpu01", "reef-gpu01"),
    ("reef", "Big.lab.example", "reef-big-lab-example"),
    ("r" * 24, "n" * 60, "r" * 24 + "-" + "n" * 38),
)
def test_names_in_the_tailnet_are_dns_labels(cluster: str, member: str, name: str) -> None:
    assert tailnet_name(cluster, member) == name


def test_all_flags_are_passed_every_time() -> None:
    plain = Network(kind="tailscale")
    assert up_flags(plain, "reef-n1") == ("--hostname=reef-n1", "--accept-dns=false")
    full = Network(kind="tailscale", tags=("slurm", "tag:gpu"), login_server="https://head.example")
    assert up_flags(full, "reef-n1") == (
        *("--hostname=reef-n1", "--accept-dns=false"),
        *("--advertise-tags=tag:slurm,tag:gpu", "--login-server=https://head.example"),
    )
