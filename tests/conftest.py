"""How long a test may take, and which come first."""

from __future__ import annotations

import os

import pytest

SANDBOX = 7200 if os.environ.get("SHOAL_TEST_KIND") == "vm" else 900
"""Seconds, the cluster that a module's first test makes included. Ten times what most take: the machine may be busy."""
MATRIX = 3600
LONGEST = (
    *("lab", "benches", "tailscale", "image_jobs", "doctor", "jobs", "wireguard", "slurm_tree", "accounting"),
    *("rented_containers", "tunnel_containers", "hostile_user", "prove", "toy", "storage", "cluster", "rented_nodes"),
    *("environments", "documented_commands", "spec_changes", "rented_host_keys", "existing_hosts", "agent_items"),
    *("stopped_jobs", "unusual_hosts", "versions", "sandbox", "slurm_tree_jobs"),
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
