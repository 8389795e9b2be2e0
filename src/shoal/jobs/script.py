"""The batch script of a job, from a pure function: `shoal run --dry-run` prints the very text that sbatch gets."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from shoal import contract
from shoal.hostlist import compress, expand, fold
from shoal.jobs.delivery import owner_lines, receive_lines
from shoal.jobs.launchers import LAUNCHERS, MPIRUN, JobLauncher, LaunchParameters, ShellText
from shoal.jobs.model import JobPaths, ResolvedJob
from shoal.jobs.record import JobComment
from shoal.jobs.staging import wait_for_files_lines
from shoal.remote.runner.node import SUBMISSION, WARNING_SIGNALS
from shoal.remote.runner.variables import FIRST_PORT, IMAGE, PORTS

NEXT_PORT = 7919
"""A port for rendezvous that somebody has is passed over by far, for the one after it is the next job's. Until the job
listens there another program may take it, which concerns torchrun and scripts that use MASTER_PORT themselves:
`shoal.train` agrees on a port that is free."""

_NOTHING_RAN = """
# srun may leave with 0 although it could not start a single rank. A rank that has ended left word of it.
[ "$status" != 0 ] || compgen -G "$SHOAL_JOB_DIR/rank-*.${SLURM_RESTART_COUNT:-0}.end" > /dev/null || status=1
"""


_OVER_A_VPN = r"""
# Over WireGuard or Tailscale: its interface, no InfiniBand, and more than the one socket that NCCL opens by itself.
# Open MPI and UCX would also try a bridge like docker0, which has the same address on every host.
SHOAL_VPN=$(ip -o address show to "$MASTER_ADDR" 2> /dev/null | sed -n 's/^[0-9]*: \(shoal0\|tailscale0\) .*/\1/p')
if [ -n "$SHOAL_VPN" ]; then
    export NCCL_SOCKET_IFNAME="=$SHOAL_VPN" GLOO_SOCKET_IFNAME=$SHOAL_VPN TP_SOCKET_IFNAME=$SHOAL_VPN
    export NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4
    export OMPI_MCA_btl_tcp_if_include=$SHOAL_VPN OMPI_MCA_oob_tcp_if_include=$SHOAL_VPN
    export PRTE_MCA_oob_tcp_if_include=$SHOAL_VPN UCX_NET_DEVICES=$SHOAL_VPN
    export OMPI_MCA_pml=ob1 OMPI_MCA_btl=^openib,ofi,uct OMPI_MCA_osc=^ucx
fi
# What `shoal bench links` measured here says better how many sockets fill a link.
if [ -r /etc/shoal/nccl.env ]; then
    set -a && . /etc/shoal/nccl.env && set +a
fi
""".strip().splitlines()


_ONE_A_NODE = "--mpi=none --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 --cpus-per-task=1"

_REQUIRE_MPIRUN = rf"""
missing=$(srun {_ONE_A_NODE} \
    sh -c 'mpirun --version 2> /dev/null | grep -q "Open MPI" || echo "$SLURMD_NODENAME"' | sort | paste -sd, -)
if [ -n "$missing" ]; then
    echo "shoal: no mpirun of Open MPI on $missing" >&2
    exit 127
fi
export SLURM_MPI_TYPE=none  # its daemons, one on each other node, are no MPI programs
""".strip().splitlines()


_WAIT = r"""
while warned=; wait "$ranks"; status=$?; [ "$warned" ]; do :; done  # a warning ends the wait, not the ranks
""".strip().splitlines()


def sbatch_script(job: ResolvedJob, shipped: JobPaths) -> str:
    """The whole text. Every value of the user's is checked, or quoted for the shell."""
    launcher = LAUNCHERS[job.spec.launcher]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job, launcher, shipped)), ""]
    lines += [*_warnings(job.spec.signal), *job_variables(job, shipped)]
    if shipped.staged:
        lines += wait_for_files_lines(shlex.quote(shipped.root))
    if shipped.owner:
        lines += owner_lines(shipped.owner)
    if shipped.carried:
        lines += receive_lines(shipped, job.nodes)
    lines += rank_variables(job, shipped)
    lines += ["", *_copies("in", shipped), *_launch(job, launcher, shipped)]
    lines += [*_watch(job, launcher, shipped), *_copies("out", shipped)]
    return "\n".join(lines) + "\n" + _NOTHING_RAN + _requeue_tail(job.spec.requeue)


