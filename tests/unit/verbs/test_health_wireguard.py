"""The WireGuard network in `shoal status`."""

from tests.support.fake_world import LAB, spec_of

from shoal.cli.cluster_screens import wireguard_line
from shoal.hosts.api import Result, Target
from shoal.network.wireguard import Peer, peers_conf
from shoal.verbs.health import WireGuardView, parse_handshakes, wireguard_view
from shoal_simulators.fake_host import FakeHost

PEERS = peers_conf([Peer(name, f"key-{name}", ("10.77.0.2",)) for name in ("n1", "n2", "n3")], 51820)
TEXT = f"1000\n---\n{PEERS}---\nkey-n1\t990\nkey-n2\t0\nkey-n3\t500\n"
WIREGUARD = spec_of(LAB + "network: wireguard\n")


def controller(answer: Result | bytes) -> FakeHost:
    return FakeHost(Target("c1"), {("sh",): lambda call: answer})


def test_members_have_names_and_handshake_ages() -> None:
    view = parse_handshakes(TEXT)
    assert view.heard == {"n1": 10, "n2": None, "n3": 500}
    assert view.quiet == ("n2", "n3")


async def test_only_a_wireguard_cluster_is_queried() -> None:
    assert await wireguard_view(spec_of(LAB), controller(b"")) is None
    assert await wireguard_view(WIREGUARD, controller(TEXT.encode())) == parse_handshakes(TEXT)


async def test_missing_interface_is_reported() -> None:
    said = b"Unable to access interface: No such device\n"
    view = await wireguard_view(WIREGUARD, controller(Result(1, stderr=said)))
    assert view == WireGuardView(problem="Unable to access interface: No such device")


def test_line_names_quiet_members_and_their_silence() -> None:
    assert wireguard_line(parse_handshakes(TEXT)) == (
        "wireguard: [yellow]not heard from n2 (never), n3 (8 min)[/]; 1 other was heard from recently"
    )
    assert wireguard_line(WireGuardView({"n1": 5})) == "wireguard: [green]heard from 1 member recently[/]"
    assert wireguard_line(WireGuardView({"n1": 5, "n2": 6})) == "wireguard: [green]heard from 2 members recently[/]"
    assert wireguard_line(WireGuardView(problem="No such device")) == "wireguard: [red]No such device[/]"
