"""Finds a class by name: in a table of those that ship with Shoal, or by the entry points of installed packages.

Also the command that installs the packages which a part of Shoal needs and a plain installation lacks.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module, util
from typing import TYPE_CHECKING, Any

from shoal.errors import ProviderError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def find(name: str, table: Mapping[str, str], group: str) -> Any:
    """The class of that name; None where there is none. Raises ProviderError for a package that is broken."""
    if name in table:
        module, _, attribute = table[name].partition(":")
        return getattr(import_module(module), attribute)
    for entry in _list_entry_points(group):
        if entry.name == name:
            try:
                return entry.load()
            except Exception as error:  # a foreign package may fail in any way
                raise _load_error(name, error, entry.value) from error
    return None


def make(name: str, table: Mapping[str, str], group: str, *arguments: object) -> Any:
    """An instance of the class of that name. Raises ProviderError with the known names."""
    cls = find(name, table, group)
    if cls is None:
        options = ", ".join(names(table, group))
        raise ProviderError(f"no provider is called {name!r}", hint=f"use one of: {options}")
    try:
        return cls(*arguments)
    except ProviderError:
        raise
    except Exception as error:
        if name in table:
            raise  # our own bug
        raise _load_error(name, error, f"{cls.__module__}:{cls.__qualname__}") from error


def names(table: Mapping[str, str], group: str) -> list[str]:
    """Every name that `find` knows."""
    return sorted({*table, *(entry.name for entry in _list_entry_points(group))})


def install_command(extra: str) -> str:
    """The command that installs an extra of Shoal beside this one, for a message: `PYTHON -m pip install 'a>=1'`."""
    from importlib.metadata import PackageNotFoundError, requires  # slow to import

    try:
        lines = requires("shoal") or ()
    except PackageNotFoundError:
        lines = ()
    marker = re.compile(rf"([^;]+);.*\bextra\s*==\s*['\"]{re.escape(extra)}['\"]")
    packages = [match[1].strip() for line in lines if (match := marker.match(line))] or [f"shoal[{extra}]"]
    python = shlex.quote(sys.executable or "python3")
    installer = f"{python} -m pip install" if util.find_spec("pip") else f"uv pip install --python {python}"
    return f"{installer} {' '.join(map(shlex.quote, packages))}"


def _list_entry_points(group: str) -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # slow to import, and so is scanning all packages

    return entry_points(group=group)


def _load_error(name: str, error: Exception, place: str) -> ProviderError:
    return ProviderError(f"cannot load provider {name}: {error}", hint=f"correct or remove {place}")
