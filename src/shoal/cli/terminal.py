"""Where commands print: a terminal, or a pipe whose reader may leave."""

from __future__ import annotations

import os

from rich.console import Console

PIPE_WIDTH = 1000


class Terminal(Console):
    """A console that leaves it to the command to end when nobody reads any more; rich would exit 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stderr: bool = False) -> Console:
    """A console as wide as the terminal. What goes into a pipe or a file is not broken into lines of 80."""
    made = Terminal(stderr=stderr)
    return made if made.is_terminal or "COLUMNS" in os.environ else Terminal(stderr=stderr, width=PIPE_WIDTH)
