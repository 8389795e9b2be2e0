"""Slurm's topology: from measured links where the file names no sites, and jobs that span sites."""

from dataclasses import replace

from tests.support.fake_world import host_facts, spec_of
from tests.support.role_items import in_force
from tests.unit.roles.test_role_documents import TWO_SITES

from shoal.agent.document import File
from shoal.agent.facts import Facts, FileFact, Package
from shoal.network.links import LINKS, NCCL, LinkSpeed, links_text
from shoal.roles.assembly import assemble
from shoal.roles.component import Stage
from shoal.roles.compute import LinksComponent
from shoal.roles.current_conf import CurrentConf, read_current_conf
from shoal.roles.documents import fact_files, removal
from shoal.roles.plugins import spanning_files
from shoal.slurm.conf import slurm_settings, topology_conf
from shoal.slurm.model import ClusterConf, Switch

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
    assert assemble(smaller, answering, {}, before, ["b2"]).conf.switches == first.switches
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


HOSTS = ("controller", "fish1", "fish2", "kelp1")
FACTS = {name: host_facts(name, f"10.0.0.{number}", arch="x86_64") for number, name in enumerate(HOSTS, 1)}


def conf(facts: dict[str, Facts] = FACTS, more: str = "") -> ClusterConf:
    return assemble(spec_of(TWO_SITES + more), facts, {}).conf


def with_controller(**changes: object) -> dict[str, Facts]:
    return {**FACTS, "controller": replace(FACTS["controller"], **changes)}  # type: ignore[arg-type]


def test_slurmctld_without_the_lua_plugin_gets_separate_sites() -> None:
    there = {"slurmctld": Package(installed="22.05.8")}
    found = conf(with_controller(packages=there))
    assert "shoal-sites" not in topology_conf(found) and "JobSubmitPlugins" not in slurm_settings(found)
    files = {**FACTS["controller"].files, spanning_files()[0]: FileFact(there=True)}
    assert conf(with_controller(packages=there, files=files)).spanning
    assert not conf(with_controller(os_id="ubuntu", os_version="24.04")).spanning


def test_submit_plugins_and_scheduler_parameters_of_the_user_are_kept() -> None:
    plugin_conf = conf(more="slurm: {options: {JobSubmitPlugins: throttle}}\n")
    assert not plugin_conf.spanning and "JobSubmitPlugins=throttle\n" in slurm_settings(plugin_conf)
    scheduler_conf = conf(more="slurm: {options: {SchedulerParameters: 'defer,bf_interval=60'}}\n")
    merged = "batch_sched_delay=0,max_switch_wait=31536000,defer,bf_interval=60"
    assert f"SchedulerParameters={merged}\n" in slurm_settings(scheduler_conf)


def test_single_site_needs_no_plugin() -> None:
    one = assemble(spec_of(TWO_SITES.replace(", site: b", "")), FACTS, {}).conf
    assert "JobSubmitPlugins" not in slurm_settings(one) and "max_switch_wait" not in slurm_settings(one)