def _requeue_tail(requeue: bool) -> str:
    back = '    scontrol requeue "$SLURM_JOB_ID" && sleep 60 && exit 0  # into the queue, under its own id\n'
    return f"""
# A rank that was stopped and saved its work left a note: there is more to do. So did who missed ranks.
if [ -e "$SHOAL_JOB_DIR/requeue.${{SLURM_RESTART_COUNT:-0}}" ]; then
{back if requeue else ""}    status={contract.EXIT_REQUEUE}
elif [ -e "$SHOAL_JOB_DIR/lost.${{SLURM_RESTART_COUNT:-0}}" ]; then
{back if requeue else ""}    status=1
fi
exit "$status"
"""


def _options(job: ResolvedJob, launcher: JobLauncher, shipped: JobPaths) -> Iterator[str]:
    spec = job.spec
    yield from allocation_options(job, launcher)
    yield "--requeue" if spec.requeue else "--no-requeue"
    # Without `B:` Slurm would send it to every process of the ranks, and it ends those that do not handle it.
    yield f"--signal=B:{spec.signal}"
    yield job_comment(job, shipped)
    yield "--open-mode=append"
    yield f"--chdir={shipped.root}"
    yield f"--output={spec.output or shipped.root + '/' + ('%A_%a' if spec.array else '%j') + '.out'}"
    if spec.error:
        yield f"--error={spec.error}"
    yield from job.sbatch


def allocation_options(job: ResolvedJob, launcher: JobLauncher) -> Iterator[str]:
    """What the job needs, as sbatch and srun spell it."""
    spec = job.spec
    yield f"--job-name={spec.name}"
    yield f"--partition={job.partition}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={tasks_per_node(job, launcher)}"
    yield f"--cpus-per-task={_cpus_per_task(job, launcher)}"
    if job.gpus_per_node:
        # Of the node, not of the task: every rank sees all GPUs of its job, as peers need each other's memory, and
        # takes that of its LOCAL_RANK. `--gpu-bind=none` says so too, but it unsets CUDA_VISIBLE_DEVICES: where no
        # cgroup hides them, a job would see its neighbour's GPUs.
        yield f"--gpus-per-node={job.gpu_type + ':' if job.gpu_type else ''}{job.gpus_per_node}"
    for name in ("mem", "time", "constraint", "account", "qos", "array", "dependency", "nodelist", "switches"):
        value = getattr(spec, name)
        if value is not None:
            # Slurm 22.05 does not read every hostlist that we do.
            yield f"--{name}={fold(expand(value)) if name == 'nodelist' else value}"
    if job.exclude:
        yield f"--exclude={compress(job.exclude)}"
    if spec.exclusive:
        yield "--exclusive"


def tasks_per_node(job: ResolvedJob, launcher: JobLauncher) -> int:
    return job.ranks_per_node if launcher.one_task_a_rank else 1


def job_comment(job: ResolvedJob, shipped: JobPaths) -> str:
    """The option that notes the job's code with the job."""
    uses = shipped.environment.rpartition("/")[2]
    return f"--comment={JobComment(shipped.code, shipped.runtime, job.spec.profile or '', uses)}"


def _warnings(signal: str) -> Iterator[str]:
    """Take warnings: --signal and preemption send the one of the job, a rental service that releases a node USR1."""
    names = dict.fromkeys((*(number.name.removeprefix("SIG") for number in WARNING_SIGNALS), signal.partition("@")[0]))
    yield "# A warning reaches only this shell. The ranks read it from their standard input, and pass it to those"
    yield "# processes of the script that handle it: it would end all others."
    yield f"exec {{{contract.WARNINGS_VARIABLE}}}<> <(:)  # a pipe"
    yield f"for name in {' '.join(names)}; do"
    yield f'    trap "warned=1; echo $name >&${contract.WARNINGS_VARIABLE}" "$name"'
    yield "done"


