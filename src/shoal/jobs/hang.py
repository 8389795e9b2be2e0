"""Trainings that hang: no step for many times as long as a step takes, and which rank the others wait for. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.remote.node_health.job_stacks import ranks_behind
from shoal.remote.node_health.training import HUNG_STEPS
from shoal.spec.finding import printable

HUNG_MIN_S = 300.0
"""Shorter pauses are saves, evaluations and the first batches of an epoch."""
MAX_FRAMES = 3
"""Of each rank's stack are shown."""


@dataclass(frozen=True)
class RankStack:
    """What a rank does, as `remote/node_health/job_stacks.py` saw it."""

    rank: int
    node: str
    pid: int
    cpu_percent: int
    """Of one core, for a moment."""
    wait: str
    """The function of the kernel in which it sleeps; empty where it computes."""
    stack: tuple[str, ...] = ()
    """Innermost first, as `read (data.py:10)`; empty where neither py-spy nor faulthandler tells."""
    step: int | None = None
    """Its last one, where it uses `shoal.train`."""

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        place = f"rank {self.rank} on {self.node} (pid {self.pid}{step})"
        if self.stack:
            return f"{place}: {' < '.join(self.stack[:MAX_FRAMES])}"
        return f"{place}: {self.cpu_percent} % of a core{f', in {self.wait}' if self.wait else ''}"


def hung_text(
    progress: Mapping[str, Any], now: float, min_s: float = HUNG_MIN_S, ranks: Iterable[RankStack] = ()
) -> str:
    """How long a training has made no step, and how long one takes; empty where it goes on or says nothing.

    Its file of progress is behind by seconds. The ranks know their last step, where they are asked.
    """
    updated, rate = progress.get("updated"), progress.get("steps_per_second")
    if progress.get("state") != "running" or not isinstance(updated, int | float) or not isinstance(rate, int | float):
        return ""
    silence_s = now - updated
    if rate <= 0 or silence_s < max(min_s, HUNG_STEPS / rate):
        return ""
    last = max((rank.step for rank in ranks if rank.step is not None), default=progress.get("step"))
    return f"no step for {silence_s / 60:.0f} min, and one takes {1 / rate:.2g} s; the last was {last}"


def parse_stacks(node: str, text: str) -> list[RankStack]:
    """The answer of a node: one JSON object a line. A node whose ranks are a user's step says its name itself."""
    stacks = []
    for values in _objects(text):
        try:
            stack = tuple(printable(str(frame)) for frame in values["stack"])
            numbers = int(values["rank"]), int(values["pid"]), int(values["cpu_percent"])
            step = int(values["step"]) if "step" in values else None
            place = node or str(values["node"])
            stacks.append(
                RankStack(numbers[0], place, numbers[1], numbers[2], printable(str(values["wait"])), stack, step)
            )
        except (KeyError, TypeError, ValueError):
            continue
    return stacks


def parse_nccl(text: str) -> list[str]:
    """What NCCL says of the job, in the answer of a node."""
    return [f"NCCL: {printable(str(line))}" for values in _objects(text) for line in values.get("nccl", ())]


def _objects(text: str) -> Iterator[Mapping[str, Any]]:
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            yield values


def describe_stacks(stacks: Iterable[RankStack]) -> Sequence[str]:
    """A line for each rank: first those that the others wait for, as far as steps and stacks tell."""
    ranks = sorted(stacks, key=lambda rank: rank.rank)
    numbers = {values["rank"] for values in ranks_behind([asdict(rank) for rank in ranks])}
    behind = [rank for rank in ranks if rank.rank in numbers]
    return [f"behind: {rank}" for rank in behind] + [str(rank) for rank in ranks if rank not in behind]
