"""The settings of slurm.conf that let a job save its work before it is stopped, and checks of them.

The training library relies on these settings (`shoal.contract` has the numbers). The user may change any of them;
a finding then says what is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
    return list(_contract_violations(settings))


def _contract_violations(settings: Mapping[str, str]) -> Iterator[ContractViolation]:
    wait = _seconds(settings.get("killwait", ""))
    if wait is not None and wait < KILL_WAIT_S:
        yield ContractViolation(
            "KillWait", "jobs have less time to save after SIGTERM than they count on", f"{wait} s", f"{KILL_WAIT_S}"
        )
    if settings.get("jobrequeue", "1") != "1":
        yield ContractViolation(
            "JobRequeue", "a job that loses its node does not start again", settings["jobrequeue"], "1"
        )
    if settings.get("preempttype", "").endswith("/none"):
        return  # no job is ever preempted
    modes = {mode for mode in settings.get("preemptmode", "REQUEUE").upper().split(",") if mode != "GANG"}
    if modes != {"REQUEUE"}:
        found = settings["preemptmode"]
        yield ContractViolation(
            "PreemptMode", "a preempted job does not save its work and start again", found, "REQUEUE"
        )
    words = {*_parameters(settings, "preemptparameters"), *_parameters(settings, "slurmctldparameters")}
    if not {USER_SIGNAL, OLD_USER_SIGNAL} & words:
        found = settings.get("preemptparameters", "") or "no such word"
        yield ContractViolation(
            "PreemptParameters", "a preempted job is not warned by the signal it asked for", found, USER_SIGNAL
        )


def partition_findings(partitions: Iterable[PartitionState]) -> list[Finding]:
    """Partitions of the running cluster whose jobs can be preempted and have too little time to save."""
    partitions = tuple(partitions)
    findings = []
    for partition in partitions:
        if partition.preempt_mode == "OFF" or not _can_lose_nodes(partition, partitions):
            continue
        if partition.grace < GRACE_S:
            findings.append(
                Finding(
                    "warning",
                    "a preempted job has less time to save than it counts on",
                    f"{partition.grace} s",
                    f"say `grace: {GRACE_S}` or more, and run `shoal up`",
                    path=f"partitions.{partition.name}",
                )
            )
    return findings


def _can_lose_nodes(partition: PartitionState, others: Iterable[PartitionState]) -> bool:
    own = set(expand(partition.nodes))
    return any(other.priority > partition.priority and own & set(expand(other.nodes)) for other in others)


def _seconds(text: str) -> int | None:
    """Parse `30` of a slurm.conf, or `30 sec` of scontrol."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None


def _parameters(settings: Mapping[str, str], key: str) -> list[str]:
    return settings.get(key, "").lower().split(",")
