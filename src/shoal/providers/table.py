"""Finding a class by its name: in a table of those that come with Shoal, or among installed packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.errors import ProviderError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def find(name: str, table: Mapping[str, str], group: str) -> Any:
    """The class of that name; None where nobody has one. Raises ProviderError for a package that is broken."""
    if name in table:
        module, _, attribute = table[name].partition(":")
        return getattr(import_module(module), attribute)
    for entry in _installed(group):
        if entry.name == name:
            try:
                return entry.load()
            except Exception as error:  # somebody else's package may fail in any way
                raise _broken(name, error, entry.value) from error
    return None


def make(name: str, table: Mapping[str, str], group: str, *arguments: object) -> Any:
    """What the class of that name makes of the arguments. Raises ProviderError, with the names there are."""
    found = find(name, table, group)
    if found is None:
        known = ", ".join(names(table, group))
        raise ProviderError(f"no provider is called {name!r}", hint=f"use one of: {known}")
    try:
        return found(*arguments)
    except ProviderError:
        raise
    except Exception as error:
        if name in table:
            raise  # a fault of ours
        raise _broken(name, error, f"{found.__module__}:{found.__qualname__}") from error


def names(table: Mapping[str, str], group: str) -> list[str]:
    """Every name that `find` knows."""
    return sorted({*table, *(entry.name for entry in _installed(group))})


def _installed(group: str) -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # loading it takes a while, and so does looking through all packages

    return entry_points(group=group)


def _broken(name: str, error: Exception, place: str) -> ProviderError:
    return ProviderError(f"provider {name} cannot be loaded: {error}", hint=f"correct or remove {place}")
