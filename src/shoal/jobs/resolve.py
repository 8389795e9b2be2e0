"""What a job leaves out, worked out from what Slurm says of its nodes; what cannot be is refused, not queued."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from shoal.errors import UsageError
from shoal.hostlist import compress, expand
from shoal.jobs.launchers import LAUNCHERS, PROFILERS, JobLauncher
from shoal.jobs.model import JobSpec, ResolvedJob, option_name
from shoal.jobs.sbatch_options import FEWER_CPUS, SbatchRequest, read_request
from shoal.slurm.state import NodeState, PartitionState
from shoal.spec.checks import minutes
from shoal.spec.finding import nearest, printable

_GPUS = re.compile(r"gpu:(?:([^:,(]+):)?(\d+)")
_UNREACHABLE_STATES = {"DOWN", "NOT_RESPONDING", "UNKNOWN"}
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


def resolve(
    job: JobSpec, nodes: Sequence[NodeState], partitions: Sequence[PartitionState], containers: Collection[str] = ()
) -> ResolvedJob:
    """The job with every number known. Raises UsageError where Slurm would refuse it, or let it wait for ever.

    `containers` are the nodes that would be rented containers.
    """
    launcher, request = LAUNCHERS[job.launcher], read_request(job.sbatch)
    _check_profile(job)
    _check_image_options(job)
    partition = _partition(job, partitions)
    inside = _candidates(job, partition, nodes)
    excluded = tuple(node.name for node in inside if node.name in request.exclude)
    inside = [node for node in inside if node.name not in excluded]
    candidates = [node for node in inside if node.name in containers or _will_have_code(job, node)]
    unusable = [node for node in inside if node not in candidates]
    count = _node_count(job, launcher, partition, candidates, unusable)
    job = _count_totals(job, request, launcher, count)
    job_nodes, gpus = _gpus_per_node(job, request, count, candidates)
    ranks = _ranks_per_node(job, launcher, gpus, request.gpus_per_task or 1)
    if request.gpus_per_task:
        gpus = ranks * request.gpus_per_task
    _check_sbatch(job, request, gpus)
    cpus = _cpus_per_rank(job, ranks, gpus, job_nodes)
    _check_memory(job, job_nodes)
    _check_time(job, partition)
    hosts = tuple(node.name for node in candidates if not node.cloud)
    rented = tuple(node.name for node in candidates if node.cloud and node.name not in containers)
    exclude = (*(node.name for node in unusable), *excluded)
    boxes = tuple(node.name for node in candidates if node.name in containers)
    numbers = (count, gpus, ranks, cpus)
    return ResolvedJob(
        job, partition.name, *numbers, hosts, exclude, rented, boxes, request.gpu_type if gpus else "", request.passed
    )


def gpus_of(node: NodeState, gpu_type: str = "") -> int:
    """How many GPUs Slurm knows of the node, of a type or of all."""
    return sum(int(count) for kind, count in _GPUS.findall(node.gres) if not gpu_type or kind == gpu_type)


def _will_have_code(job: JobSpec, node: NodeState) -> bool:
    """Whether a node has the job's code when the job starts there.

    One that is down cannot be sent it, and must not be given the job when it comes back. One that is rented later is
    sent nothing: it has what is where --directory says, if all hosts share that.
    """
    return job.directory is not None if node.cloud else not _UNREACHABLE_STATES & set(node.state)


def _partition(job: JobSpec, partitions: Sequence[PartitionState]) -> PartitionState:
    names = [partition.name for partition in partitions]
    if job.partition is not None:
        choice = next((partition for partition in partitions if partition.name == job.partition), None)
        if choice is None:
            raise UsageError(f"there is no partition {job.partition!r}", hint=nearest(job.partition, names))
    else:
        choice = next((partition for partition in partitions if partition.default), None)
        if choice is None:
            raise UsageError("the cluster has no default partition", hint=f"use --partition: {', '.join(names)}")
    if choice.state != "UP":
        raise UsageError(f"partition {choice.name} is {choice.state.lower()}", hint="choose another with --partition")
    return choice


def _candidates(job: JobSpec, partition: PartitionState, nodes: Sequence[NodeState]) -> list[NodeState]:
    """The nodes of the partition that have what the job names."""
    inside = [node for node in nodes if partition.name in node.partitions]
    if not inside:
        raise UsageError(f"partition {partition.name} has no node", hint="`shoal status` shows the nodes")
    if job.nodelist is not None:
        by_name = {node.name: node for node in inside}
        unknown = [name for name in expand(job.nodelist) if name not in by_name]
        if unknown:
            raise UsageError(
                f"partition {partition.name} has no node {compress(unknown)}", hint=f"it has {compress(by_name)}"
            )
        inside = [by_name[name] for name in expand(job.nodelist)]
    features = re.split("[&,]", job.constraint) if job.constraint else []
    if all(re.fullmatch("[A-Za-z0-9_.-]+", feature) for feature in features):  # more than that is Slurm's to work out
        having = [node for node in inside if set(features) <= set(node.features)]
        if not having:
            available = sorted({feature for node in inside for feature in node.features})
            raise UsageError(
                f"no node of partition {partition.name} has the features {job.constraint}",
                hint=f"they have: {', '.join(available) or 'none'}",
            )
        inside = having
    return inside


def _node_count(
    job: JobSpec,
    launcher: JobLauncher,
    partition: PartitionState,
    candidates: list[NodeState],
    unusable: list[NodeState],
) -> int:
    listed = len(expand(job.nodelist)) if job.nodelist else None
    count = job.nodes or listed or 1
    if listed is not None and listed > count:
        raise UsageError(
            f"--nodelist {job.nodelist} names {listed} nodes and --nodes says {count}", hint=f"use --nodes {listed}"
        )
    if launcher.one_process and count > 1:
        raise UsageError(
            f"the python launcher starts one process, and --nodes says {count}",
            hint="leave out --nodes, or use --launcher srun or torchrun",
        )
    if count > len(candidates):
        which = f" ({compress(node.name for node in candidates)})" if candidates else ""
        fit = " that fit" if job.constraint or job.nodelist else ""
        rented = [node.name for node in unusable if node.cloud]
        down = _unavailable_clause(rented, "rented only when needed") or _unavailable_clause(
            [node.name for node in unusable], "down"
        )
        hint = f"use --nodes {len(candidates)} or fewer" if candidates else "`shoal status` says why they are down"
        nodes = "1 node" if count == 1 else f"{count} nodes"
        raise UsageError(
            f"the job asks for {nodes}; partition {partition.name} has {len(candidates)}{fit}{which}{down}",
            hint="rented nodes have the code where all hosts share it: use --directory with a path there"
            if rented
            else hint,
        )
    if partition.max_nodes.isdecimal() and count > int(partition.max_nodes):
        raise UsageError(
            f"the job asks for {count} nodes; partition {partition.name} allows {partition.max_nodes}",
            hint=f"use --nodes {partition.max_nodes} or fewer",
        )
    return count


def _unavailable_clause(names: Sequence[str], why: str) -> str:
    return f", and {compress(names)} {'is' if len(names) == 1 else 'are'} {why}" if names else ""


def _count_totals(job: JobSpec, request: SbatchRequest, launcher: JobLauncher, count: int) -> JobSpec:
    """The job with the numbers of each node that --ntasks, --gpus, --gpus-per-task and --gres stand for."""
    nodes = "1 node" if count == 1 else f"{count} nodes"
    tasks = job.ntasks_per_node
    if request.ntasks is not None:
        tasks = _divide("--ntasks", request.ntasks, nodes, count)
        if job.ntasks_per_node not in (None, tasks):
            raise UsageError(
                f"--ntasks={request.ntasks} on {nodes} is {tasks} a node, and --ntasks-per-node says"
                f" {job.ntasks_per_node}",
                hint="leave out one of them",
            )
    gpus = {"--gpus-per-node": job.gpus_per_node, "--gres": request.gres_gpus}
    if request.gpus is not None:
        gpus["--gpus"] = _divide("--gpus", request.gpus, nodes, count)
    if request.gpus_per_task is not None and (tasks or launcher.one_process):
        gpus["--gpus-per-task"] = request.gpus_per_task * (tasks or 1)
    asked = {name: number for name, number in gpus.items() if number is not None}
    if len(set(asked.values())) > 1:
        numbers = ", ".join(f"{name} is {number}" for name, number in asked.items())
        raise UsageError(f"these ask for different numbers of GPUs on each node: {numbers}", hint="leave out one")
    if request.shards and asked:
        raise UsageError(
            f"--gres asks for parts of GPUs, and {next(iter(asked))} for whole ones", hint="leave out one of them"
        )
    return replace(job, ntasks_per_node=tasks, gpus_per_node=next(iter(asked.values()), None))


def _divide(option: str, total: int, nodes: str, count: int) -> int:
    each, rest = divmod(total, count)
    if rest or not each:
        raise UsageError(
            f"{option}={total} cannot be divided equally among {nodes}; every node of a job has the same number",
            hint=f"use --nodes {total}" if total < count else f"use a multiple of {count}, or another --nodes",
        )
    return each


def _gpus_per_node(
    job: JobSpec, request: SbatchRequest, count: int, candidates: list[NodeState]
) -> tuple[list[NodeState], int]:
    """The GPUs each node gives, and the nodes that can: by default as many as `count` nodes have."""

    def number_of(node: NodeState) -> int:
        return gpus_of(node, request.gpu_type)

    ordered = sorted(candidates, key=number_of, reverse=True)
    most = number_of(ordered[0])
    gpus = 0 if request.shards else job.gpus_per_node
    if gpus is None:
        gpus = number_of(ordered[count - 1])
    elif gpus > most:
        kind = f"{request.gpu_type} " if request.gpu_type else ""
        raise UsageError(
            f"the job asks for {gpus} {kind}GPUs a node; no node it may use has more than {most}"
            f" ({', '.join(f'{node.name}: {number_of(node)}' for node in ordered[:4])})",
            hint=f"use --gpus-per-node {most}, or leave it out to use all",
        )
    having = [node for node in candidates if number_of(node) >= gpus]
    if len(having) < count:
        raise UsageError(
            f"the job asks for {count} nodes with {gpus} GPUs each; only {compress(n.name for n in having)} has them",
            hint=f"use --gpus-per-node {number_of(ordered[count - 1])}, or --nodes {len(having)}",
        )
    return having, gpus


def _check_sbatch(job: JobSpec, request: SbatchRequest, gpus: int) -> None:
    """Raise UsageError where options of sbatch contradict the job's own, or the CPUs that Shoal counts."""
    memory = sorted({"mem-per-cpu", "mem-per-gpu"} & request.names)
    if memory and job.mem is not None:
        raise UsageError(f"--mem and --{memory[0]} exclude each other", hint="leave out one of them")
    if job.exclusive and "exclusive" in request.names:
        raise UsageError("--exclusive is there twice", hint="leave out one of them")
    fewer = [name for name in FEWER_CPUS if name in request.names]
    if fewer and job.cpus_per_task is None and (gpus or job.exclusive):
        raise UsageError(
            f"with --{fewer[0]} Slurm counts fewer CPUs on a node, so the default of --cpus-per-task may not fit",
            hint="say how many CPUs each process gets: --cpus-per-task",
        )


