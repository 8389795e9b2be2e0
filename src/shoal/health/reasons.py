"""The reasons that Slurm gives for nodes, and what is behind each; with them, the table of all faults.

Reasons are searched for, never compared: Slurm joins several with ", " and " : ", and releases add to them. The texts
are those of 22.05, 24.11 and 26.05.
"""

from __future__ import annotations

import re

from shoal.health.faults import (
    HOST_FAULTS,
    JOB_FAULTS,
    PERSON_DRAIN,
    REGISTER,
    REJECTED_NODE,
    RESUME,
    UNEXPLAINED,
    UP,
    Fault,
)
from shoal.health.node_faults import NODE_FAULTS
from shoal.plan.model import Cost
from shoal.plan.nodes import LEAVING_REASON
from shoal.remote.node_health.node import PREFIX
from shoal.spec.finding import Level

_REGISTER = (
    "repair the host, or leave it so: `shoal doctor --fix {id}` writes what it has (`shoal up`), restarts slurmd, and "
    "resumes the node"
)


def _registration(id: str, what: str, cause: str, words: tuple[str, ...], fix: str = _REGISTER) -> Fault:
    """A node whose registration Slurm rejects: it has the state INVALID_REG and is drained."""
    return Fault(id, "error", what, cause, fix.replace("{id}", id), REGISTER, Cost.RESTART, words, explicit=True)


def _drained(
    id: str, what: str, cause: str, words: tuple[str, ...], fix: str, log: str = "", *, explicit: bool = True
) -> Fault:
    """A node that Slurm drained, and never resumes by itself."""
    then = f"; then `shoal doctor --fix {id}` resumes the node"
    return Fault(id, "error", what, cause, fix + then, RESUME, words=words, log=log, explicit=explicit)


def _unresumed(id: str, level: Level, what: str, cause: str, words: tuple[str, ...], fix: str) -> Fault:
    """A reason that Slurm or Shoal removes by itself, or that needs more than a resume."""
    return Fault(id, level, what, cause, fix, words=words)


_SCRIPT_LOG = r"[Pp]rolog|[Ee]pilog"
_SCRIPT_FIX = "read the lines above, correct the script (`files:` in the cluster's file), and run `shoal up`"

