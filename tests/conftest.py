"""How long a test may take: what hangs fails in the end, and says where."""

from __future__ import annotations

import pytest

SANDBOX = 900
"""Seconds, the cluster that a module's first test makes included. Ten times what most take: the machine may be busy."""
MATRIX = 3600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout"):
            continue
        if item.get_closest_marker("matrix"):
            item.add_marker(pytest.mark.timeout(MATRIX))
        elif item.get_closest_marker("sandbox") or "e2e" in item.path.parts:
            item.add_marker(pytest.mark.timeout(SANDBOX))
