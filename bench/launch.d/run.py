"""From a command to the first training step: `shoal run`, bare srun, torchrun in srun, and submitit, as one table."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ground import BenchFailed, machine
from place import HERE, PYTHONPATH, ROOT, SHOAL, Place, cluster

RESULT = ROOT / "bench/results/launch.txt"
RANKS = 4
BARE, BATCH, AGAIN = "srun", "sbatch", "shoal again"
BOUND = 0.3
"""Seconds that `shoal run` may take more than bare srun."""

# What people write, with the variables that torch wants.
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
    ("begun", ""),
    ("called", "Slurm's command is called"),
    ("accepted", "sbatch has the job's number"),
    ("allocated", "Slurm gives it nodes"),
    ("batch", "its batch script starts"),
    ("task", "its tasks start"),
    ("interpreter", "Python starts"),
    ("script", "the script starts"),
    ("imported", "torch is imported"),
    ("met", "the ranks have met"),
    ("stepped", "the first step is done"),
)
"""What happens, in this order. Not every launcher has all of it."""

Marks = dict[str, float]


@dataclass(frozen=True)
class Launcher:
    name: str
    command: Callable[[Place, str], list[str]]
    """The command line of a run, by the directory that its marks go to."""
    edit: bool = False
    """The script has changed since the last time."""


def shoal(*options: str) -> Callable[[Place, str], list[str]]:
    def command(place: Place, marks: str) -> list[str]:
        variables = [f"--export=PYTHONPATH={PYTHONPATH}", f"--export=LAUNCH_MARKS={marks}"]
        return [str(SHOAL), "run", "--file", str(place.spec), "-N2", *options, *variables, "probe.py"]

    return command


def srun(tasks: int, task: str) -> Callable[[Place, str], list[str]]:
    def command(place: Place, marks: str) -> list[str]:
        options = f"-N2 --ntasks-per-node={tasks} --cpus-per-task={2 // tasks} --gpus-per-node=2"
        return place.ssh(f"{ENVIRONMENT} LAUNCH_MARKS={marks} srun {options} bash -c '{task}'")

    return command


def sbatch(place: Place, marks: str) -> list[str]:
    """The same as a batch job, as people write it: the least that a job costs which can be queued again."""
    (place.shared / "job.sh").write_text(f"#!/bin/bash\nsrun bash -c '{TASK}'\n")
    options = "-N2 --ntasks-per-node=2 --cpus-per-task=1 --gpus-per-node=2 --output=/shared/logs/%j.out"
    return place.ssh(f"{ENVIRONMENT} LAUNCH_MARKS={marks} sbatch {options} /shared/job.sh")


def submitit(place: Place, marks: str) -> list[str]:
    environment = f"PYTHONPATH={PYTHONPATH}:/shared/submitit OMP_NUM_THREADS=1 LAUNCH_MARKS={marks}"
    return place.ssh(f"{environment} python3 /shared/submit.py /shared/logs /shared/probe.py")


LAUNCHERS = (
    Launcher(BARE, srun(2, TASK)),
    Launcher(BATCH, sbatch),
    Launcher("shoal run", shoal(), edit=True),
    Launcher(AGAIN, shoal()),
    Launcher("torchrun", srun(1, TORCHRUN)),
    Launcher("shoal torchrun", shoal("--launcher", "torchrun")),
    Launcher("submitit", submitit),
)


def main() -> int:
    options = _arguments()
    signal.signal(signal.SIGTERM, _interrupt)
    scratch = Path(tempfile.mkdtemp(prefix="launch-"))
    os.environ["XDG_STATE_HOME"] = str(scratch / "state")
    if options.first:
        os.nice(-15)
    try:
        with cluster(scratch) as place:
            if options.first:
                place.put_first()
            heading = _heading(place, options)
            rounds = _measure(place, options.rounds)
    except BenchFailed as failure:
        print(f"bench/launch: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench/launch: interrupted; the hosts are removed", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    text = f"{heading}\n\n{_table(rounds)}\n\n{_target(rounds)}\n"
    print(text)
    options.output.write_text(text)
    return 0


def _measure(place: Place, rounds: int) -> dict[str, list[Marks]]:
    """All launchers in turn, round after round, each round beginning with another one."""
    found: dict[str, list[Marks]] = {launcher.name: [] for launcher in LAUNCHERS}
    for number in range(-1, rounds):
        shift = number % len(LAUNCHERS)
        for launcher in LAUNCHERS[shift:] + LAUNCHERS[:shift]:
            marks = _launch(place, launcher, f"{number}-{LAUNCHERS.index(launcher)}")
            if number >= 0:  # the first round brings everything into memory
                found[launcher.name].append(marks)
            _say(f"round {number + 1}: {launcher.name:<15} {marks['stepped'] - marks['begun']:6.2f} s")
    return found


def _launch(place: Place, launcher: Launcher, label: str) -> Marks:
    edited = f"# edited {label}\n" if launcher.edit else ""
    (place.tree / "probe.py").write_text((HERE / "probe.py").read_text() + edited)
    marks = place.marks / label
    marks.mkdir()
    for name in ("called", "accepted"):
        (place.marks / name).unlink(missing_ok=True)
    place.settle()
    begun = time.time()
    line = launcher.command(place, f"/shared/marks/{label}")
    process = subprocess.Popen(line, cwd=place.tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        _wait_for_ranks(marks, process, launcher)
    finally:
        printed, _ = process.communicate(timeout=120)
    if process.returncode != 0:
        raise BenchFailed(f"{launcher.name} ended with {process.returncode}:\n{printed[-4000:]}")
    return {"begun": begun, **place.marks_of(label)}


def _wait_for_ranks(marks: Path, process: subprocess.Popen[str], launcher: Launcher) -> None:
    end = time.monotonic() + 180
    while len(list(marks.glob("rank-*.json"))) < RANKS:
        if process.poll() not in (None, 0) or time.monotonic() > end:
            process.kill()
            raise BenchFailed(f"{launcher.name}: its ranks made no step:\n{(process.communicate()[0] or '')[-4000:]}")
        time.sleep(0.1)


def _table(rounds: dict[str, list[Marks]]) -> str:
    lines = [" " * 34 + "".join(f"{name:>16}" for name in rounds)]
    for mark, what in MARKS[1:]:
        cells = [_cell([after(run, mark) for run in runs if mark in run]) for runs in rounds.values()]
        lines.append(f"{what:<34}{''.join(cells)}")
    lines.append("")
    for what, time_of in SUMS.items():
        times = {name: [time_of(run) for run in runs] for name, runs in rounds.items()}
        lines.append(f"{what:<34}" + "".join(_cell(found) for found in times.values()))
        spread = (f"{min(found):.2f} to {max(found):.2f}" for found in times.values())
        lines.append(f"{'  least to most':<34}" + "".join(f"{text:>16}" for text in spread))
        for than in (BARE, BATCH):
            differences = (f"{more(rounds, name, than, time_of):+.2f}" for name in rounds)
            lines.append(f"{f'  more than {than}':<34}" + "".join(f"{text:>16}" for text in differences))
        ratios = (f"{median(found) / median(times[BARE]):.2f}x" for found in times.values())
        lines.append(f"{'  / srun':<34}" + "".join(f"{text:>16}" for text in ratios))
    return "\n".join(lines)


def to_the_script(run: Marks) -> float:
    """What the launcher does. After it comes torch, which takes longer and differs more from run to run."""
    return run["script"] - run["begun"] - wait_for_slurm(run)


def command_to_script(run: Marks) -> float:
    return run["script"] - run["begun"]


def to_the_step(run: Marks) -> float:
    return run["stepped"] - run["begun"] - wait_for_slurm(run)


def total(run: Marks) -> float:
    return run["stepped"] - run["begun"]


def wait_for_slurm(run: Marks) -> float:
    """slurmctld looks at batch jobs once a second, and serves srun at once: nothing that a launcher can change."""
    return max(0.0, run["allocated"] - run["accepted"]) if "accepted" in run else 0.0


SUMS = {
    "command to first step": total,
    "the same without Slurm's wait": to_the_step,
    "to the script, without it": to_the_script,
}


def _cell(times: list[float]) -> str:
    return f"{median(times):>16.2f}" if times else f"{'-':>16}"


def after(run: Marks, mark: str) -> float:
    """Seconds since what came before it in this run."""
    known = [name for name, _ in MARKS if name in run]
    return run[mark] - run[known[known.index(mark) - 1]]


def more(rounds: dict[str, list[Marks]], name: str, than: str, time_of: Callable[[Marks], float]) -> float:
    """The median of the differences, each of two runs of one round: the machine's moods cancel out."""
    pairs = zip(rounds[name], rounds[than], strict=True)
    return median(time_of(one) - time_of(other) for one, other in pairs)


