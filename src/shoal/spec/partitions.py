"""Partitions: the queues over the nodesets, and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field, StrictBool, WithJsonSchema

from shoal.contract import GRACE_S
from shoal.spec.accounting import NORMAL, ROOT, Accounting
from shoal.spec.checks import minutes
from shoal.spec.finding import Path, Problem, nearest, show
from shoal.spec.slurm_options import OptionValue, duplicate_keys, option_key
from shoal.spec.values import Between, SetName, SlurmTime, SpecModel

ALL = "ALL"
"""In place of a list of nodesets: every nodeset, and the controller if it computes."""

_MANAGED_KEYS = {
    "PartitionName": "the name in `partitions`",
    "Nodes": "`nodesets`",
    "Default": "`default`",
    "MaxTime": "`max_time`",
    "DefaultTime": "`default_time`",
    "MaxNodes": "`max_nodes`",
    "Priority": "`priority`",
    "PriorityTier": "`priority`",
    "GraceTime": "`grace`",
    "SuspendTime": "`idle` of a nodeset",
}
"""The keys of a partition that Shoal has a field for, with that field."""
_ACCOUNT_KEYS = ("allowaccounts", "denyaccounts")
_QOS_KEYS = ("allowqos", "denyqos", "qos")


def _all_nodesets(value: object) -> object:
    word = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    return (ALL,) if isinstance(word, str) and word.upper() == ALL else value


_NODESETS_SCHEMA = {"type": ["array", "string"], "items": {"type": "string"}, "title": "list of name, or `ALL`"}


class Partition(SpecModel):
    """A queue over some of the nodesets."""

    nodesets: Annotated[tuple[SetName, ...], BeforeValidator(_all_nodesets), WithJsonSchema(_NODESETS_SCHEMA)]
    """The nodesets whose hosts take its jobs, or `ALL`; `controller` may be among them when the controller computes."""
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
    options: dict[Annotated[str, BeforeValidator(option_key("a partition", _MANAGED_KEYS))], OptionValue] = Field(
        default_factory=dict
    )
    """Further keys of Slurm's partition: `{AllowGroups: staff, OverSubscribe: "FORCE:2", QOS: night}`."""

    def over(self, nodesets: Sequence[str]) -> Partition:
        """The partition with the nodesets that `ALL` stands for."""
        return self.model_copy(update={"nodesets": tuple(nodesets)}) if self.nodesets == (ALL,) else self


def partition_problems(
    partitions: Mapping[str, Partition | None], nodesets: Sequence[str], *, all_known: bool = True
) -> Iterator[Problem]:
    """Every rule about partitions that does not hold.

    `nodesets` are the names that a partition may list; `all_known` is False where the file's nodesets cannot be read.
    """
    readable = {name: partition.over(nodesets) for name, partition in partitions.items() if partition is not None}
    default: str | None = None
    for name, partition in readable.items():
        yield from _nodesets(("partitions", name, "nodesets"), partition, nodesets, all_known=all_known)
        yield from _times(name, partition)
        yield from _options(name, partition)
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


def _options(name: str, partition: Partition) -> Iterator[Problem]:
    path: Path = ("partitions", name, "options")
    yield from duplicate_keys(path, partition.options)
    for key in partition.options:
        if key.lower() == "preemptmode" and not partition.preemptable:
            yield Problem((*path, key), "`preemptable: false` writes this key itself", "", "delete one of them")


def partition_account_problems(
    partitions: Mapping[str, Partition | None], accounting: Accounting | None, *, valid: bool = True
) -> Iterator[Problem]:
    """The accounts and QOS that options of partitions name exist.

    `valid` is False where the file's `accounting` cannot be read. Where it has no accounts, others manage them.
    """
    if not valid or (accounting is not None and not accounting.is_set("accounts")):
        return
    for name, partition in partitions.items():
        for key, value in partition.options.items() if partition is not None else ():
            is_account = key.lower() in _ACCOUNT_KEYS
            if value is None or value.upper() == ALL or not (is_account or key.lower() in _QOS_KEYS):
                continue
            path: Path = ("partitions", name, "options", key)
            if accounting is None:
                what = f"{'accounts' if is_account else 'QOS'} without `accounting`"
                yield Problem(path, what, show(value), "add `accounting`, or delete this")
                continue
            names = [ROOT, *accounting.accounts] if is_account else [NORMAL, *accounting.qos]
            for word in value.split(","):
                if word not in names:
                    what = "unknown account" if is_account else "unknown QOS"
                    yield Problem(path, what, show(word), nearest(word, names))


def partition_qos(partitions: Mapping[str, Partition]) -> list[str]:
    """The QOS whose limits partitions have: slurmctld does not start where one is missing."""
    options = (item for partition in partitions.values() for item in partition.options.items())
    return sorted({value for key, value in options if key.lower() == "qos"})


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
