"""Spec and facts combined: what stays when a host does not answer, versions, how jobs are confined."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.support.cases import cases
from tests.support.fake_world import gpus, host_facts, slurm_package, spec_of
from tests.support.role_items import in_force

from shoal.agent.facts import Address, Cgroup, Facts, FileFact, Package
from shoal.roles.assembly import assemble, slurm_version
from shoal.roles.current_conf import (
    SLURM_CONF,
    Confinement,
    CurrentConf,
    confinement,
    limit_confinement,
    read_current_conf,
)
from shoal.roles.plugins import pmix_files
from shoal.slurm.conf import cgroup_conf, gres_conf, slurm_conf
from shoal.slurm.model import Switch
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


def without(*names: str) -> dict[str, Facts]:
    return {name: fact for name, fact in FACTS.items() if name not in names}


@cases("silent", ("h1",), ("n1",), ("door",), ("n1", "n2", "h1", "door"))
def test_silent_hosts_change_nothing(silent: Sequence[str]) -> None:
    whole = assemble(SPEC, FACTS, {})
    again = assemble(SPEC, without(*silent), {}, read_current_conf(in_force(whole)))
    assert slurm_conf(again.conf) == slurm_conf(whole.conf) and gres_conf(again.conf) == gres_conf(whole.conf)
    assert cgroup_conf(again.conf) == cgroup_conf(whole.conf) and again.addresses == whole.addresses
    assert list(again.addresses) == list(whole.addresses)


def test_host_that_never_answered_is_omitted() -> None:
    cluster = assemble(SPEC, without("h1", "door"), {})
    assert "h1" not in slurm_conf(cluster.conf) and sorted(cluster.addresses) == ["c1", "n1", "n2"]


def test_leaving_node_stays_in_its_partitions_until_empty() -> None:
    before = read_current_conf(in_force(assemble(SPEC, FACTS, {})))
    smaller = spec_of(REEF.replace('"n[1-2]"', "n1"))
    now = assemble(smaller, without("n2"), {}, before, ["n2"])
    assert {p.name: p.nodes for p in now.conf.partitions} == {"main": ("n1", "h1", "n2"), "long": ("n1", "n2")}
    assert now.addresses["n2"] == "10.0.0.12"
    later = assemble(smaller, without("n2"), {}, before)
    assert {p.name: p.nodes for p in later.conf.partitions} == {"main": ("n1", "h1"), "long": ("n1",)}
    assert "n2" not in later.addresses


def test_leaving_node_joins_no_other_partition() -> None:
    before = read_current_conf(in_force(assemble(SPEC, FACTS, {})))
    spec = spec_of(REEF.replace("  big: {hosts: [h1], features: [h100, nvlink]}\n", "").replace("[lab, big]", "[lab]"))
    cluster = assemble(spec, without("h1"), {}, before, ["h1"])
    assert {p.name: p.nodes for p in cluster.conf.partitions} == {"main": ("n1", "n2", "h1"), "long": ("n1", "n2")}


def test_foreign_configuration_is_ignored() -> None:
    theirs = replace(FACTS["c1"], files={SLURM_CONF: FileFact(text="ClusterName=old\nNodeName=x[1-4] CPUs=2\n")})
    assert read_current_conf(theirs) == CurrentConf() and read_current_conf(None) == CurrentConf()
    assert read_current_conf(FACTS["c1"]) == CurrentConf()


def test_different_hostname_is_set_as_node_hostname() -> None:
    assert "NodeName=h1 NodeHostname=gpu-box NodeAddr=10.0.0.21" in slurm_conf(assemble(SPEC, FACTS, {}).conf)


def test_host_without_a_usable_address_is_reached_by_name() -> None:
    facts = {**FACTS, "n1": replace(FACTS["n1"], addresses=(Address("docker0", "172.17.0.1", 16),))}
    cluster = assemble(SPEC, facts, {})
    assert next(node for node in cluster.conf.nodes if node.name == "n1").address == "n1"
    assert "n1" not in cluster.addresses


@cases(
    "packages, os, version",
    ({"slurm-client": Package("24.11.5-1", "26.05.1-1")}, ("debian", "13"), "24.11.5"),
    ({"slurmd": Package(None, "23.11.4-1.2ubuntu5")}, ("ubuntu", "24.04"), "23.11.4"),
    ({"slurmctld": Package(None, "22.05.8-4"), "slurmd": Package("24.11.5-4", None)}, ("debian", "12"), "24.11.5"),
    ({}, ("debian", "12"), "22.05.8"),
    ({"slurmctld": Package(None, None)}, ("ubuntu", "24.04"), "23.11.4"),
    ({"slurmd": Package("not-a-version", None)}, ("debian", "13"), "24.11.5"),
)
def test_version_is_installed_else_candidate_else_of_the_distribution(
    packages: dict[str, Package], os: tuple[str, str], version: str
) -> None:
    assert slurm_version(Facts(os_id=os[0], os_version=os[1], packages=packages)) == Version.parse(version)


def test_version_of_an_unknown_system_is_none() -> None:
    assert slurm_version(Facts(os_id="arch", os_version="")) is None


V1 = ("freezer", "cpuset", "devices", "memory")
V2 = ("cpuset", "devices", "memory")
STRONG = Confinement(True, True, True, True, "autodetect")
NONE = Confinement(False, False, False, False, "cgroup/v1")
DISABLED = replace(NONE, plugin="disabled")
TABLE: list[tuple[list[Cgroup], str, Confinement]] = [
    ([Cgroup(2, V2)] * 2, "22.05.8", STRONG),
    ([Cgroup(2, V2), Cgroup(2, V2[:2])], "22.05.8", replace(STRONG, memory=False)),
    ([Cgroup(2, V2), Cgroup(2, ("cpuset", "memory"))], "22.05.8", replace(STRONG, devices=False)),
    ([Cgroup(2, ("memory",))], "22.05.8", NONE),
    ([Cgroup(2, ("memory",))], "24.11.5", DISABLED),
    ([Cgroup(1, V1)], "22.05.8", STRONG),
    ([Cgroup(1, V1), Cgroup(1, ("freezer",))], "22.05.8", Confinement(True, False, False, False, "autodetect")),
    ([Cgroup(1, V1), Cgroup(1, V1[:3])], "22.05.8", replace(STRONG, memory=False)),
    ([Cgroup(1, ())], "22.05.8", replace(NONE, plugin="autodetect")),
    ([Cgroup(1, ())], "24.11.5", DISABLED),
    ([Cgroup(1, V1), Cgroup(2, ("cpuset",))], "24.11.5", DISABLED),
    ([Cgroup(0)], "22.05.8", NONE),
    ([Cgroup(0)], "24.11.5", DISABLED),
    ([Cgroup(2, ("cpuset",)), Cgroup(0)], "24.11.5", DISABLED),
    ([], "24.11.5", DISABLED),
]


@cases("cgroups, version, expected", *TABLE)
def test_weakest_host_limits_confinement(cgroups: list[Cgroup], version: str, expected: Confinement) -> None:
    assert confinement([Facts(cgroup=one) for one in cgroups], [Version.parse(version)]) == expected


@cases(
    "found, before, expected",
    (STRONG, STRONG, STRONG),
    (STRONG, NONE, NONE),
    (NONE, STRONG, NONE),
    (replace(STRONG, devices=False), STRONG, replace(STRONG, devices=False)),
    (STRONG, replace(STRONG, memory=False), replace(STRONG, memory=False)),
)
def test_silent_host_limits_new_confinement(found: Confinement, before: Confinement, expected: Confinement) -> None:
    assert limit_confinement(found, before) == expected


def test_silent_host_without_cgroups_keeps_cgroups_off() -> None:
    facts = {**FACTS, "n2": replace(FACTS["n2"], cgroup=Cgroup(0))}
    weak = in_force(assemble(SPEC, facts, {}))
    again = assemble(SPEC, {**without("n2"), "c1": weak}, {}, read_current_conf(weak))
    assert "ProctrackType=proctrack/linuxproc" in slurm_conf(again.conf)
    smaller = spec_of(REEF.replace('"n[1-2]"', "n1"))
    leaving = assemble(smaller, {**without("n2"), "c1": weak}, {}, read_current_conf(weak), ["n2"])
    assert "ProctrackType=proctrack/linuxproc" in slurm_conf(leaving.conf)
    gone = assemble(smaller, {**without("n2"), "c1": weak}, {}, read_current_conf(weak))
    assert "ProctrackType=proctrack/cgroup" in slurm_conf(gone.conf)


def test_memory_is_constrained_when_every_node_supports_the_limit() -> None:
    assert "ConstrainRAMSpace=yes" in cgroup_conf(assemble(SPEC, FACTS, {}).conf)
    facts = {**FACTS, "n2": replace(FACTS["n2"], cgroup=Cgroup(2, ("cpuset",)))}
    assert "ConstrainRAMSpace=no" in cgroup_conf(assemble(SPEC, facts, {}).conf)


TWO_SITES = """
cluster: reef
controller: {provider: sandbox}
nodesets:
  fish: {provider: sandbox, count: 2}
  kelp: {provider: sandbox, count: 2, site: b}
