"""The whole document of each role: every item of every stage."""

from functools import cache
from typing import Any

from tests.goldens import assert_golden
from tests.support.cases import cases
from tests.support.fake_world import gpus, host_facts, spec_of
from tests.support.item_text import defaults_text, folded_text

from shoal.agent.document import DeviceRule, Document, File
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage
from shoal.roles.controller import READ_CONF, advice
from shoal.roles.current_conf import SLURM_CONF
from shoal.roles.documents import documents, removal

REEF = """
cluster: reef
controller: {host: {name: c1, address: 10.0.0.1}}
login: {hosts: [{name: door, address: 10.0.0.2}]}
nodesets:
  lab: {hosts: [{name: n1, address: 10.0.0.11}, {name: n2, address: 10.0.0.12}], features: [a100]}
"""

TWO_SITES = """
cluster: reef
controller: {provider: sandbox}
nodesets:
  fish: {provider: sandbox, count: 2}
  kelp: {provider: sandbox, count: 1, site: b}
"""

ROLES = {"controller": "c1", "login": "door", "compute": "n1"}


def reef(text: str = REEF, **changes: dict[str, Any]) -> Cluster:
    spec = spec_of(text)
    addresses = {"c1": "10.0.0.1", "door": "10.0.0.2", "n1": "10.0.0.11", "n2": "10.0.0.12"}
    facts = {
        name: host_facts(name, at, **{"arch": "x86_64", **changes.get(name, {})}) for name, at in addresses.items()
    }
    return assemble(spec, facts, addresses)


def document_of(cluster: Cluster, name: str) -> dict[Stage, Document]:
    return documents(cluster, next(member for member in cluster.members if member.name == name))


@cache
def roles(text: str = REEF) -> dict[str, dict[Stage, Document]]:
    """A whole document for each role, which the goldens of other hosts are compared with."""
    cluster = reef(text, n1={"gpus": gpus(2)})
    return {role: document_of(cluster, name) for role, name in ROLES.items()}


@cases("role", *list(ROLES))
def test_document_of_a_role_matches_its_golden(role: str) -> None:
    bases = {} if role == "controller" else {"controller": roles()["controller"]}
    assert_golden(f"roles/{role}.txt", folded_text(roles()[role], **bases))


@cases(
    "golden, name, text",
    ("controller+compute", "c1", REEF.replace("controller: {", "controller: {compute: true, ")),
    ("compute-without-firewall", "n1", REEF + "firewall: false\n"),
)
def test_host_document_matches_its_golden(golden: str, name: str, text: str) -> None:
    document = document_of(reef(text, n1={"gpus": gpus(2)}), name)
    bases = {role: roles()[role] for role in ("controller", "compute")}
    assert_golden(f"roles/{golden}.txt", folded_text(document, **bases))


def test_defaults_of_items_match_their_golden() -> None:
    assert_golden("roles/defaults.txt", defaults_text())


def test_slurm_error_points_to_the_key_in_the_file() -> None:
    cluster = reef(REEF + "slurm: {options: {PreemptType: preempt/none, KillWait: 60}}\n")
    assert advice(cluster) == (
        ("PreemptType", "correct or delete slurm.options.PreemptType in the cluster's file"),
        ("KillWait", "correct or delete slurm.options.KillWait in the cluster's file"),
        ("preempt/none", "correct or delete slurm.options.PreemptType in the cluster's file"),
    )
    for name in ("c1", "door"):
        member = next(member for member in cluster.members if member.name == name)
        items = [item for document in documents(cluster, member).values() for item in document]
        [conf] = [item for item in items if isinstance(item, File) and item.path == SLURM_CONF]
        assert (conf.accepted_by, conf.advice) == (READ_CONF, advice(cluster))


def test_two_sites_match_their_golden() -> None:
    spec = spec_of(TWO_SITES)
    names = ("controller", "fish1", "fish2", "kelp1")
    facts = {name: host_facts(name, f"10.0.0.{number}") for number, name in enumerate(names, 1)}
    assert_golden("roles/two-sites.txt", folded_text(document_of(assemble(spec, facts, {}), "controller"), **roles()))


def test_removal_matches_its_golden() -> None:
    assert_golden("roles/removal.txt", folded_text({Stage.NODES: removal()}))


def test_node_without_gpus_has_no_gpu_device_rule() -> None:
    cluster = reef(n1={"gpus": gpus(2)})
    rules = {
        name: "".join(
            item.content
            for items in document_of(cluster, name).values()
            for item in items
            if isinstance(item, DeviceRule)
        )
        for name in ("n1", "n2")
    }
    assert 'KERNEL=="nvidia[0-9]*", MODE="0666"' in rules["n1"] and 'KERNEL=="nvidia' not in rules["n2"]
