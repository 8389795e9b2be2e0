"""The health program of nodes in the file: one word or a mapping."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from shoal.remote.node_health.node import CHECK_NAMES
from shoal.spec.checks import choice, refusal
from shoal.spec.finding import nearest
from shoal.spec.values import Duration, ShortForm

MODES = ("drain", "warn", "off")


def _check_name(value: object) -> str:
    if not isinstance(value, str) or value not in CHECK_NAMES:
        raise refusal("no check has this name", nearest(str(value), [*CHECK_NAMES]))
    return value


class Health(ShortForm):
    """What the health program on the nodes does. It checks disks, shares, memory, links and GPUs every five minutes.

    In the file it is a word (`health: warn`) or a mapping of the fields below: `{mode: drain, skip: [gpu-clock]}`.
    """

    short_schema: ClassVar = {"type": "string", "enum": [*MODES]}
    refusal = (
        "not a mode of the health program",
        "write `drain`, `warn` or `off`, or {mode: drain, skip: [gpu-clock]}",
    )

    mode: Annotated[Literal["drain", "warn", "off"], BeforeValidator(choice("mode", MODES))] = "drain"
    """`drain` takes a node with a serious fault out of service until it is gone; a new node only warns for a day.
    `warn` only shows it, in `shoal doctor`. `off` removes the program."""
    skip: tuple[Annotated[str, BeforeValidator(_check_name)], ...] = ()
    """Checks that do not run, by the name of their finding (docs/doctor.md)."""

    leftovers: Annotated[Literal["warn", "kill"], BeforeValidator(choice("mode", ("warn", "kill")))] = "warn"
    """Processes of users that outlive their job, or use a GPU without one: `warn` shows them, `kill` ends them."""
    idle_gpus: Annotated[Literal["warn", "cancel"], BeforeValidator(choice("mode", ("warn", "cancel")))] = "warn"
    """Jobs that hold GPUs and do not use them: `warn` tells the operator and the job's log, `cancel` ends them, too."""
    idle_after: Duration = "1h"
    """How long a job may hold GPUs that it does not use."""

    hung_jobs: Annotated[Literal["warn", "requeue"], BeforeValidator(choice("mode", ("warn", "requeue")))] = "warn"
    """Trainings with `shoal.train` that make no step: `warn` shows them. `requeue` also queues such a job again without
    the node of the rank that the others wait for, where its state tells which one that is."""
    hung_after: Duration = "30m"
    """How long a training may make no step. It may be as long as 20 of its steps in any case."""

    @classmethod
    def from_short(cls, value: object) -> dict[str, Any] | None:
        return {"mode": value} if isinstance(value, str) else None
