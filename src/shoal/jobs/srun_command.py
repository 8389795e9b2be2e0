"""The srun of `shoal run --now`, from a pure function: the job runs at once, in the foreground, and is never requeued.

Without a batch script every task sets its own variables. Nobody passes warnings on: before a time limit and at a
preemption the ranks get Slurm's own signals. Where the nodes have no directory in common, the code comes to each task
on its standard input.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from shoal import contract
from shoal.errors import UsageError
from shoal.jobs.launchers import LAUNCHERS, JobLauncher
from shoal.jobs.model import JobPaths, JobSpec, ResolvedJob, option_name
from shoal.jobs.script import (
    allocation_options,
    job_comment,
    job_variables,
    rank_variables,
    task_command,
    tasks_per_node,
)
from shoal.remote import program_text
from shoal.remote.runner.node import ECHO_JOB, ECHO_RANKS
from shoal.remote.runner.variables import FIRST_PORT, PORTS

_NO_STATUS = 999
"""A script that saved and wants to go on later ends with its own status: nobody would requeue the job."""
BATCH_OPTIONS = {
    "array": "an array is many jobs that wait in the queue",
    "dependency": "the job would wait for others",
    "requeue": "only a batch job can be requeued",
    "signal": "only a batch job passes its warning on",
    "output": "the output comes to your terminal, and `shoal logs` has it",
    "error": "the output comes to your terminal, and `shoal logs` has it",
}
"""Fields that a job without a batch script cannot have, and why."""


def require_no_batch_options(job: JobSpec) -> None:
    """Raise UsageError for an option that needs a batch script."""
    for name, why in BATCH_OPTIONS.items():
        if name in job.set_fields and getattr(job, name) not in (None, False):
            raise UsageError(f"--now cannot have {option_name(name)}: {why}", hint="leave out one of the two")
    if LAUNCHERS[job.launcher].mpirun:
        raise UsageError("--now cannot have --launcher mpirun: a batch script runs it", hint="use --launcher pmix")


def require_tasks_alone(job: ResolvedJob, shipped: JobPaths) -> None:
    """Raise UsageError for nodes that only a batch script prepares."""
    if job.containers:
        raise UsageError(
            "--now cannot use rented containers: they wait for the job's code",
            hint="leave out --now, or name other nodes with --nodelist or --partition",
        )
    if shipped.owner:
        raise UsageError(
            f"--now cannot use {shipped.root}: root is another user there on some nodes",
            hint="leave out --now, or use another --directory",
        )


def srun_command(job: ResolvedJob, shipped: JobPaths) -> list[str]:
    """The whole command. With `shipped.carried` it reads the code, as `receive` takes it, from its standard input."""
    launcher = LAUNCHERS[job.spec.launcher]
    options = [
        *allocation_options(job, launcher),
        f"--ntasks={job.nodes * tasks_per_node(job, launcher)}",
        job_comment(job, shipped),
        f"--chdir={shipped.root}",
        "--kill-on-bad-exit=1",
        f"--mpi={launcher.mpi}",
        *(word for option in job.sbatch for word in shlex.split(option)),
        *(() if shipped.carried else ("--input=none",)),
    ]
    return ["srun", *options, "bash", "-c", "\n".join(_task_lines(job, launcher, shipped))]


def _task_lines(job: ResolvedJob, launcher: JobLauncher, shipped: JobPaths) -> Iterator[str]:
    yield f'[ "$SLURM_PROCID" != 0 ] || echo "{ECHO_JOB}$SLURM_JOB_ID $SLURM_JOB_NODELIST"'
    if shipped.copies:
        yield f"if [ -x {contract.STAGE_PROGRAM} ]; then"
        yield '    echo "shoal: error: $SLURMD_NODENAME has copies of shares, which --now does not fill: leave it out"'
        yield "    exit 1"
        yield "fi"
    yield from job_variables(job, shipped)
    if shipped.carried:
        receive = shlex.join(["python3", "-I", "-S", "-B", "-c", program_text("job_directory"), "receive"])
        root = shlex.quote(shipped.code_root or shipped.root)
        yield f"{receive} {root} {shipped.code} {shipped.runtime} || exit 1"
    yield from rank_variables(job, shipped)
    # Those are a batch script's, which runs on the first node.
    own = {
        "MASTER_ADDR": "${address:-$first}",
        "MASTER_PORT": f"$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
    }
    yield 'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    yield f'address=,${contract.SHOAL_NODE_ADDRS} && address=${{address#*,"$first"=}} && address=${{address%%,*}}'
    yield from (f"export {name}={value}" for name, value in own.items() if name not in job.spec.export)
    yield f"export SHOAL_ECHO={ECHO_RANKS} SHOAL_EXIT_REQUEUE={_NO_STATUS}"
    yield f"exec {task_command(job, launcher, shipped)} < /dev/null"
