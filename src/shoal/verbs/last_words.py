"""What is to be said when a command is left at once, by a second Ctrl-C: nothing can be put away any more then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WORDS: list[Callable[[], str]] = []


@contextmanager
def last_words(words: Callable[[], str]) -> Iterator[None]:
    """Have this said if the command is left inside. Asked for only then."""
    _WORDS.append(words)
    try:
        yield
    finally:
        _WORDS.remove(words)


def spoken() -> list[str]:
    """All that is to be said now, the latest last."""
    return [words() for words in _WORDS]