REASONS = (
    _registration(
        "low-memory",
        "the host has less memory than slurm.conf says",
        "a memory module failed, the virtual machine was resized, or the kernel or huge pages keep memory back",
        ("Low RealMemory (reported:*)", "Low RealMemory"),
    ),
    _registration(
        "low-cores",
        "the host has fewer sockets, cores or threads than slurm.conf says",
        "hyper-threading or cores were switched off in the firmware, or the virtual machine was resized",
        ("Low socket*core*thread count",),
    ),
    _registration(
        "low-cpus",
        "the host has fewer CPUs than slurm.conf says",
        "CPUs were switched off in the firmware, or the virtual machine was resized",
        ("Low CPUs",),
    ),
    _registration(
        "low-tmpdisk",
        "the host has less temporary disk than slurm.conf says",
        "a disk is not mounted",
        ("Low TmpDisk",),
    ),
    _registration(
        "gpu-missing",
        "the host has fewer GPUs than slurm.conf says",
        "a GPU fell off the bus, its driver is not loaded, or its device file is missing",
        ("gres/gpu count reported lower than configured (*)", "gres/gpu count too low (*)"),
    ),
    _registration(
        "gpu-type-missing",
        "a GPU of one type is missing",
        "one card of the host is gone, or a new driver gives it another name",
        ("gres/gpu:* count too low (*)",),
    ),
    _registration(
        "gpu-type-unknown",
        "the host has a GPU of a type that slurm.conf does not have",
        "a card was replaced by another model",
        ("gres/gpu type (*) reported but not configured",),
    ),
    _registration(
        "gpu-changed-under-jobs",
        "GPUs changed while jobs use them",
        "a GPU failed, or the configuration of GPUs changed, while jobs held them",
        ("gres/* count changed and jobs are using them (*)", "gres/* type changed and jobs are using them"),
        "wait for the jobs on the node, or cancel them; then `shoal doctor --fix {id}` restarts slurmd and resumes it",
    ),
    _registration(
        "gres-unreadable",
        "slurmctld cannot read what the node reports of its GPUs",
        "slurmd is too many releases older or newer than slurmctld",
        ("Could not unpack gres data",),
    ),
    _registration(
        "restricted-cores",
        "cores cannot be reserved for the GPUs of the node",
        "RestrictedCoresPerGPU asks for more than the node has",
        (
            "RestrictedCoresPerGPU=* but no gpus on node *",
            "RestrictedCoresPerGPU=* but the gpus given don't have any topology on node *",
            "RestrictedCoresPerGPU: We can't restrict * doesn't have access to that many unique cores (*).",
        ),
        "delete the option; then `shoal doctor --fix {id}` restarts slurmd and resumes the node",
    ),
    _registration(
        "core-specialization",
        "slurmd and slurmctld reserve different cores for the system",
        "slurmd has read another slurm.conf",
        ("CoreSpec differ",),
    ),
    _registration(
        "features",
        "the active features of the node are not those that Slurm has",
        "a node features plugin changed them",
        ("Reported active features (*) are not a superset of currently active changeable features (*)",),
    ),
    _registration(
        "dynamic-node",
        "slurmctld rejects what slurmd says of its node",
        "the option --conf of slurmd, or the topology in it, is wrong",
        ("Failed to parse dynamic_conf nodeline", "Failed to set topology '*'"),
    ),
    _drained(
        "prolog-error",
        "the prolog failed on the node",
        "the program that Prolog names ended with an error, or the environment of the job could not be read. Slurm "
        "requeues the job and holds it",
        ("Prolog error", "Job env setup error"),
        _SCRIPT_FIX,
        _SCRIPT_LOG,
    ),
    _drained(
        "prolog-epilog-failure",
        "slurmd reported a failure of the prolog or the epilog",
        "the program that Prolog or Epilog names ended with an error when a job was started",
        ("Prolog/Epilog failure",),
        _SCRIPT_FIX,
        _SCRIPT_LOG,
    ),
    _drained(
        "epilog-error",
        "the epilog failed on the node",
        "the program that Epilog names ended with an error",
        ("Epilog error",),
        _SCRIPT_FIX,
        _SCRIPT_LOG,
    ),
    _drained(
        "kill-task-failed",
        "processes of a job did not end",
        "they wait in the kernel: for a share whose server is away, a GPU's driver, or FUSE. Slurm gives up after "
        "UnkillableStepTimeout",
        ("Kill task failed (JobId=* StepId=*)", "Kill task failed"),
        "wait until they are gone, or reboot the host",
        r"UNKILLABLE|[Kk]ill task|not ending",
        explicit=False,
    ),
    _drained(
        "step-not-running",
        "a job step was gone before it ran",
        "slurmstepd ended unexpectedly",
        ("Job step not running (JobId=* StepId=*)", "Job step not running"),
        "read slurmd's log",
        r"stepd|step ",
        explicit=False,
    ),
    _drained(
        "spool-full",
        "slurmd's spool directory was full",
        "the file system of /var/lib/slurm/slurmd has no space left",
        ("SlurmdSpoolDir is full",),
        "free space on it",
        r"No space left|ENOSPC|[Ss]pool",
        explicit=False,
    ),
    _drained(
        "batch-complete-failure",
        "the node could not end a batch job properly",
        "slurmd could not start the script, or write its files; slurmctld's log has the error before the drain",
        ("batch job complete failure",),
        "read the lines above and solve that",
        r"Batch|batch|_slurm_rpc_complete_batch",
    ),
    _drained(
        "duplicate-job",
        "the node still runs a job of the same number",
        "slurmctld lost its state, and gave out a number again whose processes are still on the node",
        ("Duplicate jobid",),
        "end the old slurmstepd on the host, and run `systemctl restart slurmd` there",
        r"[Dd]uplicate",
    ),
    Fault(
        "no-address",
        "error",
        "slurmctld found no address for the node",
        "its name did not resolve when slurmctld started. The node has the state FUTURE, which sinfo does not show",
        "`shoal doctor --fix no-address` runs `shoal up`, which writes the names and starts slurmctld again",
        UP,
        Cost.RESTART,
        ("NO NETWORK ADDRESS FOUND",),
    ),
    _unresumed(
        "not-responding",
        "error",
        "slurmd on the node does not answer",
        "the host is off, cut off or asleep, or slurmd does not run",
        ("Not responding",),
        "start the host, or see its other findings. It takes jobs again within half a minute of its return",
    ),
    _drained(
        "unexpected-reboot",
        "the host rebooted on its own",
        "power loss, a kernel panic, or a person who rebooted it; Slurm says so only without ReturnToService=2",
        ("Node unexpectedly rebooted",),
        "read `journalctl -b -1` on the host",
    ),
    _unresumed(
        "resume-timeout",
        "warning",
        "a rented machine did not become a node in time",
        "it did not boot, or did not join",
        ("ResumeTimeout reached",),
        "`shoal status` shows the provider's error; Slurm starts the node again when a job needs it",
    ),
    _unresumed(
        "reboot",
        "info",
        "the node waits for a reboot, or reboots",
        "a person ran `scontrol reboot`",
        ("Reboot ASAP", "reboot requested", "reboot issued", "reboot complete"),
        "wait; with nextstate=RESUME Slurm resumes the node itself",
    ),
    _drained(
        "reboot-timeout",
        "the host did not return from its reboot in time",
        "it hangs, or boots longer than ResumeTimeout",
        ("reboot timed out",),
        "look at its console, or switch it off and on",
    ),
    _drained(
        "bad-core-count",
        "slurmctld's map of the node's cores is wrong",
        "members have different slurm.conf files",
        ("Bad core count",),
        "run `shoal up`",
    ),
    _drained(
        "switch-plugin",
        "the switch plugin could not clean up after a job",
        "a failure of the network's own plugin",
        ("switch_g_job_postfini failed",),
        "read slurmd's log",
        r"switch",
    ),
    _drained(
        "feature-not-set",
        "slurmd could not set a feature of the node",
        "the node features plugin failed",
        ("Failed to set node feature(s): '*'",),
        "read slurmd's log",
        r"feature",
    ),
    _unresumed(
        "leaving",
        "info",
        "the node is about to leave the cluster",
        "`shoal up` drained it, because the file no longer names it",
        (LEAVING_REASON,),
        "run `shoal up` again when its jobs have ended; if the file names it again, that resumes it",
    ),
    _unresumed(
        "health-drain",
        "error",
        "the health program of the node took it out of service",
        "a check that the reason names failed (`health: drain` in the cluster's file)",
        (f"{PREFIX}*",),
        "see the other findings of the host; when the check passes again, the node is resumed within ten minutes",
    ),
)
"""What Slurm and Shoal write as the reason of a node."""

STATES = (REJECTED_NODE, UNEXPLAINED, PERSON_DRAIN)
"""What the state of a node says that no reason explains."""
FAULTS = {fault.id: fault for fault in (*HOST_FAULTS, *NODE_FAULTS, *REASONS, *STATES, *JOB_FAULTS)}

LEVELS = ("error", "warning", "info")
_SEPARATORS = re.compile(r"[\s,:]+")


def faults_in(reason: str) -> list[Fault]:
    """The faults that the reason of a node names, worst first."""
    faults = [fault for fault in REASONS if fault.matches(reason)]
    if len(faults) > 1:  # Slurm appends what became of a reboot: `reboot issued : reboot timed out`
        faults = [fault for fault in faults if fault.id != "reboot"]
    return sorted(faults, key=lambda fault: LEVELS.index(fault.level))


def is_written_by_person(reason: str) -> bool:
    """Whether the reason has words beside those of Slurm and Shoal. Its uid does not tell: root is slurmd, too."""
    if reason.startswith("shoal: "):
        return False
    for fault in REASONS:
        reason = fault.without(reason)
    return bool(_SEPARATORS.sub("", reason))
