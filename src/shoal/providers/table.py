"""Finding a class by its name: in a table of those that come with Shoal, or among installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from shoal.errors import ProviderError


def make(name: str, table: Mapping[str, str], group: str, *arguments: object) -> Any:
    """What the class of that name makes of the arguments. Raises ProviderError with the names there are."""
    if name in table:
        module, _, attribute = table[name].partition(":")
        return getattr(import_module(module), attribute)(*arguments)
    # Looking through all installed packages takes a while.
    others = {entry.name: entry for entry in entry_points(group=group)}
    if name not in others:
        known = ", ".join(sorted({*table, *others}))
        raise ProviderError(f"no provider is called {name!r}", hint=f"use one of: {known}")
    try:
        return others[name].load()(*arguments)
    except Exception as error:  # somebody else's package may fail in any way
        raise ProviderError(
            f"provider {name} cannot be loaded: {error}", hint=f"mend or remove {others[name].value}"
        ) from error
