"""Trainings that hang: no step for many times as long as a step takes, and which rank the others wait for. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HUNG_STEPS = 20
"""A training hangs if it has made no step for as long as it needs for so many."""
HUNG_MIN_S = 300.0
"""Shorter pauses are saves, evaluations and the first batches of an epoch."""
COLLECTIVE = ("torch/distributed/", "distributed_c10d.py", "nn/parallel/distributed.py", "mpi4py")
"""Files whose functions wait for other ranks."""
MAX_FRAMES = 3
"""Of each rank's stack are shown."""


@dataclass(frozen=True)
class RankStack:
    """What a rank does, as `remote/job_stacks.py` saw it."""

    rank: int
    node: str
    pid: int
    cpu_percent: int
    """Of one core, for a moment."""
    wait: str
    """The function of the kernel in which it sleeps; empty where it computes."""
    stack: tuple[str, ...] = ()
    """Innermost first, as `read (data.py:10)`; empty without py-spy."""

    @property
    def waits_for_others(self) -> bool:
        return any(word in frame for frame in self.stack for word in COLLECTIVE)

    def __str__(self) -> str:
        place = f"rank {self.rank} on {self.node} (pid {self.pid})"
        if self.stack:
            return f"{place}: {' < '.join(self.stack[:MAX_FRAMES])}"
        return f"{place}: {self.cpu_percent} % of a core{f', in {self.wait}' if self.wait else ''}"


def hung_text(progress: Mapping[str, Any], now: float) -> str:
    """How long a training has made no step, and how long one takes; empty where it goes on or says nothing."""
    updated, rate = progress.get("updated"), progress.get("steps_per_second")
    if progress.get("state") != "running" or not isinstance(updated, int | float) or not isinstance(rate, int | float):
        return ""
    silence_s = now - updated
    if rate <= 0 or silence_s < max(HUNG_MIN_S, HUNG_STEPS / rate):
        return ""
    return f"no step for {silence_s / 60:.0f} min, and one takes {1 / rate:.2g} s; the last was {progress.get('step')}"


def parse_stacks(node: str, text: str) -> list[RankStack]:
    """The answer of a node: one JSON object a line."""
    stacks = []
    for line in text.splitlines():
        try:
            values = json.loads(line)
            stack = tuple(map(str, values["stack"]))
            numbers = int(values["rank"]), int(values["pid"]), int(values["cpu_percent"])
            stacks.append(RankStack(numbers[0], node, numbers[1], numbers[2], str(values["wait"]), stack))
        except (KeyError, TypeError, ValueError):
            continue
    return stacks


def describe_stacks(stacks: Iterable[RankStack]) -> Sequence[str]:
    """A line for each rank: first those that the others wait for, as far as their stacks tell."""
    ranks = sorted(stacks, key=lambda rank: rank.rank)
    behind = [rank for rank in ranks if rank.stack and not rank.waits_for_others]
    if not behind or len(behind) == len(ranks):
        return [str(rank) for rank in ranks]
    return [f"behind: {rank}" for rank in behind] + [str(rank) for rank in ranks if rank not in behind]
