"""The page `docs/doctor.md`, made from the table of faults."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.health.faults import (
    HOST_FAULTS,
    JOB_FAULTS,
    REGISTER,
    REJECTED_NODE,
    RELEASE,
    RESUME,
    UNEXPLAINED,
    UP,
    Fault,
)
from shoal.health.node_faults import FORGET, NODE_FAULTS
from shoal.health.reasons import REASONS, STATES

_INTRODUCTION = """\
<!-- Made from the table in src/shoal/health by `python -m shoal.health.docs > docs/doctor.md`. -->

# shoal doctor

```console
$ shoal doctor
$ shoal doctor --fix
```

`shoal doctor` asks Slurm and every host once, all at the same time, and changes nothing. It prints what is wrong, the
worst first: where, since when, the lines that show it, the cause, the fix, and what the fix costs. A host that hangs is
a finding, and does not delay the others: the command waits for it ten seconds, or twenty if it answers at first.

- `--node gpu[01-04]` checks some hosts; `--json` is for scripts. `--job 17` shows what concerns a job: its nodes, why
  it waits, and why it failed if it has ended.
- The exit code is 0 if nothing is wrong, 1 with errors or warnings, 3 if some hosts could not be checked.
- Ordinary users see what concerns their own jobs, without root: why a job waits, and what is wrong with its nodes.

## Fixes

`shoal doctor --fix` applies the fixes that Shoal can apply, checks again, and resumes nodes. `shoal doctor --fix ID`
applies the fix of one finding; name several, or add `--node`. It asks before a fix that costs more than nothing; use
`--yes` where there is no terminal. The controller keeps a record: `shoal doctor --history`.

- For a fix marked *if named*, Shoal cannot see whether the cause is gone: it applies it only if you name the finding.
- A node is resumed only if nothing else is wrong with its host, and its reason is still the one that was shown.
- A drain that a person set is never changed, and neither is its note. If slurmd replaces the note by a reason of its
  own, the finding shows the note, and a person must resume the node.

`shoal status` and `shoal jobs` show in one line what the doctor knows of a node or a job.

## On the nodes

A small program checks each node every five minutes: disks, shares, memory, links, and GPUs through the driver's own
library. It asks nobody and holds up no job. Slurm's HealthCheckProgram only reads its last result, in milliseconds; a
HealthCheckProgram of your own (`slurm.options`) runs right after it.

    health: drain                            # the default; or warn, or off
    health: {mode: warn, skip: [gpu-clock]}  # or in full

- With `drain`, a serious fault takes the node out of service: these have the level *error* below. The reason begins
  with `shoal: health:`, and the node is resumed when the check passes again. A new node only warns for its first day.
- A drain or a note of a person is never changed, and a node that a person resumes stays in service.
- Each node learns its own baseline: GPUs, NVLinks, PCIe lanes, speeds of links. What is worse than it was is a finding,
  on any model of GPU.
- When a node joins or has booted, and no job is there, each GPU is tested once, in seconds: it opens, half of its free
  memory holds two patterns, a copy comes back as it was, a product of matrices is right, and none of it is much slower
  than before. The test needs the driver alone. `health: {skip: [gpu-test]}` leaves it out.
- A job whose GPUs have no process, or take no more power than without one, for `idle_after` (1h) is a finding, and its
  log says so. If the driver calls them busy all the same, their kernels wait for each other, as in a training that
  hangs: that is shown after `hung_after` (30m). `health: {idle_gpus: cancel}` cancels such a job after `idle_after`.
- A training that uses `shoal.train` and makes no step for `hung_after` (30m) is a finding. `shoal doctor --job JOB`
  shows the step and the Python stack of each rank, and names the one that the others wait for. The stack comes from
  py-spy if it is installed, otherwise from faulthandler: `shoal.train` registers it for signal 50, which no framework
  uses; a script that handles that signal keeps its handler. From NCCL 2.24 on, the counters of its communicators are
  shown as well. You see this of your own jobs without root.
- `health: {hung_jobs: requeue}` queues such a job again without the node of the rank that is behind, and tells it so in
  its log. It does not if the ranks do not tell which one is behind, the job has `--no-requeue` or names the node, or
  the partition has too few other nodes. Without this line no job is touched.
"""
_ACTIONS = {
    UP: "`shoal up`",
    REGISTER: "`shoal up`, restart of slurmd, resume",
    RESUME: "resume",
    RELEASE: "release of the job",
    FORGET: "learn the baseline again",
    "": "by hand",
}


def doctor_markdown() -> str:
    """The page."""
    return "\n".join(
        [
            _INTRODUCTION,
            _section(
                "On hosts",
                "Found by a check of each host, and in the controller's record of ended jobs. Jobs that their users "
                "cancelled do not count there, nor those that ended when somebody rebooted a node or stopped slurmd.",
                HOST_FAULTS,
                "Shoal checks",
            ),
            _section(
                "On nodes, by the health program",
                "Found by the node itself, every five minutes.",
                NODE_FAULTS,
                "Shoal checks",
            ),
            _section(
                "Reasons of nodes",
                "Found in the reason that `sinfo -R` shows, in the words of Slurm 22.05, 24.11 and 26.05.",
                (*REASONS, *STATES),
                "Slurm's words",
            ),
            _section("Jobs", "Found in the reason that `squeue` shows.", JOB_FAULTS, "Slurm's words"),
        ]
    )


def _section(title: str, text: str, faults: Iterable[Fault], words: str) -> str:
    with_words = words == "Slurm's words"
    columns = ["finding", "level", "what", *([words] if with_words else []), "cause", "fix", "Shoal applies", "cost"]
    lines = [f"## {title}", "", text, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for fault in faults:
        cells = [f"`{fault.id}`", fault.level, fault.what, *([_words(fault)] if with_words else [])]
        cells += [fault.cause, _fix(fault), _action(fault), _cost(fault)]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _words(fault: Fault) -> str:
    others = {REJECTED_NODE.id: "another, and the state `inval`", UNEXPLAINED.id: "none"}
    return ", ".join(f"`{text}`" for text in fault.words) or others.get(fault.id, "anything else")


def _fix(fault: Fault) -> str:
    return fault.fix.replace("{host}", "gpu01")


def _action(fault: Fault) -> str:
    return _ACTIONS.get(fault.action, fault.action) + (", if named" if fault.explicit and fault.action else "")


def _cost(fault: Fault) -> str:
    return fault.cost.label if fault.action else ""


if __name__ == "__main__":
    print(doctor_markdown(), end="")
