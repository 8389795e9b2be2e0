"""The faults that `shoal doctor` finds on hosts and in the queue. Those that Slurm names are in `reasons.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from shoal.plan.model import Cost
from shoal.spec.finding import Level

REGISTER, RESUME, RELEASE, UP = "register", "resume", "release", "up"
"""What Shoal can do: `shoal up`, slurmd's restart and a resume; a resume; a release of a held job; `shoal up`."""


@dataclass(frozen=True)
class Fault:
    """One thing that can be wrong. `{host}` in a text stands for where it is."""

    id: str
    level: Level
    what: str
    cause: str
    fix: str
    action: str = ""
    """What Shoal does about it: one of the words above, or `start SERVICE`. Empty: a person must."""
    cost: Cost = Cost.NOTHING
    """What the action costs at most. `shoal up` may have more to change than this fault."""
    words: tuple[str, ...] = ()
    """What Slurm writes as the reason of the node or the job; `*` stands for what varies."""
    log: str = ""
    """The lines in the logs of Slurm's daemons that show the cause, as a regular expression."""
    explicit: bool = False
    """Shoal cannot see if a person has removed the cause: it acts only if the finding is named."""

    def matches(self, reason: str) -> bool:
        return any(_pattern(text).search(reason) for text in self.words)

    def without(self, reason: str) -> str:
        """The reason without what Slurm writes for this fault."""
        for text in self.words:
            reason = _pattern(text).sub("", reason)
        return reason


@cache
def _pattern(words: str) -> re.Pattern[str]:
    """Some commands of Slurm write `_` for a blank."""
    pattern = ".*?".join(map(re.escape, words.removesuffix("*").split("*"))) + (r"\S+" if words.endswith("*") else "")
    return re.compile(pattern.replace(r"\ ", "[ _]"))


HOST_FAULTS = (
    Fault(
        "unreachable",
        "error",
        "the host could not be checked",
        "it is off, cut off, or hangs: its network answers, and its programs do not",
        "look at its console; `shoal ssh {host}` shows if it answers again",
    ),
    Fault(
        "not-joined",
        "info",
        "the host is not a node of Slurm yet",
        "the cluster's file names it, and no `shoal up` has finished on it",
        "wait for the `shoal up` that is running, or run it",
    ),
    Fault(
        "slurmctld-stopped",
        "error",
        "slurmctld does not run",
        "it failed, or a person stopped it: no job starts, and no command of Slurm works",
        "`shoal doctor --fix slurmctld-stopped` starts it; why it ended: `shoal ssh {host} journalctl -u slurmctld`",
        "start slurmctld",
        log=r"fatal|error",
    ),
    Fault(
        "slurmctld-silent",
        "error",
        "slurmctld runs and does not answer",
        "it is busy, or waits for its disk or its database",
        "read `shoal ssh {host} journalctl -u slurmctld`; `shoal up` starts it again",
    ),
    Fault(
        "munge-stopped",
        "error",
        "munge does not run or does not answer, and nothing of Slurm works on the host",
        "it failed or hangs, or a person stopped it",
        "`shoal doctor --fix munge-stopped` starts it; why it ended: `shoal ssh {host} journalctl -u munge`",
        "start munge",
    ),
    Fault(
        "munge-key",
        "error",
        "the host has another munge key than the controller",
        "the key was replaced on this host, or `shoal keys rotate munge` ended while the host was away",
        "`shoal doctor --fix munge-key` runs `shoal up`, which copies the key and restarts munge and slurmd",
        UP,
        Cost.RESTART,
        log=r"[Mm]unge|Protocol authentication",
    ),
    Fault(
        "slurmd-stopped",
        "error",
        "slurmd does not run",
        "it failed, or a person stopped it: running jobs go on, and the node takes no other",
        "`shoal doctor --fix slurmd-stopped` starts it; why it ended: `shoal ssh {host} journalctl -u slurmd`",
        "start slurmd",
        log=r"fatal|error",
    ),
    Fault(
        "disk-full",
        "error",
        "a file system is full",
        "logs, files of jobs, or core dumps",
        "free space: `du -xh MOUNT | sort -h | tail` on the host shows who has it",
    ),
    Fault(
        "inodes-full",
        "error",
        "a file system has no room for more files",
        "very many small files",
        "delete some: `du -x --inodes MOUNT | sort -n | tail` on the host shows where they are",
    ),
    Fault(
        "read-only",
        "error",
        "Slurm or its jobs cannot write to a directory",
        "the kernel made the file system read-only after an error of its disk, or it is mounted so",
        "read `journalctl -k` on the host; check the disk, then mount it for writing",
    ),
    Fault(
        "name-unresolved",
        "error",
        "the host does not know the names of other members",
        "/etc/hosts was edited, and there is no DNS for the names: jobs on several nodes do not find each other",
        "`shoal doctor --fix name-unresolved` runs `shoal up`, which writes the names",
        UP,
        Cost.RESTART,
    ),
    Fault(
        "user-missing",
        "error",
        "a user of the cluster is missing on the host, or has another number there",
        "the user was removed or changed on this host: the user's jobs fail there, with `Invalid user id`",
        "`shoal doctor --fix user-missing` runs `shoal up`, which creates users again; it changes no number",
        UP,
        Cost.RESTART,
    ),
    Fault(
        "clock",
        "error",
        "the clock of the host is wrong",
        "no time server answers it, or its clock was set by hand: from five minutes on munge rejects its messages "
        "(`Expired credential`, `Rewound credential`)",
        "`shoal doctor --fix clock` restarts chrony there, which sets the clock; if it stays wrong, read "
        "`shoal ssh {host} chronyc sources`; where it has no chrony, run `shoal up`",
        "start chronyd",
        explicit=True,
    ),
    Fault(
        "version-skew",
        "error",
        "slurmd is of a release that slurmctld does not work with",
        "its packages were upgraded, or the controller's were: slurmctld must be as new as every slurmd, and no more "
        "than two releases (from 24.11 on three) newer",
        "install the same release everywhere, the controller's first; or `slurm: {from: shoal}` in the cluster's file",
    ),
    Fault(
        "conf-differs",
        "warning",
        "slurmd has other files of Slurm's configuration than slurmctld",
        "it was cut off when slurmctld read new ones, or a person edited them: jobs may fail there in odd ways",
        "`shoal doctor --fix conf-differs` restarts slurmd, which fetches them again; if a person edited those of the "
        "controller, run `shoal up`",
        "start slurmd",
    ),
    Fault(
        "cgroups",
        "error",
        "slurmd cannot use the cgroups of its host",
        "the host is a container without cgroups of its own, or its kernel has another version of them than before",
        "run `shoal up`, which looks at the host again and writes what it can do; then `systemctl restart slurmd`",
    ),
    Fault(
        "node-differs",
        "warning",
        "the node differs from the others of its nodeset",
        "it was set up or upgraded apart from them: jobs work on one and fail on another",
        "`shoal up` copies the files that the cluster's file names; install the same packages, driver and kernel, or "
        "make it a nodeset of its own",
    ),
    Fault(
        "node-unreliable",
        "warning",
        "many more jobs fail on the node than on others",
        "a part of it fails now and then, or something on it differs from the other nodes",
        "compare it with a good node (`shoal exec -- COMMAND`), test its memory and GPUs; until then `shoal node drain "
        "{host}`",
    ),
)
"""What is found on the hosts, and sets no reason in Slurm."""

