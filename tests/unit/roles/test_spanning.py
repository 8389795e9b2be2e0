"""Jobs stay inside one site unless they ask to span sites, which needs a plugin of slurmctld."""

from dataclasses import replace

from tests.support.fake_world import host_facts, spec_of
from tests.unit.roles.test_role_documents import TWO_SITES

from shoal.agent.facts import Facts, FileFact, Package
from shoal.roles.assembly import assemble
from shoal.roles.plugins import spanning_files
from shoal.slurm.conf import slurm_settings, topology_conf
from shoal.slurm.model import ClusterConf

NAMES = ("controller", "fish1", "fish2", "kelp1")
FACTS = {name: host_facts(name, f"10.0.0.{number}", arch="x86_64") for number, name in enumerate(NAMES, 1)}


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
