"""Usage from slurmdbd's records: the sacct command, its parser, and the sums. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from shoal.hostlist import expand
from shoal.slurm.accounting import GPU
from shoal.slurm.state import JOB_RECORD

Grouping = Literal["user", "job", "nodeset", "account"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)

_FIELDS = ("JobID", "User", "Account", "Start", "End", "NodeList", "AllocTRES", "JobName")


@dataclass(frozen=True)
class JobUsage:
    """One run of a job. A job that was requeued has several."""

    id: str
    user: str
    account: str
    name: str
    start: float
    end: float
    """When it ended; now while it runs."""
    nodes: tuple[str, ...]
    cpus: int
    gpus: int


@dataclass(frozen=True)
class UsageRow:
    """The usage of one user, job, nodeset or account."""

    name: str
    jobs: int
    cpu_hours: float
    gpu_hours: float
    cost: float | None
    """None where no price is known."""
    unpriced: float = 0.0
    """GPU hours on nodes without a known price; `cost` does not include them."""
    detail: str = ""
    """The user and the name of a job."""


def usage_command(since: float, until: float) -> tuple[str, ...]:
    """The command for all runs in the period, earlier runs of requeued jobs included."""
    period = ("-S", f"uts{since:.0f}", "-E", f"uts{until:.0f}")
    arguments = ("-a", "-D", "-X", "-n", "-P", f"--delimiter={JOB_RECORD}", *period, "-o", ",".join(_FIELDS))
    return ("env", "SLURM_TIME_FORMAT=%s", "sacct", *arguments)


def parse_usage(text: str, now: float) -> list[JobUsage]:
    """Parse the output of `usage_command`. Jobs that never started are left out."""
    runs = []
    for line in text.split("\n"):
        if line.count(JOB_RECORD) < len(_FIELDS) - 1:
            continue  # the rest of a name that contains a newline
        values = dict(zip(_FIELDS, line.split(JOB_RECORD, len(_FIELDS) - 1), strict=True))
        if not values["Start"].isdecimal() or values["Start"] == "0":
            continue
        tres = dict(part.split("=", 1) for part in values["AllocTRES"].split(",") if "=" in part)
        end = float(values["End"]) if values["End"].isdecimal() and values["End"] != "0" else now
        nodes = () if values["NodeList"] in ("", "None assigned") else tuple(expand(values["NodeList"]))
        runs.append(
            JobUsage(
                id=values["JobID"],
                user=values["User"],
                account=values["Account"],
                name=values["JobName"],
                start=float(values["Start"]),
                end=end,
                nodes=nodes,
                cpus=_number(tres.get("cpu")),
                gpus=_number(tres.get(GPU)),
            )
        )
    return runs


def summarize_usage(
    runs: Iterable[JobUsage],
    by: Grouping,
    since: float,
    until: float,
    nodesets: Mapping[str, str],
    prices: Mapping[str, float],
) -> tuple[UsageRow, ...]:
    """The usage inside the period, most GPU hours first.

    `nodesets` maps nodes to nodesets, `prices` nodesets to the price of a GPU hour. The GPUs of a job count as
    spread evenly over its nodes.
    """
    groups: dict[str, list[UsageRow]] = {}
    for run in runs:
        hours = max(0.0, min(run.end, until) - max(run.start, since)) / 3600
        for node in run.nodes or ("",):
            share = 1 / max(1, len(run.nodes))
            nodeset = nodesets.get(node, "(gone)")
            cpu_hours, gpu_hours = run.cpus * hours * share, run.gpus * hours * share
            price = prices.get(nodeset)
            cost, unpriced = (None, gpu_hours) if price is None else (gpu_hours * price, 0.0)
            detail = f"{run.user}: {run.name}" if by == "job" else ""
            part = UsageRow(run.id, 1, cpu_hours, gpu_hours, cost, unpriced, detail)
            groups.setdefault(_KEYS[by](run, nodeset), []).append(part)
    rows = [
        usage_total(group, len({part.name for part in group}), name, group[0].detail) for name, group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.gpu_hours, -row.cpu_hours, row.name)))


_KEYS: Mapping[Grouping, Callable[[JobUsage, str], str]] = {
    "user": lambda run, nodeset: run.user,
    "job": lambda run, nodeset: run.id,
    "account": lambda run, nodeset: run.account or "(none)",
    "nodeset": lambda run, nodeset: nodeset,
}


def usage_total(rows: Sequence[UsageRow], jobs: int, name: str = "total", detail: str = "") -> UsageRow:
    """The sum of all rows."""
    costs = [row.cost for row in rows if row.cost is not None]
    cpu_hours, gpu_hours = sum(row.cpu_hours for row in rows), sum(row.gpu_hours for row in rows)
    unpriced = sum(row.unpriced for row in rows)
    return UsageRow(name, jobs, cpu_hours, gpu_hours, sum(costs) if costs else None, unpriced, detail)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
