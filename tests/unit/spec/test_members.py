"""Which hosts a spec names, with which roles, and the partitions over them."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.support.cases import cases

from shoal.spec.hosts import Controller, NodeSet
from shoal.spec.loader import load_text
from shoal.spec.member import Member, Shape
from shoal.spec.members import default_spec, members, partitions
from shoal.spec.model import Spec
from shoal.spec.slurm_options import MANAGED_SLURM_KEYS

TEXT = """\
cluster: reef
controller: {host: root@desktop, compute: true}
login: {hosts: [front], port: 2200}
nodesets:
  lab:
    user: ubuntu
    identity: ~/.ssh/lab
    features: [a100]
    weight: 5
    hosts:
      - gpu[09-10]
      - admin@gpu11:2222
      - {name: Gpu12, address: 10.0.0.12, identity: /k}
  fish: {provider: sandbox, count: 2, image: debian13, cpus: 2, memory: 2G, disk: 8G, gpus: 1, site: b}
"""


def test_members_are_in_order_with_inherited_values() -> None:
    lab = Path("~/.ssh/lab").expanduser()
    shape = Shape(image="debian13", cpus=2, memory_mb=2048, disk_mb=8192, gpus=1, site="b")
    compute = frozenset({"compute"})
    common = {"roles": compute, "nodeset": "lab", "features": ("a100",), "weight": 5}
    assert members(load_text(TEXT, "s.yaml")) == (
        Member("desktop", frozenset({"controller", "compute"}), "controller", user="root"),
        Member("front", frozenset({"login"}), "login", port=2200),
        Member("gpu09", user="ubuntu", identity=lab, **common),
        Member("gpu10", user="ubuntu", identity=lab, **common),
        Member("gpu11", user="admin", port=2222, identity=lab, **common),
        Member("Gpu12", user="ubuntu", address="10.0.0.12", identity=Path("/k"), **common),
        Member("fish1", compute, "fish", provider="sandbox", shape=shape),
        Member("fish2", compute, "fish", provider="sandbox", shape=shape),
    )


def test_default_partition_covers_all_compute_nodesets_and_the_first_is_the_default_unless_configured() -> None:
    [(name, main)] = partitions(load_text(TEXT, "s.yaml")).items()
    assert (name, main.nodesets, main.default) == ("main", ("lab", "fish", "controller"), True)
    text = TEXT + "partitions: {a: {nodesets: [lab]}, b: {nodesets: [fish, controller]}}\n"
    for changed, default in ((text, "a"), (text.replace("controller]}", "controller], default: true}"), "b")):
        found = partitions(load_text(changed, "s.yaml"))
        assert list(found) == ["a", "b"] and [name for name in found if found[name].default] == [default]


@cases(
    "written, read",
    ("90", "90"),
    ("01:30:00", "01:30:00"),
    ("1-12:00:00", "1-12:00:00"),
    ("infinite", "INFINITE"),
    ("2-0", "2-0"),
)
def test_times_keep_the_slurm_spelling(written: str, read: str) -> None:
    text = TEXT + f"partitions: {{a: {{nodesets: [lab, fish, controller], max_time: {written}}}}}\n"
    assert partitions(load_text(text, "s.yaml"))["a"].max_time == read


@cases("key", *MANAGED_SLURM_KEYS)
def test_key_written_by_shoal_is_rejected_in_any_case(key: str) -> None:
    with pytest.raises(ValidationError, match="Shoal writes this key itself"):
        default_spec().slurm.model_validate({"options": {key.upper(): "x"}})


def test_default_spec_is_a_controller_and_two_nodes_with_two_gpus() -> None:
    found = members(default_spec())
    assert [(member.name, member.shape.gpus) for member in found] == [("controller", 0), ("fish1", 2), ("fish2", 2)]
    assert {member.provider for member in found} == {"sandbox"}
    assert [member.name for member in members(default_spec("b", nodes=3, gpus=0))][1:] == ["fish1", "fish2", "fish3"]


def test_spec_built_in_code_is_validated_and_every_spec_immutable() -> None:
    with pytest.raises(ValidationError, match=r"nodesets\.a: missing key `count`"):
        Spec(cluster="reef", controller=Controller(provider="sandbox"), nodesets={"a": NodeSet(provider="sandbox")})
    spec = load_text(TEXT + "slurm: {options: {KillWait: 60, MailProg: /bin/true}}\n", "s.yaml")
    assert spec.slurm.options == {"KillWait": "60", "MailProg": "/bin/true"}
    assert Spec.model_validate(spec.model_dump(by_alias=True)) == spec
    with pytest.raises(ValidationError):
        spec.cluster = "other"  # type: ignore[misc]