def _target(rounds: dict[str, list[Marks]]) -> str:
    lines = [f"Target: at most {BOUND} s more than srun."]
    for name in ("shoal run", AGAIN):
        for what, time_of in SUMS.items():
            found = more(rounds, name, BARE, time_of)
            met = "met   " if found <= BOUND else "MISSED"
            lines.append(f"  {met} {name}, {what}: {found:+.2f} s")
        whole = more(rounds, name, BARE, command_to_script)
        waited = median(map(wait_for_slurm, rounds[name]))
        batch = more(rounds, BATCH, BARE, to_the_script)
        own = more(rounds, name, BATCH, to_the_script)
        lines.append(
            f"  Of the {whole:+.2f} s up to the script, Slurm's wait is {waited:.2f} s, a batch job instead of srun"
            f" {batch:+.2f} s (as sbatch has it), and Shoal's own {own:+.2f} s (more than sbatch)."
        )
    return "\n".join(lines)


def _heading(place: Place, options: argparse.Namespace) -> str:
    slurm = place.on_controller("scontrol --version").split()[-1]
    [installed] = (place.shared / "submitit").glob("submitit-*.dist-info")
    return (
        f"{machine(f'Slurm {slurm}', installed.stem.replace('-', ' '))}\n"
        "Two nodes, two ranks each, gloo. All are called on the operator's machine, and reach the controller by SSH."
        " Python's files are\ncompiled before. Seconds after what stands above, of the last rank to get there;"
        f" medians of {options.rounds} rounds, in which the launchers took turns."
        + ("\nThe bench and its hosts went before all else that this machine did meanwhile." if options.first else "")
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/launch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--first", action="store_true", help="before all else that this machine does meanwhile")
    return parser.parse_args()


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
