"""Slurm's topology from measured links, where the file names no sites."""

from dataclasses import replace

from tests.support.fake_world import host_facts, spec_of
from tests.support.role_items import in_force

from shoal.agent.document import File
from shoal.agent.facts import Facts, FileFact
from shoal.network.links import LINKS, NCCL, LinkSpeed, links_text
from shoal.roles.assembly import assemble
from shoal.roles.component import Stage
from shoal.roles.compute import LinksComponent
from shoal.roles.current_conf import CurrentConf, read_current_conf
from shoal.roles.documents import fact_files, removal
from shoal.slurm.conf import topology_conf
from shoal.slurm.model import Switch

REEF = """
cluster: reef
controller: {host: c1}
nodesets:
  lab: {hosts: [a1, a2, b1, b2]}
"""
SPEC = spec_of(REEF)
NAMES = ("c1", "a1", "a2", "b1", "b2")


def measured(far: float = 20.0) -> str:
    """What a controller keeps where a* and b* are near, and `far` Mbit/s lie between them."""
    speeds = {(x, y): 9000.0 if x[0] == y[0] or "c1" in (x, y) else far for x in NAMES for y in NAMES if x != y}
    return links_text(LinkSpeed(x, y, 0.1, speed) for (x, y), speed in speeds.items())


def facts(text: str) -> dict[str, Facts]:
    hosts = {name: host_facts(name, f"10.0.0.{number}") for number, name in enumerate(NAMES, 1)}
    return {**hosts, "c1": replace(hosts["c1"], files={LINKS: FileFact(text=text)})}


def test_groups_of_fast_links_become_separate_switches() -> None:
    conf = assemble(SPEC, facts(measured()), {}).conf
    assert conf.switches == (Switch("near-a1", ("a1", "a2")), Switch("near-b1", ("b1", "b2")))
    assert "SwitchName=near-a1 Nodes=a[1-2]" in topology_conf(conf)


def test_missing_or_similar_measurements_give_no_topology() -> None:
    for text in ("", "no json", measured(far=8000.0)):
        assert assemble(SPEC, facts(text), {}).conf.switches == ()


def test_configured_sites_override_measurements() -> None:
    text = """
cluster: reef
controller: {provider: sandbox}
nodesets:
  a: {provider: sandbox, count: 1}
  b: {provider: sandbox, count: 3, site: b}
"""
    names = ("controller", "a1", "b1", "b2", "b3")
    hosts = {name: host_facts(name, f"10.0.0.{number}") for number, name in enumerate(names, 1)}
    slow = links_text(LinkSpeed("b1", other, 0.1, 10.0) for other in ("b2", "b3"))
    hosts["controller"] = replace(hosts["controller"], files={LINKS: FileFact(text=slow)})
    assert [switch.name for switch in assemble(spec_of(text), hosts, {}).conf.switches] == ["a", "b"]


def test_silent_node_keeps_its_switch_and_a_leaving_node_is_not_a_site() -> None:
    all_of_them = facts(measured())
    whole = assemble(SPEC, all_of_them, {})
    first, before = whole.conf, read_current_conf(in_force(whole))
    answering = {name: fact for name, fact in all_of_them.items() if name != "b2"}
    assert assemble(SPEC, answering, {}, before).conf.switches == first.switches
    smaller = spec_of(REEF.replace(", b2", ""))
    leaving = assemble(smaller, answering, {}, before, ["b2"]).conf
    assert leaving.switches == first.switches
    assert assemble(smaller, facts(""), {}, before, ["b2"]).conf.switches == ()


def test_measurement_is_a_fact_file_and_removed_with_the_host() -> None:
    assert fact_files(SPEC)[LINKS] == "text" and f"file {LINKS}" in {item.key for item in removal()}
    assert assemble(SPEC, facts(""), {}, CurrentConf()).conf.switches == ()


def test_nodes_get_the_number_of_sockets_from_the_measurement() -> None:
    text = links_text(LinkSpeed(x, y, 20.0, 90.0, 700.0) for x in NAMES for y in NAMES if x != y)
    cluster = assemble(SPEC, facts(text), {})
    told = {m.name: LinksComponent().documents(cluster, m) for m in cluster.members}
    assert told["c1"] == {}
    [file] = [item for item in told["a1"][Stage.NODES] if isinstance(item, File)]
    assert (file.path, file.content) == (NCCL, "NCCL_SOCKET_NTHREADS=4\nNCCL_NSOCKS_PERTHREAD=4\n")
    known = facts("")
    known["a1"] = replace(known["a1"], files={NCCL: FileFact(there=True)})
    cluster = assemble(SPEC, known, {})
    after = {m.name: LinksComponent().documents(cluster, m) for m in cluster.members}
    assert after["a1"] == {Stage.NODES: (File(NCCL),)} and after["a2"] == {}
