"""The settings of slurm.conf that let a job save its work before it is stopped, and checks of them.

The training library relies on these settings (`shoal.contract` has the numbers). The user may change any of them;
a finding then says what is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.contract import GRACE_S, KILL_WAIT_S
from shoal.hostlist import expand
from shoal.slurm.state import PartitionState
from shoal.slurm.versions import Version, all_support
from shoal.spec.finding import Finding

USER_SIGNAL = "send_user_signal"
"""In PreemptParameters: a preempted job gets the signal of its --signal, and not SIGTERM."""
OLD_USER_SIGNAL = "preempt_send_user_signal"
"""The same in SlurmctldParameters, where releases before 23.02 read it, and later ones as well."""


def preemption_settings(versions: Iterable[Version]) -> dict[str, str]:
    """Preemption is on in every cluster: it has no effect while no partition has a higher priority.

    proctrack/cgroup signals only the processes that Slurm started, as intended:
    SignalChildrenProcesses (cgroup.conf, since 23.11) would signal data workers too. proctrack/linuxproc always does.
    """
    settings = {
        "JobRequeue": "1",
        "KillWait": str(KILL_WAIT_S),
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
    }
    if all_support("preempt_parameters", versions):
        settings["PreemptParameters"] = USER_SIGNAL
    return settings


def slurmctld_parameters(versions: Iterable[Version]) -> list[str]:
    """Preemption's entries in SlurmctldParameters, for members that do not support PreemptParameters."""
    return [] if all_support("preempt_parameters", versions) else [OLD_USER_SIGNAL]


@dataclass(frozen=True)
class ContractViolation:
    """A setting that costs a job its work."""

    key: str
    what: str
    found: str
    least: str
    """The value that it should have."""

    def finding(self, options: Iterable[str], controller: str) -> Finding:
        """A warning at the user's option, or at the controller where the user has not set it."""
        for option in options:
            if option.lower() == self.key.lower():
                fix = f"delete it, or say {self.least}"
                return Finding("warning", self.what, self.found, fix, path=f"slurm.options.{option}")
        return Finding("warning", self.what, self.found, f"run `shoal up`, which sets {self.least}", host=controller)


def contract_violations(settings: Mapping[str, str]) -> list[ContractViolation]:
    """Settings of a slurm.conf, or of `scontrol show config`, that cost a job its work. Keys in lower case."""
    violations = []

    def add(key: str, what: str, value: str, least: str) -> None:
        violations.append(ContractViolation(key, what, value, least))

    wait = re.match(r"[0-9]+", settings.get("killwait", ""))  # `30` of a slurm.conf, or `30 sec` of scontrol
    if wait and int(wait[0]) < KILL_WAIT_S:
        what = "jobs have less time to save after SIGTERM than they count on"
        add("KillWait", what, f"{int(wait[0])} s", f"{KILL_WAIT_S}")
    if settings.get("jobrequeue", "1") != "1":
        add("JobRequeue", "a job that loses its node does not start again", settings["jobrequeue"], "1")
    if settings.get("preempttype", "").endswith("/none"):
        return violations  # no job is ever preempted
    modes = {mode for mode in settings.get("preemptmode", "REQUEUE").upper().split(",") if mode != "GANG"}
    if modes != {"REQUEUE"}:
        what = "a preempted job does not save its work and start again"
        add("PreemptMode", what, settings["preemptmode"], "REQUEUE")
    lists = (settings.get(key, "") for key in ("preemptparameters", "slurmctldparameters"))
    if {USER_SIGNAL, OLD_USER_SIGNAL}.isdisjoint(",".join(lists).lower().split(",")):
        what = "a preempted job is not warned by the signal it asked for"
        add("PreemptParameters", what, settings.get("preemptparameters", "") or "no such word", USER_SIGNAL)
    return violations


def partition_findings(partitions: Iterable[PartitionState]) -> list[Finding]:
    """Partitions of the running cluster whose jobs can be preempted and have too little time to save."""
    partitions = tuple(partitions)
    fix = f"say `grace: {GRACE_S}` or more, and run `shoal up`"
    what = "a preempted job has less time to save than it counts on"
    return [
        Finding("warning", what, f"{partition.grace} s", fix, path=f"partitions.{partition.name}")
        for partition in partitions
        if partition.grace < GRACE_S and partition.preempt_mode != "OFF" and _can_lose_nodes(partition, partitions)
    ]


def _can_lose_nodes(partition: PartitionState, others: Iterable[PartitionState]) -> bool:
    nodes = set(expand(partition.nodes))
    return any(other.priority > partition.priority and nodes & set(expand(other.nodes)) for other in others)
