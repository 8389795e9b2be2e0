"""Clusters and jobs for tests: nodes as Slurm reports them."""

from typing import Any

from shoal.jobs.model import JobPaths, JobSpec, ResolvedJob, job_from_options
from shoal.jobs.resolve import resolve
from shoal.slurm.state import NodeState, PartitionState

NODES = (
    NodeState(
        "gpu1",
        ("IDLE",),
        cpus=16,
        memory_mb=64000,
        gres="gpu:h100:4(S:0-1)",
        features=("a", "fast"),
        partitions=("main",),
    ),
    NodeState(
        "gpu2", ("ALLOCATED",), cpus=16, memory_mb=64000, gres="gpu:h100:4", features=("a",), partitions=("main",)
    ),
    NodeState("old1", ("IDLE",), cpus=8, memory_mb=16000, gres="gpu:t4:1", partitions=("main", "short")),
    NodeState("cpu1", ("IDLE",), cpus=32, memory_mb=64000, partitions=("cpu",)),
)
PARTITIONS = (
    PartitionState("main", "UP", default=True, nodes="gpu[1-2],old1"),
    PartitionState("short", "UP", nodes="old1", max_time="00:30:00", max_nodes="1"),
    PartitionState("cpu", "UP", nodes="cpu1"),
    PartitionState("closed", "DOWN", nodes="cpu1"),
)
SHIPPED = JobPaths("reef", "/var/lib/shoal/jobs/reef", "c0de", "11b", "examples")


def job(script: str = "train.py", **options: Any) -> JobSpec:
    return job_from_options({"script": script, **options})


def resolved(script: str = "train.py", **options: Any) -> ResolvedJob:
    return resolve(job(script, **options), NODES, PARTITIONS)
