"""The health program on nodes: who gets it, in what order, and the operator's own program beside it."""

import json
from dataclasses import replace

import pytest
from tests.support.cases import cases
from tests.support.fake_world import host_facts, spec_of
from tests.support.specs import ONE_NODE

from shoal.agent.document import File, Item, Service
from shoal.agent.facts import FileFact
from shoal.roles.assembly import assemble
from shoal.roles.component import Stage
from shoal.roles.documents import documents
from shoal.roles.node_health import COMMAND, CONFIG, FORGET_COMMAND, TIMER
from shoal.slurm.conf import HEALTH_HOOK, slurm_conf

REEF = ONE_NODE
OWN = "slurm: {options: {HealthCheckProgram: /usr/sbin/nhc, HealthCheckInterval: 90}}\n"


def items(text: str, name: str = "n1", *, init: str = "systemd", had: bool = False) -> dict[Stage, list[Item]]:
    """What concerns the health program in a host's documents."""
    files = {CONFIG: FileFact(there=had), "/usr/sbin/nhc": FileFact(there=True)}
    facts = {
        host: replace(host_facts(host, address), init=init if host == "n1" else "systemd", files=files)
        for host, address in (("c1", "10.0.0.1"), ("n1", "10.0.0.11"))
    }
    cluster = assemble(spec_of(text), facts, {})
    member = next(member for member in cluster.members if member.name == name)
    stages = documents(cluster, member)
    return {stage: [item for item in stages[stage] if "health" in item.key] for stage in stages}


def conf(text: str) -> str:
    facts = {host: host_facts(host, address) for host, address in (("c1", "10.0.0.1"), ("n1", "10.0.0.11"))}
    return slurm_conf(assemble(spec_of(text), facts, {}).conf)


def test_host_without_systemd_runs_it_under_the_supervisor() -> None:
    *files, service = items(REEF, init="none")[Stage.NODES]
    assert service.command[:2] == ("/bin/sh", "-c")
    assert service.command[2].startswith("while :; do python3 -I -S -B -c '") and "sleep 300" in service.command[2]
    assert not [item for item in files if isinstance(item, File) and item.path.startswith("/etc/systemd")]


@cases("mode", "warn", "drain")
def test_modes_and_switches_reach_the_program(mode: str) -> None:
    found = items(f"{REEF}health: {{mode: {mode}, skip: [gpu-clock, disk-full]}}\n")[Stage.BASE]
    [config] = [item for item in found if isinstance(item, File) and item.path == CONFIG]
    assert json.loads(str(config.content)) == {
        **{"mode": mode, "skip": ["disk-full", "gpu-clock"], "leftovers": "warn"},
        **{"idle_gpus": "warn", "idle_after_s": 3600, "hung_jobs": "warn", "hung_after_s": 1800},
    }


def test_off_removes_it() -> None:
    assert not any(items(f"{REEF}health: off\n").values())
    stages = items(f"{REEF}health: off\n", had=True)
    assert stages[Stage.NODES][0] == Service(TIMER, enabled=False, running=False)
    assert File(HEALTH_HOOK) in stages[Stage.NODES] and stages[Stage.NODES][-1] == File(CONFIG)
    assert "HealthCheck" not in conf(f"{REEF}health: off\n")


def test_program_of_the_operator_runs_beside_it() -> None:
    found = items(REEF + OWN)[Stage.BASE]
    [hook] = [item for item in found if isinstance(item, File) and item.path == HEALTH_HOOK]
    assert "program='/usr/sbin/nhc'\n" in str(hook.content)
    assert f"HealthCheckProgram={HEALTH_HOOK}\nHealthCheckInterval=90\n" in conf(REEF + OWN)
    assert "HealthCheckProgram=/usr/sbin/nhc\n" in conf(REEF + OWN + "health: off\n")


@cases(
    "text, problem",
    ("health: loud", "unknown mode"),
    ("health: 3", "not a mode of the health program"),
    ("health: {skip: [gpu-clok]}", "no check has this name"),
)
def test_wrong_values_are_refused(text: str, problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        spec_of(f"{REEF}{text}\n")


def test_same_program_forgets_what_it_found() -> None:
    assert FORGET_COMMAND[:-1] == COMMAND[:-1] and FORGET_COMMAND[-1].endswith("main(forget=True)")