def job_variables(job: ResolvedJob, shipped: JobPaths) -> Iterator[str]:
    """Which job it is, and where its files are."""
    root, spec = shlex.quote(shipped.root), job.spec
    yield "SHOAL_JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
    yield "export SHOAL_JOB=${SHOAL_JOB:-$SLURM_JOB_ID}"
    yield f"export {contract.SHOAL_JOB_DIR}={root}/$SHOAL_JOB"
    yield f"[ -e {root}/.shared ] && export {contract.SHOAL_STORE_DIR}=${contract.SHOAL_JOB_DIR}"
    # A cluster that is built again counts its jobs from 1 again; what `shoal run` hands to sbatch tells them apart.
    yield f"export {contract.SHOAL_RUN_ID}={shlex.quote(shipped.cluster)}-$SHOAL_JOB${{{SUBMISSION}:+-${SUBMISSION}}}"
    yield f"export {contract.SHOAL_GRACE_SECONDS}={spec.grace}"


def rank_variables(job: ResolvedJob, shipped: JobPaths) -> Iterator[str]:
    """What its ranks find in their environment."""
    code_path, spec = _code_path(shipped), job.spec
    yield f"export SHOAL_CODE={code_path}/code/{shipped.code}.tar {contract.SHOAL_CODE_HASH}={shipped.code}"
    if shipped.own_tree:
        yield f"export SHOAL_TREE_DIR={code_path}/$SHOAL_JOB"
    yield f"export SHOAL_WORKDIR={shlex.quote(shipped.workdir)} SHOAL_EXIT_REQUEUE={contract.EXIT_REQUEUE}"
    yield f"export SHOAL_ECHO={int(spec.output is not None)}"
    yield f'export {contract.SHOAL_NODE_ADDRS}=$(scontrol -o show node "$SLURM_JOB_NODELIST" |'
    yield "    sed -n 's/^NodeName=\\([^ ]*\\) .* NodeAddr=\\([^ ]*\\) .*/\\1=\\2/p' | paste -sd, -)"
    yield f"MASTER_ADDR=,${contract.SHOAL_NODE_ADDRS}"
    yield 'MASTER_ADDR=${MASTER_ADDR#*,"$SLURMD_NODENAME"=}'
    yield "MASTER_ADDR=${MASTER_ADDR%%,*}"
    yield "export MASTER_ADDR=${MASTER_ADDR:-$SLURMD_NODENAME}"
    yield f"export MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"
    yield "while (: < /dev/tcp/127.0.0.1/$MASTER_PORT) 2> /dev/null; do"
    yield f"    MASTER_PORT=$(({FIRST_PORT} + (MASTER_PORT - {FIRST_PORT} + {NEXT_PORT}) % {PORTS}))"
    yield "done"
    if job.nodes > 1:
        yield from _OVER_A_VPN
    if spec.profile:
        yield f"export {contract.SHOAL_PROFILE}={spec.profile}"
    if spec.tracking_uri:
        yield f"export {contract.SHOAL_TRACKING_URI}={shlex.quote(spec.tracking_uri)}"
    if spec.experiment:
        yield f"export {contract.SHOAL_EXPERIMENT}={shlex.quote(spec.experiment)}"
    if shipped.environment:
        yield f"export VIRTUAL_ENV={shipped.environment} PATH={shipped.environment}/bin:$PATH"
    if shipped.image:
        binds = dict.fromkeys(filter(None, (shipped.root, shipped.code_root)))
        yield f"export {IMAGE}={shlex.quote(shipped.image.as_json(binds))}"
    if spec.gpus_per_node == 0:
        yield "export CUDA_VISIBLE_DEVICES=  # where no cgroup hides them, it would see those of other jobs"
    for name, value in spec.export.items():
        yield f"export {name}={shlex.quote(value)}"
    yield f"export PYTHONPATH={code_path}/lib/{shipped.runtime}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONUNBUFFERED=1"
    # Slurm 22.05 and 23.02 do not hand --cpus-per-task on to srun. mpirun starts one daemon a node with srun.
    launcher = LAUNCHERS[spec.launcher]
    yield f"export SRUN_CPUS_PER_TASK={_cpus_per_task(job, launcher) * (job.ranks_per_node if launcher.mpirun else 1)}"
    yield f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{job.cpus_per_rank}}}"


