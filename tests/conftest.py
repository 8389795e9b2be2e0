"""How long a test may take, which come first, and which run in one process."""

from __future__ import annotations

import os
from collections import Counter
from math import inf
from pathlib import Path

import pytest
from scripts.suite.table import ROOT, saved_seconds

SANDBOX = 7200 if os.environ.get("SHOAL_TEST_KIND") == "vm" else 900
"""Seconds, the cluster that a module's first test makes included. Ten times what most take: the machine may be busy."""
MATRIX = 3600


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_long(item):
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
        if item.get_closest_marker("timeout"):
            continue
        if item.get_closest_marker("matrix"):
            item.add_marker(pytest.mark.timeout(MATRIX))
        elif _is_long(item):
            item.add_marker(pytest.mark.timeout(SANDBOX))
    turns = order({item.path: group_of(item) for item in items})
    items.sort(key=lambda item: turns[item.path])


def group_of(item: pytest.Item) -> str:
    """The tests of a group run in one process, one file after the other: they share a cluster."""
    return getattr(getattr(item, "module", None), "GROUP", item.path.name)


def order(groups: dict[Path, str]) -> dict[Path, int]:
    """The turn of each file. The group that takes longest is first: begun last, it would be left to run alone.

    So says the table that was saved; a file that it does not have counts as long. Of SHOAL_TEST_ORDER=reverse, files on
    sandbox hosts run in reverse order.
    """
    saved = saved_seconds()
    seconds = {path: saved.get(str(path.relative_to(ROOT)), inf) for path in groups}
    totals: Counter[str] = Counter()
    for path, group in groups.items():
        totals[group] += seconds[path]
    files = sorted(groups, key=lambda path: (-totals[groups[path]], groups[path], -seconds[path], path))
    if os.environ.get("SHOAL_TEST_ORDER") == "reverse":
        turned = [path for path in files if "e2e" in path.parts][::-1]
        files = [path if "e2e" not in path.parts else turned.pop(0) for path in files]
    return {path: turn for turn, path in enumerate(files)}


def _is_long(item: pytest.Item) -> bool:
    return "e2e" in item.path.parts or item.get_closest_marker("sandbox") is not None