JOB_FAULTS = (
    Fault(
        "job-launch-failed",
        "error",
        "a node could not start the job, and Slurm holds it",
        "the prolog or slurmd failed on a node of the job",
        "solve the finding of the node; then `shoal doctor --fix job-launch-failed` releases the job",
        RELEASE,
        words=("launch failed requeued held",),
        explicit=True,
    ),
    Fault(
        "job-waits-for-node",
        "warning",
        "the job waits for a node that is out of service",
        "nodes that it needs are drained or down",
        "see the finding of the node; or submit the job for other nodes",
        words=("ReqNodeNotAvail", "Nodes required for job are DOWN"),
    ),
    Fault(
        "job-hung",
        "warning",
        "the job runs and makes no step",
        "a rank hangs, and the others wait for it: the evidence names it where the script uses `shoal.train`, or "
        "py-spy is installed on the nodes or in the job's environment; or the job waits for data or a save",
        "look at the rank that is behind; then `shoal cancel JOB`, or `scontrol requeue JOB` if it saves checkpoints",
    ),
    Fault(
        "job-failed",
        "error",
        "the job failed",
        "what its ranks printed, and how the first of them ended, says why",
        "`shoal logs JOB` shows all of it",
    ),
    Fault(
        "job-completing",
        "warning",
        "the job has ended and still holds its nodes",
        "its epilog hangs, or its processes cannot be ended: they wait for a share or a driver",
        "see the other findings of its nodes; `ps -ef` there shows the epilog or the processes",
    ),
)
"""What keeps a job from its nodes, by Slurm's reason for the job."""

UNEXPLAINED = Fault(
    "node-unexplained",
    "warning",
    "Slurm does not use the node, and gives no reason",
    "slurmd has not registered since slurmctld was started, or a person set the state without a reason",
    "wait a minute and run `shoal doctor` again; then read `shoal ssh {host} journalctl -u slurmd`",
)

REJECTED_NODE = Fault(
    "registration-rejected",
    "error",
    "Slurm rejects the registration of the node",
    "the host has less than slurm.conf says. Its reason is of an earlier time: from 23.02 on Slurm keeps it",
    "the line with INVAL in slurmctld's log says what it lacks; repair the host, or leave it so: `shoal doctor --fix "
    "registration-rejected` writes what it has (`shoal up`), restarts slurmd, and resumes the node",
    REGISTER,
    Cost.RESTART,
    explicit=True,
)

PERSON_DRAIN = Fault(
    "person-drain",
    "info",
    "a person took the node out of service",
    "the reason is not one that Slurm or Shoal writes; Shoal does not change it",
    "when that is solved: `shoal node resume {host}`",
)
