"""Where commands print: a terminal, or a pipe whose reader may leave."""

from __future__ import annotations

import os

from rich.console import Console

PIPE_WIDTH = 1000


class Terminal(Console):
    """A console without rich's guesses at what to colour, which ends a command quietly when nobody reads any more."""

    def __init__(self, stderr: bool, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False)

    def on_broken_pipe(self) -> None:  # rich would exit 1
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """A console as wide as the terminal. What goes into a pipe or a file is not broken into lines of 80."""
    made = Terminal(stderr)
    return made if made.is_terminal or "COLUMNS" in os.environ else Terminal(stderr, PIPE_WIDTH)
