"""The driver of GPUs in the file: `driver: nvidia` for the controller or a nodeset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator

from shoal.spec.checks import choice
from shoal.spec.finding import Path, Problem, show
from shoal.spec.values import SpecModel


class HasDriver(SpecModel):
    """Hosts whose GPUs may need a driver."""

    driver: Annotated[Literal["nvidia"], BeforeValidator(choice("driver", ("nvidia",)))] | None = None
    """`nvidia`: install the distribution's driver on hosts with an NVIDIA GPU and no driver that works. Such a node is
    drained, reboots when its jobs have ended, and takes jobs again when the driver works."""


def driver_problems(path: Path, entry: object, rented: bool) -> Iterator[Problem]:
    """A driver where none is installed."""
    if not isinstance(entry, HasDriver) or not entry.driver:
        return
    if rented:
        fix = "delete it: rented machines have what their `image` has"
        yield Problem((*path, "driver"), "`driver` for rented machines", show(entry.driver), fix)
    elif not getattr(entry, "compute", True):
        fix = "delete it, or add `compute: true`"
        yield Problem((*path, "driver"), "`driver` on a controller that runs no jobs", show(entry.driver), fix)
