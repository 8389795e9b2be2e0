"""How long work says where it is. The terminal draws bars from this; a test records it; a script may ignore it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Phase(Protocol):
    """One phase of a run."""

    def say(self, host: str, text: str) -> None:
        """What a host is doing just now."""

    def done(self, host: str, error: str = "") -> None:
        """A host has finished this phase, with an error or without."""

    def at(self, fraction: float, text: str = "") -> None:
        """How much of the whole phase is done, 0 to 1, for work that is not counted in hosts."""


class Progress(Protocol):
    """A run with phases."""

    def phase(self, title: str, total: int) -> AbstractContextManager[Phase]: ...


class Silence:
    """Progress for nobody."""

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Phase]:
        yield _SilentPhase()


class _SilentPhase:
    def say(self, host: str, text: str) -> None: ...

    def done(self, host: str, error: str = "") -> None: ...

    def at(self, fraction: float, text: str = "") -> None: ...
