"""Spec and facts put together: what stays when a host does not answer, versions, confinement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.unit.plan.fake_world import gpus, host_facts, slurm_package, spec_of

from shoal.agent.facts import Address, Cgroup, Facts, FileFact, Package
from shoal.network.names import hosts_block
from shoal.roles.cluster import Cluster, assemble, slurm_version
from shoal.roles.confinement import Confinement, confinement, no_stronger
from shoal.roles.in_force import CGROUP_CONF, GRES_CONF, HOSTS, SLURM_CONF, InForce, in_force
from shoal.slurm.conf import cgroup_conf, gres_conf, slurm_conf
from shoal.slurm.versions import Version

REEF = """
cluster: reef
controller: {host: c1}
login: {hosts: [door]}
nodesets:
  lab: {hosts: ["n[1-2]"], weight: 5}
  big: {hosts: [h1], features: [h100, nvlink]}
partitions:
  main: {nodesets: [lab, big], default: true}
  long: {nodesets: [lab]}
"""
SPEC = spec_of(REEF)
FACTS = {
    "c1": host_facts("c1", "10.0.0.1"),
    "door": host_facts("door", "10.0.0.2"),
    "n1": host_facts("n1", "10.0.0.11"),
    "n2": host_facts("n2", "10.0.0.12"),
    "h1": host_facts("gpu-box", "10.0.0.21", gpus=gpus(3), memory_mb=900_001),
}


def put_in_force(cluster: Cluster) -> Facts:
    """The controller's facts once this cluster was applied."""
    conf = cluster.conf
    hosts = f"127.0.0.1 localhost\n# BEGIN shoal members\n{hosts_block(cluster.addresses)}# END shoal members\n"
    texts = {
        SLURM_CONF: slurm_conf(conf),
        GRES_CONF: gres_conf(conf),
        CGROUP_CONF: cgroup_conf(conf),
        HOSTS: hosts,
    }
    return replace(FACTS["c1"], files={path: FileFact(text=text) for path, text in texts.items()})


def without(*names: str) -> dict[str, Facts]:
    return {name: fact for name, fact in FACTS.items() if name not in names}


@pytest.mark.parametrize("silent", [("h1",), ("n1",), ("door",), ("n1", "n2", "h1", "door")])
def test_hosts_that_do_not_answer_change_nothing(silent: Sequence[str]) -> None:
    whole = assemble(SPEC, FACTS, {})
    again = assemble(SPEC, without(*silent), {}, in_force(put_in_force(whole)))
    assert slurm_conf(again.conf) == slurm_conf(whole.conf)
    assert gres_conf(again.conf) == gres_conf(whole.conf)
    assert cgroup_conf(again.conf) == cgroup_conf(whole.conf)
    assert again.addresses == whole.addresses
    assert list(again.addresses) == list(whole.addresses)


def test_a_host_that_never_answered_is_left_out_of_everything() -> None:
    cluster = assemble(SPEC, without("h1", "door"), {})
    assert "h1" not in slurm_conf(cluster.conf)
    assert sorted(cluster.addresses) == ["c1", "n1", "n2"]


def test_a_leaving_node_stays_in_its_partitions_until_it_is_empty() -> None:
    before = in_force(put_in_force(assemble(SPEC, FACTS, {})))
    smaller = spec_of(REEF.replace('"n[1-2]"', "n1"))
    now = assemble(smaller, without("n2"), {}, before, ["n2"])
    assert {p.name: p.nodes for p in now.conf.partitions} == {"main": ("n1", "h1", "n2"), "long": ("n1", "n2")}
    assert now.addresses["n2"] == "10.0.0.12"
    later = assemble(smaller, without("n2"), {}, before)
    assert {p.name: p.nodes for p in later.conf.partitions} == {"main": ("n1", "h1"), "long": ("n1",)}
    assert "n2" not in later.addresses


def test_a_leaving_node_comes_back_into_no_partition_that_it_was_not_in() -> None:
    before = in_force(put_in_force(assemble(SPEC, FACTS, {})))
    spec = spec_of(REEF.replace("  big: {hosts: [h1], features: [h100, nvlink]}\n", "").replace("[lab, big]", "[lab]"))
    cluster = assemble(spec, without("h1"), {}, before, ["h1"])
    assert {p.name: p.nodes for p in cluster.conf.partitions} == {"main": ("n1", "n2", "h1"), "long": ("n1", "n2")}


def test_nothing_is_read_out_of_a_configuration_that_somebody_else_wrote() -> None:
    theirs = replace(FACTS["c1"], files={SLURM_CONF: FileFact(text="ClusterName=old\nNodeName=x[1-4] CPUs=2\n")})
    assert in_force(theirs) == InForce()
    assert in_force(None) == InForce()
    assert in_force(FACTS["c1"]) == InForce()


def test_a_host_name_that_differs_from_the_nodes_name_is_told_to_slurm() -> None:
    assert "NodeName=h1 NodeHostname=gpu-box NodeAddr=10.0.0.21" in slurm_conf(assemble(SPEC, FACTS, {}).conf)


def test_a_host_without_an_address_to_choose_from_is_reached_by_its_name() -> None:
    facts = {**FACTS, "n1": replace(FACTS["n1"], addresses=(Address("docker0", "172.17.0.1", 16),))}
    cluster = assemble(SPEC, facts, {})
    assert next(node for node in cluster.conf.nodes if node.name == "n1").address == "n1"
    assert "n1" not in cluster.addresses


