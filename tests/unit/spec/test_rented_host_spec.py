"""A rented controller and rented login hosts in the file, and the spec once it is known where they are."""

from pathlib import Path

import pytest

from shoal.spec.loader import load_all, load_text, load_text_all
from shoal.spec.member import Placement, RentedMachine
from shoal.spec.members import members
from shoal.spec.model import Spec
from shoal.spec.rented_hosts import place_hosts

ROOT = Path(__file__).parents[3]
TEXT = """\
cluster: reef
network: wireguard
providers: {cloud: {kind: gcp, project: p}}
controller: {provider: cloud, type: e2-standard-2, zone: us-central1-b, disk: 50G, compute: true, usd_hour: 0.07}
login: {provider: cloud, type: e2-small, count: 2, address: false, identity: /home/me/key, image: debian-12}
"""


def test_members_are_rented_from_the_account() -> None:
    controller, first, second = members(load_text(TEXT, "s.yaml"))
    assert controller.provider == "cloud"
    assert controller.roles == {"controller", "compute"}
    assert controller.machine == RentedMachine("e2-standard-2", zone="us-central1-b", disk_gb=50, usd_hour=0.07)
    assert [first.name, second.name] == ["login1", "login2"]
    assert first.machine == RentedMachine("e2-small", image="debian-12", keep_address=False)
    assert first.identity == Path("/home/me/key")


def test_placed_hosts_are_like_hosts_that_exist_already() -> None:
    spec = load_text(TEXT, "s.yaml")
    places = {"controller": Placement("198.51.100.7", "ubuntu"), "login1": Placement("198.51.100.8", "ubuntu")}
    partly = members(place_hosts(spec, places))
    assert [member.provider for member in partly] == [None, "cloud", "cloud"]
    placed = place_hosts(spec, {**places, "login2": Placement("198.51.100.9", "ubuntu", identity=Path("/k"))})
    controller, *logins = members(placed)
    assert (controller.name, controller.address, controller.user) == ("controller", "198.51.100.7", "ubuntu")
    assert controller.endpoint == "198.51.100.7"
    assert controller.roles == {"controller", "compute"}
    assert [(member.name, member.address) for member in logins] == [
        ("login1", "198.51.100.8"),
        ("login2", "198.51.100.9"),
    ]
    # what the rental service on the controller reads
    again = Spec.model_validate_json(placed.model_dump_json(exclude_defaults=True, by_alias=True))
    assert members(again) == members(placed)


def test_price_of_a_host_that_is_not_rented_is_reported() -> None:
    text = "cluster: reef\ncontroller: {host: c1, usd_hour: 0.07}\nnodesets: {lab: {hosts: [n1]}}\n"
    [finding] = load_text_all(text, "s.yaml")[1]
    assert (finding.level, finding.path) == ("warning", "controller.usd_hour") and "delete it" in finding.fix


def test_example_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519.pub").write_text(
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFyC2Ek5rVqbJ4s0JDmUI7jH9pO7Vt5vYb0Kqk4m8zqF anna\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    spec, findings = load_all(ROOT / "examples/rented-cluster/shoal.yaml")
    assert [member.provider for member in members(spec)] == ["gcp", "gcp"]
    assert findings == []
