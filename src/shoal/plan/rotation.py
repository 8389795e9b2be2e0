"""What every rotation of a key works with: the hosts, and how a document comes to all of them at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from shoal.agent.document import Document
from shoal.errors import ShoalError
from shoal.plan.fleet import Fleet
from shoal.plan.progress import Phase
from shoal.spec.model import Spec


@dataclass(frozen=True)
class Rotating:
    """What a rotation works with."""

    spec: Spec
    fleet: Fleet
    controller: str
    hosts: tuple[str, ...]
    """Those that get the new key."""
    phase: Phase


@dataclass(frozen=True)
class Rotated:
    """How a rotation went."""

    hosts: tuple[str, ...]
    """All of them have the new key: each was asked."""
    finished: bool = False
    """The key is that of an earlier run, which had not come to its end."""


@dataclass(frozen=True)
class Rotation:
    """A key that can be rotated."""

    what: str
    """For people: `munge key`."""
    used: Callable[[Spec], bool]
    """Whether the cluster has such a key."""
    instead: str
    """What to say where it has not."""
    run: Callable[[Rotating], Awaitable[Rotated]]
    cuts_off: bool = True
    """Whether a host that keeps its old key can no longer talk to the others."""


async def apply_all(now: Rotating, documents: Mapping[str, Document], secrets: Mapping[str, bytes]) -> None:
    """On all hosts at the same time. One that fails ends the run, once the others are done."""

    async def one(name: str) -> None:
        await now.fleet.converge(name, documents[name], secrets, now.phase, "shoal keys rotate")

    await now.fleet.each(documents, one)
    raise_failed(now)


def raise_failed(now: Rotating) -> None:
    """A host that drops out while the keys change must not be forgotten."""
    for name in now.hosts:
        if name in now.fleet.failures:
            error = now.fleet.failures[name]
            hint = error.hint or "run the same command again"
            raise ShoalError(f"the rotation is not finished: {error.message}", hint=hint)
