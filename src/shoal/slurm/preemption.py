"""The part of slurm.conf that lets a job save its work before it must go, and whether a cluster keeps to it.

The training library counts on these settings (`shoal.train.contract` has the numbers). A user may change any of them;
then it is said what is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shoal.hostlist import expand
from shoal.slurm.state import PartitionState
from shoal.slurm.versions import Version, known_to_all
from shoal.spec.finding import Finding
from shoal.train.contract import GRACE_SECONDS, KILL_WAIT

USER_SIGNAL = "send_user_signal"
"""A preempted job gets the signal of its --signal, and not SIGTERM. A word of PreemptParameters."""
USER_SIGNAL_BEFORE = "preempt_send_user_signal"
"""The same as a word of SlurmctldParameters, which releases before 23.02 want and later ones understand."""


def preemption_settings(versions: Iterable[Version]) -> dict[str, str]:
    """The settings. Preemption is on in every cluster: where no partition has a higher priority, it does nothing.

    proctrack/cgroup signals the processes that Slurm started and leaves the rest to them, which is what we want:
    SignalChildrenProcesses (cgroup.conf, since 23.11) would signal data workers too. proctrack/linuxproc always does.
    """
    settings = {
        "JobRequeue": "1",
        "KillWait": str(KILL_WAIT),
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
    }
    if known_to_all("preempt_parameters", versions):
        settings["PreemptParameters"] = USER_SIGNAL
    return settings


def slurmctld_words(versions: Iterable[Version]) -> list[str]:
    """What preemption needs in SlurmctldParameters: an older member cannot read the newer key."""
    return [] if known_to_all("preempt_parameters", versions) else [USER_SIGNAL_BEFORE]


@dataclass(frozen=True)
class Breach:
    """A setting that breaks the contract."""

    key: str
    what: str
    found: str
    least: str
    """What it should be."""

    def finding(self, options: Iterable[str], controller: str) -> Finding:
        """As a warning: at the option of the user's that says so, else at the controller."""
        for option in options:
            if option.lower() == self.key.lower():
                fix = f"delete it, or say {self.least}"
                return Finding("warning", self.what, self.found, fix, path=f"slurm.options.{option}")
        return Finding("warning", self.what, self.found, f"run `shoal up`, which sets {self.least}", host=controller)


def breaches(settings: Mapping[str, str]) -> list[Breach]:
    """What in a slurm.conf, or in the answer to `scontrol show config`, costs a job its work. Keys in lower case."""
    return list(_breaches(settings))


def _breaches(settings: Mapping[str, str]) -> Iterator[Breach]:
    wait = _seconds(settings.get("killwait", ""))
    if wait is not None and wait < KILL_WAIT:
        yield Breach(
            "KillWait", "jobs have less time to save after SIGTERM than they count on", f"{wait} s", f"{KILL_WAIT}"
        )
    if settings.get("jobrequeue", "1") != "1":
        yield Breach("JobRequeue", "a job that loses its node does not start again", settings["jobrequeue"], "1")
    if settings.get("preempttype", "").endswith("/none"):
        return  # no job is ever preempted
    modes = {mode for mode in settings.get("preemptmode", "REQUEUE").upper().split(",") if mode != "GANG"}
    if modes != {"REQUEUE"}:
        found = settings["preemptmode"]
        yield Breach("PreemptMode", "a preempted job does not save its work and start again", found, "REQUEUE")
    words = {*_words(settings, "preemptparameters"), *_words(settings, "slurmctldparameters")}
    if not {USER_SIGNAL, USER_SIGNAL_BEFORE} & words:
        found = settings.get("preemptparameters", "") or "no such word"
        yield Breach(
            "PreemptParameters", "a preempted job is not warned by the signal it asked for", found, USER_SIGNAL
        )


def partition_findings(partitions: Iterable[PartitionState]) -> list[Finding]:
    """Partitions of the running cluster whose jobs can be preempted and do not have the time that they count on."""
    known = tuple(partitions)
    findings = []
    for partition in known:
        if partition.preempt_mode == "OFF" or not _can_lose_nodes(partition, known):
            continue
        if partition.grace < GRACE_SECONDS:
            findings.append(
                Finding(
                    "warning",
                    "a preempted job has less time to save than it counts on",
                    f"{partition.grace} s",
                    f"say `grace: {GRACE_SECONDS}` or more, and run `shoal up`",
                    path=f"partitions.{partition.name}",
                )
            )
    return findings


def _can_lose_nodes(partition: PartitionState, others: Iterable[PartitionState]) -> bool:
    own = set(expand(partition.nodes))
    return any(other.priority > partition.priority and own & set(expand(other.nodes)) for other in others)


def _seconds(text: str) -> int | None:
    """`30` of a slurm.conf, `30 sec` of scontrol."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None


def _words(settings: Mapping[str, str], key: str) -> list[str]:
    return settings.get(key, "").lower().split(",")
