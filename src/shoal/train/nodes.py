"""Which rank sits on which node, from what Slurm tells a task. No `scontrol`: a container does not have it."""

from __future__ import annotations

import re
from itertools import chain, repeat

from shoal.hostlist import expand

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_nodelist(text: str) -> tuple[str, ...]:
    """`gpu[01-02]` as its names, in Slurm's order, which is the order of node ranks."""
    return tuple(expand(text))


def tasks_per_node(text: str) -> tuple[int, ...]:
    """SLURM_TASKS_PER_NODE as one count a node: `2(x3),1` is 2, 2, 2, 1. ValueError where it is something else."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is not a count like 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def place_tasks(counts: tuple[int, ...], distribution: str = "block") -> tuple[int, ...]:
    """The node rank of every rank: filled node by node, or dealt like cards where Slurm was asked for `cyclic`."""
    if not distribution.startswith("cyclic"):
        return tuple(chain.from_iterable(repeat(node, count) for node, count in enumerate(counts)))
    left = list(counts)
    placed: list[int] = []
    while any(left):
        for node, count in enumerate(left):
            if count:
                placed.append(node)
                left[node] -= 1
    return tuple(placed)
