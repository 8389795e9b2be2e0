"""How long a test may take, and which come first."""

from __future__ import annotations

import os

import pytest

SANDBOX = 7200 if os.environ.get("SHOAL_TEST_KIND") == "vm" else 900
"""Seconds, the cluster that a module's first test makes included. Ten times what most take: the machine may be busy."""
MATRIX = 3600
LONGEST = (
    *("benches", "lab", "tailscale", "image_jobs", "prove", "accounting", "stopped_jobs", "jobs", "rented_containers"),
    *("cluster", "rented_nodes", "doctor", "documented_commands", "hostile_user", "slurm_tree", "wireguard", "toy"),
    *("storage", "agent_items", "unusual_hosts", "tunnel_containers", "environments", "versions", "existing_hosts"),
    *("sandbox", "spec_changes"),
)
"""Files of tests/e2e: begun last, one of them would be left to run alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout"):
            continue
        if item.get_closest_marker("matrix"):
            item.add_marker(pytest.mark.timeout(MATRIX))
        elif _is_long(item):
            item.add_marker(pytest.mark.timeout(SANDBOX))
    items.sort(key=_turn)


def _is_long(item: pytest.Item) -> bool:
    return "e2e" in item.path.parts or item.get_closest_marker("sandbox") is not None


def _turn(item: pytest.Item) -> int:
    """The longest files of tests/e2e, all else on sandbox hosts, what imports torch or waits, and what is fast."""
    if not _is_long(item):
        return len(LONGEST) + (1 if {"train", "contract"} & {*item.path.parts} else 2)
    name = item.path.stem.removeprefix("test_")
    return LONGEST.index(name) if "e2e" in item.path.parts and name in LONGEST else len(LONGEST)
