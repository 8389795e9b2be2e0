"""Progress of long work: the terminal draws bars from it, a test records it, a script ignores it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Phase(Protocol):
    """One phase of a run."""

    def update(self, host: str, text: str) -> None:
        """What a host is doing now."""

    def done(self, host: str, error: str = "") -> None:
        """A host has finished this phase, with or without an error."""

    def set_fraction(self, fraction: float, text: str = "") -> None:
        """The fraction of the phase that is done, 0 to 1, for work that is not counted in hosts."""


class ProgressReporter(Protocol):
    """A run with phases."""

    def phase(self, title: str, total: int) -> AbstractContextManager[Phase]: ...


class NoProgress:
    """Progress that is not shown."""

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Phase]:
        yield self

    def update(self, host: str, text: str) -> None: ...

    def done(self, host: str, error: str = "") -> None: ...

    def set_fraction(self, fraction: float, text: str = "") -> None: ...


class NestedProgress(NoProgress):
    """Phases within a phase: what they say is shown in the outer one."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def update(self, host: str, text: str) -> None:
        self._phase.update(host, text)
