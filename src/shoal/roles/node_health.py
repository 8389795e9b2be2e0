"""The health program of nodes: its files, the timer that runs it, and the hook that Slurm runs."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shoal.agent.document import Directory, Document, File, Service, render_unit
from shoal.remote import program_text
from shoal.remote.node_health.node import CONFIG, INTERVAL_S, STATE
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.slurm.conf import HEALTH_HOOK
from shoal.spec.checks import seconds
from shoal.spec.member import Member
from shoal.spec.model import Spec

DIRECTORY = "/usr/local/lib/shoal"
PACKAGE = f"{DIRECTORY}/node_health"
MODULES = (
    *("node", "host_checks", "gpu_checks", "gpu_driver", "gpu_test", "leftovers", "job_stacks", "training", "hung_job"),
    "main",
)
NAME = "shoal-health"
TIMER = f"{NAME}.timer"
UNITS = "/etc/systemd/system"
TIMEOUT_S = 120
"""For one run: a GPU's driver may hang."""
START = f"import sys; sys.path.insert(0, '{DIRECTORY}'); from node_health.main import main; main()"
COMMAND = ("python3", "-I", "-S", "-B", "-c", START)
FORGET_COMMAND = (*COMMAND[:-1], START.replace("main()", "main(forget=True)"))


class HealthComponent(Component):
    """The health program on every node, and its hook in Slurm."""

    files: Mapping[str, FileQuery] = {CONFIG: "there"}
    services = (TIMER,)
    in_containers = True

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        facts = cluster.facts[member.name]
        if "compute" not in member.roles or cluster.spec.health.mode == "off":
            # After slurmctld's restart, when no slurmd runs the hook any more.
            return {Stage.NODES: self.removal()} if facts.has_file(CONFIG) else {}
        # The hook is in place before slurmd reads of it. The program starts after slurmd: its registration is awaited.
        return {Stage.BASE: _files(cluster.spec, member), Stage.NODES: _services(facts.init != "none")}

    def removal(self) -> Document:
        return (
            Service(TIMER, enabled=False, running=False),
            *(File(f"{UNITS}/{name}") for name in (TIMER, f"{NAME}.service")),
            *(File(path) for path in (HEALTH_HOOK, *(f"{PACKAGE}/{name}.py" for name in MODULES), CONFIG)),
        )


def _files(spec: Spec, member: Member) -> Document:
    return (
        Directory("/etc/shoal"),
        Directory("/var/lib/shoal"),
        Directory(STATE),
        Directory(DIRECTORY),
        Directory(PACKAGE),
        *(File(f"{PACKAGE}/{name}.py", program_text(f"node_health/{name}.py")) for name in MODULES),
        File(HEALTH_HOOK, hook(spec), mode=0o755),
        File(CONFIG, config(spec, member)),
    )


def _services(systemd: bool) -> Document:
    if not systemd:
        words = " ".join(f"'{word}'" if " " in word else word for word in (*COMMAND[:-1], START.replace("'", '"')))
        return (Service(TIMER, command=("/bin/sh", "-c", f"while :; do {words}; sleep {INTERVAL_S}; done")),)
    service = render_unit(
        Unit={"Description": "Checks the health of this node"},
        Service={
            "Type": "oneshot",
            "ExecStart": f'/usr/bin/env {" ".join(COMMAND[:-1])} "{START}"',
            "TimeoutStartSec": TIMEOUT_S,
            "Nice": 10,
            # A process that waits for a dead share cannot be ended, and must not hold up the next run.
            "KillMode": "process",
        },
    )
    timer = render_unit(
        Unit={"Description": "Checks the health of this node every few minutes"},
        Timer={"OnActiveSec": 15, "OnUnitActiveSec": INTERVAL_S, "AccuracySec": 15},
        Install={"WantedBy": "timers.target"},
    )
    return (
        File(f"{UNITS}/{NAME}.service", service),
        File(f"{UNITS}/{TIMER}", timer, restarts=(TIMER,)),
        Service(TIMER),
    )


def config(spec: Spec, member: Member) -> str:
    """What the program reads at every run."""
    health = spec.health
    values = {
        "mode": health.mode,
        "skip": sorted(health.skip),
        "leftovers": health.leftovers,
        "idle_gpus": health.idle_gpus,
        "idle_after_s": seconds(health.idle_after),
        "hung_jobs": health.hung_jobs,
        "hung_after_s": seconds(health.hung_after),
        **({"driver": member.driver} if member.driver else {}),
    }
    return json.dumps(values) + "\n"


def hook(spec: Spec) -> str:
    """Slurm's HealthCheckProgram: it ends with the operator's own, where the file names one."""
    words = {"STATE": STATE, "DIRECTORY": DIRECTORY, "PROGRAM": operator_program(spec.slurm.options)}
    return program_text("health_hook.sh", **words)


def operator_program(options: Mapping[str, str]) -> str:
    return next((value for key, value in options.items() if key.lower() == "healthcheckprogram"), "")
