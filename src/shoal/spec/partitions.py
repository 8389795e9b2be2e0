"""Partitions: the queues over the nodesets, and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import StrictBool

from shoal.contract import GRACE_S
from shoal.spec.finding import Path, Problem, nearest, show
from shoal.spec.values import Between, SetName, SlurmTime, SpecModel, minutes


class Partition(SpecModel):
    """A queue over some of the nodesets."""

    nodesets: tuple[SetName, ...]
    """The nodesets whose hosts take its jobs; `controller` may be among them when the controller computes."""
    default: StrictBool = False
    """Jobs that name no partition go here. Without a default, the first partition is it."""
    max_time: SlurmTime | None = None
    """The longest a job may run: minutes, HH:MM:SS, D-HH:MM:SS or `infinite`. Without it, no limit."""
    default_time: SlurmTime | None = None
    """The time limit of a job that sets none. Without it, `max_time`."""
    max_nodes: Annotated[int, Between(1, 65533)] | None = None
    """The most nodes one job may have."""
    priority: Annotated[int, Between(1, 65533)] | None = None
    """Slurm's PriorityTier, 1 without it: jobs of a higher tier start first and preempt jobs of a lower one."""
    grace: Annotated[int, Between(0, 65533)] = GRACE_S
    """Seconds between the warning and the end of a preempted job, to save its work. The job is requeued."""
    preemptable: StrictBool = True
    """Whether its jobs may be preempted."""


def partition_problems(
    partitions: Mapping[str, Partition | None], nodesets: Sequence[str], *, all_known: bool = True
) -> Iterator[Problem]:
    """Every rule about partitions that does not hold.

    `nodesets` are the names that a partition may list; `all_known` is False where the file's nodesets cannot be read.
    """
    readable = {name: partition for name, partition in partitions.items() if partition is not None}
    default: str | None = None
    for name, partition in readable.items():
        yield from _nodesets(("partitions", name, "nodesets"), partition, nodesets, all_known=all_known)
        yield from _times(name, partition)
        if partition.default and default is not None:
            path = ("partitions", name, "default")
            yield Problem(path, "two default partitions", show(name), f"`{default}` is one already")
        default = default or (name if partition.default else None)
    yield from _unlisted_problems(readable, nodesets)
    yield from _preemption(readable)


def show_time(time: str) -> str:
    """A time as the file has it: minutes as a number, anything else as text."""
    return time if time.isdigit() else show(time)


def _nodesets(path: Path, partition: Partition, listable: Sequence[str], *, all_known: bool) -> Iterator[Problem]:
    """A partition has nodesets, and lists each once."""
    if not partition.nodesets and "nodesets" in partition.model_fields_set - partition.invalid:
        yield Problem(path, "a partition without nodesets", "[]", "list at least one")
    listed: set[str] = set()
    for index, nodeset in enumerate(partition.nodesets or ()):
        if nodeset is None:
            continue
        place = (*path, index)
        if nodeset in listed:
            yield Problem(place, "nodeset listed twice", show(nodeset), "delete one")
        elif nodeset == "controller" and nodeset not in listable:
            yield Problem(place, "the controller runs no jobs", show(nodeset), "set `compute: true` on it")
        elif nodeset not in listable and all_known:
            yield Problem(place, "unknown nodeset", show(nodeset), nearest(nodeset, list(listable)))
        listed.add(nodeset)


def _times(name: str, partition: Partition) -> Iterator[Problem]:
    longest, usual = partition.max_time, partition.default_time
    if longest is not None and usual is not None and minutes(usual) > minutes(longest):
        path = ("partitions", name, "default_time")
        yield Problem(path, "longer than `max_time`", show_time(usual), f"give at most {longest}")


def _unlisted_problems(partitions: Mapping[str, Partition], listable: Sequence[str]) -> Iterator[Problem]:
    """A warning for each nodeset that no partition lists, once the partitions themselves are in order."""
    listed = [nodeset for partition in partitions.values() for nodeset in partition.nodesets or (None,)]
    if not partitions or any(nodeset not in listable for nodeset in listed):
        return
    for nodeset in listable:
        if nodeset not in listed:
            place: Path = ("controller", "compute") if nodeset == "controller" else ("nodesets", nodeset)
            yield Problem(place, "in no partition: no job can run there", "", "list it in a partition", "warning")


def _preemption(partitions: Mapping[str, Partition]) -> Iterator[Problem]:
    """A preempted job has the time to save that the training library needs."""
    highest = max((partition.priority or 1 for partition in partitions.values()), default=1)
    for name, partition in partitions.items():
        path, grace = ("partitions", name, "grace"), partition.grace
        if not partition.preemptable and grace != GRACE_S:
            yield Problem(path, "`grace` where no job is preempted", show(grace), "delete it, or `preemptable`")
        elif grace < GRACE_S and (partition.priority or 1) < highest:
            what = "a preempted job has less time to save than it counts on"
            yield Problem(path, what, f"{grace} s", f"give at least {GRACE_S}", "warning")
