"""Times a job from the command to its first training step: shoal run, srun, sbatch, torchrun in srun, and submitit."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness import BenchError, bench_parser, describe_machine, report, run_bench, show_progress
from sandbox import add_cluster_options
from testbed import HERE, PYTHONPATH, SHOAL, Testbed, create_testbed

RANKS = 4
BARE, BATCH, AGAIN = "srun", "sbatch", "shoal again"
USER_BATCH, USER_AGAIN = "user sbatch", "user again"
RANKS_TIMEOUT_S = 180
END_TIMEOUT_S = 120
FRAGILE_PEERS = ("torchrun", "submitit")
"""These are started once more where they fail."""
TARGETS = (
    ("shoal run", BATCH, 0.25),
    (AGAIN, BATCH, 0.10),
    ("user run", USER_BATCH, 0.25),
    (USER_AGAIN, USER_BATCH, 0.10),
    ("shoal run", "submitit", 0.0),
    (AGAIN, "submitit", 0.0),
)
"""How many seconds more than what a launcher may take to the script."""
MEASURING_ERROR_S = 0.05
"""How far two medians of the same command lie apart."""

# A usual batch script line, with the variables that torch needs.
TASK = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS MASTER_PORT=29500"
    ' MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1); exec python3 /shared/probe.py'
)
TORCHRUN = (
    "exec python3 -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID"
    ' --rdzv-endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500 /shared/probe.py'
)
ENVIRONMENT = f"PYTHONPATH={PYTHONPATH} OMP_NUM_THREADS=1"

MARKS = (
    ("start", ""),
    ("called", "Slurm's command is called"),
    ("accepted", "sbatch prints the job id"),
    ("allocated", "Slurm allocates the nodes"),
    ("batch", "the batch script starts"),
    ("task", "the tasks start"),
    ("interpreter", "Python starts"),
    ("script", "the script starts"),
    ("imported", "torch is imported"),
    ("met", "the rendezvous is complete"),
    ("stepped", "the first step is done"),
)
"""The events of a run, in this order. Not every launcher has all of them."""

Marks = dict[str, float]


@dataclass(frozen=True)
class Launcher:
    name: str
    command: Callable[[Testbed, str], list[str]]
    """The command line of a run, given the directory for its marks."""
    edit: bool = False
    """Whether the script changes before each run."""


def shoal(*options: str) -> Callable[[Testbed, str], list[str]]:
    def command(testbed: Testbed, marks: str) -> list[str]:
        variables = [f"--export=PYTHONPATH={PYTHONPATH}", f"--export=LAUNCH_MARKS={marks}"]
        return [str(SHOAL), "run", "--file", str(testbed.spec), "-N2", *options, *variables, "probe.py"]

    return command


def shoal_as_user(*options: str) -> Callable[[Testbed, str], list[str]]:
    """By somebody who has joined the cluster, and is not root there."""

    def command(testbed: Testbed, marks: str) -> list[str]:
        variables = [f"--export=PYTHONPATH={PYTHONPATH}", f"--export=LAUNCH_MARKS={marks}"]
        line = [str(SHOAL), "run", "--cluster", testbed.cluster, "-N2", *options, *variables, "probe.py"]
        return ["env", f"HOME={testbed.home}", *line]

    return command


def srun(tasks: int, task: str) -> Callable[[Testbed, str], list[str]]:
    def command(testbed: Testbed, marks: str) -> list[str]:
        options = f"-N2 --ntasks-per-node={tasks} --cpus-per-task={2 // tasks} --gpus-per-node=2"
        return testbed.ssh(f"{ENVIRONMENT} LAUNCH_MARKS={marks} srun {options} bash -c '{task}'")

    return command


def sbatch(testbed: Testbed, marks: str) -> list[str]:
    """The same as a batch job: the least that a job which can be requeued takes."""
    return testbed.ssh(_sbatch_command(testbed, marks))


def sbatch_as_user(testbed: Testbed, marks: str) -> list[str]:
    return testbed.ssh_as_user(_sbatch_command(testbed, marks))


def _sbatch_command(testbed: Testbed, marks: str) -> str:
    (testbed.shared / "job.sh").write_text(f"#!/bin/bash\nsrun bash -c '{TASK}'\n")
    options = "-N2 --ntasks-per-node=2 --cpus-per-task=1 --gpus-per-node=2 --output=/shared/logs/%j.out"
    return f"{ENVIRONMENT} LAUNCH_MARKS={marks} sbatch {options} /shared/job.sh"


def submitit(testbed: Testbed, marks: str) -> list[str]:
    environment = f"PYTHONPATH={PYTHONPATH}:/shared/submitit OMP_NUM_THREADS=1 LAUNCH_MARKS={marks}"
    return testbed.ssh(f"{environment} python3 /shared/submit.py /shared/logs /shared/probe.py")


LAUNCHERS = (
    Launcher(BARE, srun(2, TASK)),
    Launcher(BATCH, sbatch),
    Launcher("shoal run", shoal(), edit=True),
    Launcher(AGAIN, shoal()),
    Launcher(USER_BATCH, sbatch_as_user),
    Launcher("user run", shoal_as_user(), edit=True),
    Launcher(USER_AGAIN, shoal_as_user()),
    Launcher("torchrun", srun(1, TORCHRUN)),
    Launcher("shoal torchrun", shoal("--launcher", "torchrun")),
    Launcher("submitit", submitit),
)
REPEATED_LAUNCHERS = (AGAIN, USER_AGAIN, "shoal torchrun")
"""These run the code of others once more: the smallest size leaves them out."""


def main() -> None:
    options = _parse_arguments()
    scratch = Path(tempfile.mkdtemp(prefix="launch-"))
    os.environ["XDG_STATE_HOME"] = str(scratch / "state")
    if options.first:
        os.nice(-15)
    try:
        with create_testbed(scratch, options) as testbed:
            if options.first:
                testbed.prioritize()
            if options.small:
                (testbed.marks / "small").touch()
            heading = _heading(testbed, options)
            launchers = [one for one in LAUNCHERS if not options.small or one.name not in REPEATED_LAUNCHERS]
            rounds = _measure(testbed, launchers, options.rounds, warm_up=not options.small)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report("launch", options, f"{heading}\n\n{_table(rounds)}\n\n{_target(rounds)}\n")


def _measure(testbed: Testbed, launchers: list[Launcher], rounds: int, warm_up: bool) -> dict[str, list[Marks]]:
    """All launchers in turn, round after round; each round starts with another one."""
    runs: dict[str, list[Marks]] = {launcher.name: [] for launcher in launchers}
    for number in range(-1 if warm_up else 0, rounds):
        shift = number % len(launchers)
        for launcher in launchers[shift:] + launchers[:shift]:
            label = f"{number}-{launchers.index(launcher)}"
            try:
                marks = _launch(testbed, launcher, label)
            except BenchError as error:
                # submitit's ranks meet at a port that follows from the job's number, in use or not. torchrun's agents
                # sometimes wait for each other for ever after the last step.
                if launcher.name not in FRAGILE_PEERS:
                    raise
                show_progress(f"round {number + 1}: {error}\nonce more:")
                testbed.on_controller("scancel --user root")
                marks = _launch(testbed, launcher, f"{label}-again")
            if number >= 0:  # the first round is a warm-up
                runs[launcher.name].append(marks)
            show_progress(f"round {number + 1}: {launcher.name:<15} {marks['stepped'] - marks['start']:6.2f} s")
    return runs


def _launch(testbed: Testbed, launcher: Launcher, label: str) -> Marks:
    edited = f"# edited {label}\n" if launcher.edit else ""
    (testbed.tree / "probe.py").write_text((HERE / "probe.py").read_text() + edited)
    marks = testbed.marks / label
    marks.mkdir()
    marks.chmod(0o777)  # for the user, too
    for name in ("called", "accepted"):
        (testbed.marks / name).unlink(missing_ok=True)
    testbed.settle()
    start = time.time()
    line = launcher.command(testbed, f"/shared/marks/{label}")
    process = subprocess.Popen(line, cwd=testbed.tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        _wait_for_ranks(marks, process, launcher)
    finally:
        printed = _wait_for_end(process, launcher)
    if process.returncode != 0:
        raise BenchError(f"{launcher.name} failed with status {process.returncode}:\n{printed[-4000:]}")
    return {"start": start, **testbed.marks_of(label)}


def _wait_for_end(process: subprocess.Popen[str], launcher: Launcher) -> str:
    try:
        return process.communicate(timeout=END_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise BenchError(f"{launcher.name} did not end within {END_TIMEOUT_S} s of its first step") from None


def _wait_for_ranks(marks: Path, process: subprocess.Popen[str], launcher: Launcher) -> None:
    end = time.monotonic() + RANKS_TIMEOUT_S
    while len(list(marks.glob("rank-*.json"))) < RANKS:
        if process.poll() not in (None, 0) or time.monotonic() > end:
            process.kill()
            logs = sorted((marks.parents[1] / "logs").glob("*.[eo][ru]*"), key=lambda path: path.stat().st_mtime)
            printed = (process.communicate()[0] or "") + "".join(path.read_text(errors="replace") for path in logs[-4:])
            raise BenchError(f"{launcher.name}: its ranks did no step:\n{printed[-4000:]}")
        time.sleep(0.1)


def _table(rounds: dict[str, list[Marks]]) -> str:
    lines = [" " * 34 + "".join(f"{name:>16}" for name in rounds)]
    for mark, what in MARKS[1:]:
        cells = [_cell([after(run, mark) for run in runs if mark in run]) for runs in rounds.values()]
        lines.append(f"{what:<34}{''.join(cells)}")
    lines.append("")
    for what, time_of in SUMS.items():
        times = {name: [time_of(run) for run in runs] for name, runs in rounds.items()}
        lines.append(f"{what:<34}" + "".join(_cell(values) for values in times.values()))
        spread = (f"{min(values):.2f} to {max(values):.2f}" for values in times.values())
        lines.append(f"{'  range':<34}" + "".join(f"{text:>16}" for text in spread))
        for base in (BARE, BATCH):
            differences = (f"{difference(rounds, name, base, time_of):+.2f}" for name in rounds)
            lines.append(f"{f'  more than {base}':<34}" + "".join(f"{text:>16}" for text in differences))
        ratios = (f"{median(values) / median(times[BARE]):.2f}x" for values in times.values())
        lines.append(f"{'  / srun':<34}" + "".join(f"{text:>16}" for text in ratios))
    return "\n".join(lines)


def time_to_script(run: Marks) -> float:
    """The launcher alone. What follows is torch, which takes longer and varies more."""
    return run["script"] - run["start"] - scheduling_wait(run)


def time_to_step(run: Marks) -> float:
    return run["stepped"] - run["start"] - scheduling_wait(run)


def total_to_step(run: Marks) -> float:
    return run["stepped"] - run["start"]


def scheduling_wait(run: Marks) -> float:
    """slurmctld schedules batch jobs once a second, and srun at once; no launcher can change that."""
    return max(0.0, run["allocated"] - run["accepted"]) if "accepted" in run else 0.0


SUMS = {
    "command to first step": total_to_step,
    "the same without Slurm's wait": time_to_step,
    "to the script, without it": time_to_script,
}


def _cell(times: list[float]) -> str:
    return f"{median(times):>16.2f}" if times else f"{'-':>16}"


def after(run: Marks, mark: str) -> float:
    """Seconds since the event before it in this run."""
    names = [name for name, _ in MARKS if name in run]
    return run[mark] - run[names[names.index(mark) - 1]]


def difference(rounds: dict[str, list[Marks]], name: str, base: str, time_of: Callable[[Marks], float]) -> float:
    """The median of the differences between two runs of the same round, so that load affects both."""
    pairs = zip(rounds[name], rounds[base], strict=True)
    return median(time_of(run) - time_of(base_run) for run, base_run in pairs)


def _target(rounds: dict[str, list[Marks]]) -> str:
    lines = ["Targets: seconds to the script, without Slurm's wait, more than what they are compared with."]
    for name, base, limit in TARGETS:
        if name not in rounds:
            continue
        seconds = difference(rounds, name, base, time_to_script)
        met = "met   " if seconds <= limit else "MISSED"
        lines.append(f"  {met} {name}: {seconds:+.2f} s more than {base} (at most {limit:+.2f})")
    lines.append("Target: as an ordinary user, Shoal adds no more to sbatch than as root.")
    for as_root, as_user in (("shoal run", "user run"), (AGAIN, USER_AGAIN)):
        if as_user not in rounds:
            continue
        root_s = difference(rounds, as_root, BATCH, time_to_script)
        user_s = difference(rounds, as_user, USER_BATCH, time_to_script)
        met = "met   " if user_s <= root_s + MEASURING_ERROR_S else "MISSED"
        lines.append(f"  {met} {as_user}: {user_s:+.2f} s more than {USER_BATCH}; {as_root}: {root_s:+.2f} s")
    return "\n".join(lines)


def _heading(testbed: Testbed, options: argparse.Namespace) -> str:
    slurm = testbed.on_controller("scontrol --version").split()[-1]
    [installed] = (testbed.shared / "submitit").glob("submitit-*.dist-info")
    return (
        f"{describe_machine(options, f'Slurm {slurm}', installed.stem.replace('-', ' '))}\n"
        "Two nodes, two ranks each, gloo. All commands run on the operator's machine and reach the controller by SSH."
        " Python files\nare compiled before. Seconds since the event above, of the slowest rank;"
        f" medians of {options.rounds} rounds, in which the launchers took turns."
        + ("\nThe bench and its hosts had priority on this machine." if options.first else "")
    )


def _parse_arguments() -> argparse.Namespace:
    parser = bench_parser("launch", __doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--first", action="store_true", help="give the bench and its hosts priority on this machine")
    add_cluster_options(parser)
    options = parser.parse_args()
    if options.small:
        options.rounds = 1
    return options


if __name__ == "__main__":
    run_bench("launch", main)