def _copies(way: str, shipped: JobPaths) -> Iterator[str]:
    """On nodes that have copies of shares: filled before the job, brought back after it."""
    otherwise = {"in": "exit 1", "out": "status=${status/#0/1}"}[way]
    if shipped.copies:
        # The step of ranks that died with their host keeps its share of the job.
        yield f"srun --overlap --mem=0 {_ONE_A_NODE} \\"
        yield f"    sh -c '[ ! -x {contract.STAGE_PROGRAM} ] || exec {contract.STAGE_PROGRAM} {way}' || {otherwise}"


def _launch(job: ResolvedJob, launcher: JobLauncher, shipped: JobPaths) -> Iterator[str]:
    spec = job.spec
    if launcher.mpi == "pmix" and spec.requeue:
        yield "# PMIx may have left files of an earlier turn on a node; a step of another number does not meet them."
        yield "for ((turn = 0; turn < ${SLURM_RESTART_COUNT:-0}; turn++)); do srun --mpi=none -N1 -n1 true; done"
    if launcher.mpirun:
        yield from _REQUIRE_MPIRUN
        start = [*MPIRUN, f"-n {job.world_size}", f"--map-by ppr:{job.ranks_per_node}:node"]
    else:
        start = ["srun", "--kill-on-bad-exit=1", f"--mpi={launcher.mpi}"]
    if spec.output:
        start.append("--tag-output" if launcher.mpirun else "--label")
    yield " ".join(start) + " \\"
    stdin = " /dev/null" if launcher.mpirun else f'&"${contract.WARNINGS_VARIABLE}"'
    yield f"    {task_command(job, launcher, shipped)} <{stdin} &"


def task_command(job: ResolvedJob, launcher: JobLauncher, shipped: JobPaths) -> str:
    """What srun or mpirun starts, in the shell's words."""
    spec = job.spec
    runner = ShellText(_runner_path(shipped))
    program = spec.script if "/" in spec.script else f"./{spec.script}"
    command = (spec.python, spec.script) if spec.script.endswith(".py") else (program,)
    words = (*command, *spec.args)
    launch = LaunchParameters(spec.python, job.nodes, job.ranks_per_node, runner, words, spec.runner_python)
    return " ".join(
        argument.text if isinstance(argument, ShellText) else shlex.quote(argument)
        for argument in launcher.command(launch)
    )


def _watch(job: ResolvedJob, launcher: JobLauncher, shipped: JobPaths) -> Iterator[str]:
    yield "ranks=$!"
    program = f"{shlex.quote(job.spec.runner_python)} -I -S {_runner_path(shipped)}"
    watched = '"$ranks"'
    if launcher.mpirun:
        yield "# mpirun gives its standard input to one rank. So beside it, a program on each node hands warnings on."
        yield f"srun --overlap --quiet --mem=0 {_ONE_A_NODE} \\"
        yield f'    {program} relay -- <&"${contract.WARNINGS_VARIABLE}" 2> /dev/null &'
        yield "relay=$!"
        watched = '"$relay" --mpirun "$ranks"'
    yield f'{program} watch --srun {watched} -- >&"${contract.WARNINGS_VARIABLE}" &'
    yield from _WAIT
    if launcher.mpirun:
        yield 'kill "$relay"'
    if job.nodes > 1:
        yield "# A host that was started again makes srun or the other ranks fail."
        yield f'[ "$status" = 0 ] || [ -e "$SHOAL_JOB_DIR/lost.${{SLURM_RESTART_COUNT:-0}}" ] || {program} ended --'


def _runner_path(shipped: JobPaths) -> str:
    return f"{_code_path(shipped)}/lib/{shipped.runtime}/programs/start.py"


def _code_path(shipped: JobPaths) -> str:
    """Where the code is, in the shell's words."""
    return "$SHOAL_SENT" if shipped.staged else shlex.quote(shipped.code_root or shipped.root)


def _cpus_per_task(job: ResolvedJob, launcher: JobLauncher) -> int:
    return job.cpus_per_rank if launcher.one_task_a_rank else job.cpus_per_rank * job.ranks_per_node