"""
SITES = {
    name: host_facts(name, f"10.0.0.{number}")
    for number, name in enumerate(("controller", "fish1", "fish2", "kelp1", "kelp2"), 1)
}


def test_two_sites_get_a_switch_each_and_a_single_site_none() -> None:
    spec = spec_of(TWO_SITES)
    cluster = assemble(spec, SITES, {})
    assert cluster.conf.switches == (Switch("a", ("fish1", "fish2")), Switch("b", ("kelp1", "kelp2")))
    assert assemble(spec_of(TWO_SITES.replace(", site: b", "")), SITES, {}).conf.switches == ()
    everything_b = TWO_SITES.replace("count: 2}", "count: 2, site: b}")
    assert assemble(spec_of(everything_b), SITES, {}).conf.switches == (), "the controller runs no jobs"


def test_leaving_or_silent_node_keeps_its_switch() -> None:
    cluster = assemble(spec_of(TWO_SITES), SITES, {})
    before = read_current_conf(in_force(cluster))
    smaller = spec_of("\n".join(line for line in TWO_SITES.splitlines() if "kelp" not in line))
    kept = {name: fact for name, fact in SITES.items() if not name.startswith("kelp")}
    assert assemble(smaller, kept, {}, before, ["kelp1", "kelp2"]).conf.switches == cluster.conf.switches
    assert assemble(smaller, kept, {}, before).conf.switches == ()
    assert assemble(spec_of(TWO_SITES), kept, {}, before).conf.switches == cluster.conf.switches


def fact_of_pmix(fact: Facts) -> Facts:
    return replace(fact, files={**fact.files, **{path: FileFact(there=True) for path in pmix_files()}})


REAL = {name: replace(fact, arch="x86_64") for name, fact in FACTS.items()}
TRIXIE = {"os_version": "13", "packages": slurm_package("24.11.5-4")}


def default_mpi(facts: dict[str, Facts], before: CurrentConf | None = None) -> bool:
    return "MpiDefault=pmix" in slurm_conf(assemble(SPEC, facts, {}, before).conf)


def test_pmix_is_the_default_when_every_member_gets_the_package() -> None:
    assert default_mpi(REAL) and default_mpi({name: replace(fact, **TRIXIE) for name, fact in REAL.items()})


@cases(
    "lacks",
    {"os_version": "", "os_codename": "sid", "packages": slurm_package("26.05.5-1")},
    {"os_id": "ubuntu", "os_version": "24.04", "packages": slurm_package("23.11.4-1")},
    {"packages": slurm_package("23.11.4-1")},
    {"arch": "riscv64"},
    ids=["another system", "another distribution", "a Slurm that Debian did not build", "another architecture"],
)
def test_member_that_may_lack_pmix_prevents_the_default(lacks: dict[str, Any]) -> None:
    for name in ("c1", "door", "n1"):
        assert not default_mpi({**REAL, name: replace(REAL[name], **lacks)})


def test_running_hosts_need_pmix_installed_before_the_default() -> None:
    running = CurrentConf(addresses={name: "10.0.0.1" for name in REAL})
    assert not default_mpi(REAL, running)
    seen = {name: fact_of_pmix(fact) for name, fact in REAL.items()}
    assert default_mpi(seen, running) and not default_mpi({**seen, "n1": REAL["n1"]}, running)
    assert default_mpi({**seen, "n1": REAL["n1"]}, replace(running, pmix=True)), "what was removed is installed again"


def test_silent_member_keeps_the_default() -> None:
    answered = {name: fact_of_pmix(fact) for name, fact in REAL.items() if name != "n2"}
    running = CurrentConf(addresses={name: "10.0.0.1" for name in REAL})
    assert not default_mpi(answered, running) and default_mpi(answered, replace(running, pmix=True))


@cases(
    "changes, found, fix",
    ({"firewall": "ufw"}, "ufw", "ufw allow proto tcp from 10.0.0.1 to any port 6817,6818,60001:63000 && "),
    (
        {"services": {"firewalld": "active"}},
        "firewalld",
        "firewall-cmd --permanent --zone=trusted --add-source=10.0.0.1 && ",
    ),
    (
        {"firewall": "nft inet filter input"},
        "nft inet filter input",
        "nft 'insert rule inet filter input ip saddr { 10.0.0.1, 10.0.0.2, 10.0.0.11, 10.0.0.12, 10.0.0.21 } "
        "tcp dport { 6817, 6818, 60001-63000 } accept'",
    ),
)
def test_foreign_firewall_is_reported_with_the_commands(changes: dict[str, Any], found: str, fix: str) -> None:
    facts = {**FACTS, "n1": replace(FACTS["n1"], **changes)}
    [finding] = assemble(SPEC, facts, {}).findings
    assert (finding.level, finding.host, finding.found) == ("warning", "n1", found)
    assert finding.fix.startswith(f"run `{fix}")
    assert finding.fix.endswith("` on it, and set `firewall: false`: then that firewall guards the ports")
    assert assemble(spec_of(REEF + "firewall: false\n"), facts, {}).findings == ()


def test_hosts_without_a_foreign_firewall_have_no_findings() -> None:
    facts = {**FACTS, "n1": replace(FACTS["n1"], services={"firewalld": "inactive"})}
    assert assemble(SPEC, facts, {}).findings == ()


def test_slurm_conf_is_valid_for_the_oldest_member() -> None:
    facts = {**FACTS, "c1": replace(FACTS["c1"], packages=slurm_package("23.11.4-1"))}
    cluster = assemble(SPEC, facts, {})
    assert {str(version) for version in cluster.conf.versions} == {"22.05.8", "23.11.4"}
    assert "TreeWidth=65533" in slurm_conf(cluster.conf)