def test_features_are_the_nodesets_name_and_those_of_the_file() -> None:
    node = next(node for node in assemble(SPEC, FACTS, {}).conf.nodes if node.name == "h1")
    assert node.features == ("big", "h100", "nvlink")


@pytest.mark.parametrize(
    ("packages", "os", "version"),
    [
        ({"slurm-client": Package("24.11.5-1", "26.05.1-1")}, ("debian", "13"), "24.11.5"),
        ({"slurmd": Package(None, "23.11.4-1.2ubuntu5")}, ("ubuntu", "24.04"), "23.11.4"),
        ({"slurmctld": Package(None, "22.05.8-4"), "slurmd": Package("24.11.5-4", None)}, ("debian", "12"), "24.11.5"),
        ({}, ("debian", "12"), "22.05.8"),
        ({"slurmctld": Package(None, None)}, ("ubuntu", "24.04"), "23.11.4"),
        ({"slurmd": Package("not-a-version", None)}, ("debian", "13"), "24.11.5"),
    ],
)
def test_the_version_is_the_installed_one_else_the_one_on_offer_else_the_distributions(
    packages: dict[str, Package], os: tuple[str, str], version: str
) -> None:
    assert slurm_version(Facts(os_id=os[0], os_version=os[1], packages=packages)) == Version.parse(version)


def test_the_version_of_a_system_that_we_do_not_know_is_unknown() -> None:
    assert slurm_version(Facts(os_id="arch", os_version="")) is None


V1 = ("freezer", "cpuset", "devices", "memory")
TABLE: list[tuple[list[Cgroup], str, Confinement]] = [
    ([Cgroup(2, ("cpuset", "memory"))] * 2, "22.05.8", Confinement(True, True, True, "autodetect")),
    ([Cgroup(2, ("memory",))], "22.05.8", Confinement(False, False, False, "cgroup/v1")),
    ([Cgroup(2, ("memory",))], "24.11.5", Confinement(False, False, False, "disabled")),
    ([Cgroup(1, V1)], "22.05.8", Confinement(True, True, True, "autodetect")),
    ([Cgroup(1, V1), Cgroup(1, ("freezer",))], "22.05.8", Confinement(True, False, False, "autodetect")),
    ([Cgroup(1, ())], "24.11.5", Confinement(False, False, False, "autodetect")),
    ([Cgroup(1, V1), Cgroup(2, ("cpuset",))], "24.11.5", Confinement(False, False, False, "disabled")),
    ([Cgroup(0)], "22.05.8", Confinement(False, False, False, "cgroup/v1")),
    ([Cgroup(0)], "24.11.5", Confinement(False, False, False, "disabled")),
    ([Cgroup(2, ("cpuset",)), Cgroup(0)], "24.11.5", Confinement(False, False, False, "disabled")),
    ([], "24.11.5", Confinement(False, False, False, "disabled")),
]


@pytest.mark.parametrize(("cgroups", "version", "expected"), TABLE)
def test_the_weakest_host_decides_how_jobs_are_confined(
    cgroups: list[Cgroup], version: str, expected: Confinement
) -> None:
    assert confinement([Facts(cgroup=one) for one in cgroups], [Version.parse(version)]) == expected


STRONG = Confinement(True, True, True, "autodetect")
NONE = Confinement(False, False, False, "cgroup/v1")


@pytest.mark.parametrize(
    ("found", "before", "expected"),
    [
        (STRONG, STRONG, STRONG),
        (STRONG, NONE, NONE),
        (NONE, STRONG, NONE),
        (Confinement(True, False, True, "autodetect"), STRONG, Confinement(True, False, True, "autodetect")),
    ],
)
def test_what_a_silent_host_may_not_have_is_not_begun_without_it(
    found: Confinement, before: Confinement, expected: Confinement
) -> None:
    assert no_stronger(found, before) == expected


def test_the_one_host_without_cgroups_keeps_them_off_while_it_does_not_answer() -> None:
    facts = {**FACTS, "n2": replace(FACTS["n2"], cgroup=Cgroup(0))}
    weak = put_in_force(assemble(SPEC, facts, {}))
    again = assemble(SPEC, {**without("n2"), "c1": weak}, {}, in_force(weak))
    assert "ProctrackType=proctrack/linuxproc" in slurm_conf(again.conf)
    smaller = spec_of(REEF.replace('"n[1-2]"', "n1"))
    leaving = assemble(smaller, {**without("n2"), "c1": weak}, {}, in_force(weak), ["n2"])
    assert "ProctrackType=proctrack/linuxproc" in slurm_conf(leaving.conf)
    gone = assemble(smaller, {**without("n2"), "c1": weak}, {}, in_force(weak))
    assert "ProctrackType=proctrack/cgroup" in slurm_conf(gone.conf)


def test_the_members_read_one_text_that_the_oldest_of_them_knows() -> None:
    facts = {**FACTS, "c1": replace(FACTS["c1"], packages=slurm_package("23.11.4-1"))}
    cluster = assemble(SPEC, facts, {})
    assert {str(version) for version in cluster.conf.versions} == {"22.05.8", "23.11.4"}
    assert "TreeWidth=65533" in slurm_conf(cluster.conf)
