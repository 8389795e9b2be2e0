"""The hosts of `shoal run`, reached before typer, and all else that reads its options, is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.verbs.connect_early import Ahead
    from shoal.verbs.context import Context

_begun: list[Ahead] = []


def begin(words: Sequence[str]) -> None:
    """Reach the cluster that a command line names, where its file was read before.

    Words are looked at, not understood: those of the script come after its name, and it is not known yet which word
    that is. So this may be another cluster, or one too many; `begun` finds out.
    """
    if {"--help", "-h", "--dry-run"} & set(words):
        return
    from shoal.verbs.context import recalled_hosts

    file = _value(words, ("--file", "-f")) or os.environ.get("SHOAL_FILE")
    cluster = _value(words, ("--cluster",)) or os.environ.get("SHOAL_CLUSTER")
    context = recalled_hosts(Path(file) if file else None, cluster)
    if context is not None:
        from shoal.verbs.connect_early import Ahead

        _begun.append(Ahead(context))


def begun(context: Context) -> Ahead:
    """The reaching of this cluster, whether it has begun or begins now."""
    from shoal.verbs.connect_early import Ahead

    while _begun:
        ahead = _begun.pop()
        if (ahead.context.cluster, ahead.context.members) == (context.cluster, context.members):
            return ahead
        ahead.leave()
    return Ahead(context)


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else after
    return None