def _ranks_per_node(job: JobSpec, launcher: JobLauncher, gpus: int, gpus_per_rank: int = 1) -> int:
    if launcher.one_process:
        if (job.ntasks_per_node or 1) > 1:
            raise UsageError(
                f"the python launcher starts one process, and --ntasks-per-node says {job.ntasks_per_node}",
                hint="leave it out, or use --launcher srun or torchrun",
            )
        return 1
    ranks = job.ntasks_per_node or gpus // gpus_per_rank or 1
    if gpus_per_rank > max(1, gpus):
        raise UsageError(
            f"--gpus-per-task={gpus_per_rank} is more than the {gpus} GPUs of a node", hint="use a smaller number"
        )
    if gpus and ranks > gpus:
        raise UsageError(
            f"{ranks} processes a node would share {gpus} GPUs: two of them on one",
            hint=f"use --ntasks-per-node {gpus}, or --gpus-per-node 0 for none at all",
        )
    return ranks


def _cpus_per_rank(job: JobSpec, ranks: int, gpus: int, job_nodes: list[NodeState]) -> int:
    most = max(node.cpus for node in job_nodes)
    if job.cpus_per_task is not None:
        if job.cpus_per_task * ranks > most:
            raise UsageError(
                f"{ranks} processes with {job.cpus_per_task} CPUs each need {ranks * job.cpus_per_task} CPUs a node;"
                f" no node it may use has more than {most}",
                hint=f"use --cpus-per-task {max(1, most // ranks)}",
            )
        return job.cpus_per_task
    if ranks > most:
        raise UsageError(
            f"{ranks} processes a node need a CPU each; no node it may use has more than {most}",
            hint=f"use --ntasks-per-node {most}",
        )
    # A job that takes half the GPUs of a node leaves half its CPUs to the next one.
    fits = [node for node in job_nodes if node.cpus >= ranks]
    shares = [node.cpus * gpus // gpus_of(node) if gpus and not job.exclusive else node.cpus for node in fits]
    if not gpus and not job.exclusive:
        return 1
    return max(1, min(shares) // ranks)


def _check_memory(job: JobSpec, job_nodes: list[NodeState]) -> None:
    if job.mem is None:
        return
    unit = job.mem[-1].upper() if job.mem[-1].isalpha() else "M"
    memory_mb = int(job.mem.rstrip("KMGTkmgt")) * _UNITS[unit]
    most = max(node.memory_mb for node in job_nodes)
    if memory_mb > most:
        raise UsageError(
            f"the job asks for {job.mem} of memory a node; no node it may use has more than {most}M",
            hint=f"use --mem {most}M, or --mem 0 for all of a node's",
        )


def _check_profile(job: JobSpec) -> None:
    if job.profile and PROFILERS[job.profile].python and not job.script.endswith(".py"):
        raise UsageError(
            f"--profile {job.profile} reads Python, and {printable(job.script)} is no Python script",
            hint="use --profile nsys, or profile the Python script that it starts",
        )


def _check_image_options(job: JobSpec) -> None:
    if job.image or job.container_name:
        return
    given = [option_name(name) for name in ("mount", "workdir", "home") if name in job.set_fields]
    if given:
        raise UsageError(f"{given[0]} is for jobs in images", hint="name one with --image, or leave it out")


def _check_time(job: JobSpec, partition: PartitionState) -> None:
    if job.time is None:
        return
    time_minutes = minutes(job.time)
    limit = minutes(partition.max_time)
    if time_minutes > limit:
        raise UsageError(
            f"the job asks for a time limit of {printable(job.time)}; partition {partition.name} allows"
            f" {partition.max_time}",
            hint=f"use --time {partition.max_time}, or choose another partition",
        )
    if job.grace >= time_minutes * 60:
        raise UsageError(
            f"--signal {job.signal} warns {job.grace} s before the end, and --time {job.time} is no longer than that",
            hint=f"use --signal {job.signal.partition('@')[0]}@{max(1, int(time_minutes * 60) // 2)}",
        )
