"""How long a test may take, which come first, and which run in one process."""

import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
from scripts.suite.table import ROOT, saved_seconds
from xdist.scheduler import LoadScopeScheduling

SANDBOX = 7200 if os.environ.get("SHOAL_TEST_KIND") == "vm" else 900
"""Seconds, the cluster that a module's first test makes included. Ten times what most take: the machine may be busy."""
MATRIX = 3600

# What `nohup`, or a shell for a background job, has ignored, the programs that tests start would ignore, too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A shim, as pyenv puts one before each Python, takes ten times as long as Python itself takes to start.
if Path(shutil.which("python3") or sys.executable).read_bytes()[:2] == b"#!":
    os.environ["PATH"] = f"{Path(sys.executable).resolve().parent}{os.pathsep}{os.environ['PATH']}"


class GroupScheduling(LoadScopeScheduling):
    """Hands out groups of files. pytest-xdist's own groups are lost under pytest 9.1 and newer."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout"):
            continue
        if item.get_closest_marker("matrix"):
            item.add_marker(pytest.mark.timeout(MATRIX))
        elif _is_long(item):
            item.add_marker(pytest.mark.timeout(SANDBOX))
    files = {item.nodeid.partition("::")[0] for item in items}
    turns = order({file: group_of(file) for file in files}, saved_seconds(), os.environ.get("SHOAL_TEST_ORDER", ""))
    items.sort(key=lambda item: turns[item.nodeid.partition("::")[0]])


@cache
def group_of(file: str) -> str:
    """What a file calls its GROUP, else its own name.

    The tests of a group run in one process, one file after the other: they share a cluster.
    """
    match = re.search(r'^GROUP = "(.+)"$', (ROOT / file).read_text(), re.MULTILINE)
    return match[1] if match else file


def order(groups: Mapping[str, str], saved: Mapping[str, float], kind: str) -> dict[str, int]:
    """The turn of each file. The group that takes longest is first: begun last, it would be left to run alone.

    So says the table that was saved; a file that is not in it counts as long. With `reverse`, files on sandbox hosts
    come in reverse order.
    """
    seconds = {file: saved.get(file, inf) for file in groups}
    totals: Counter[str] = Counter()
    for file, group in groups.items():
        totals[group] += seconds[file]
    files = sorted(groups, key=lambda file: (-totals[groups[file]], groups[file], -seconds[file], file))
    if kind == "reverse":
        turned = iter([file for file in reversed(files) if file.startswith("tests/e2e/")])
        files = [next(turned) if file.startswith("tests/e2e/") else file for file in files]
    return {file: turn for turn, file in enumerate(files)}


def _is_long(item: pytest.Item) -> bool:
    return "e2e" in item.path.parts or item.get_closest_marker("sandbox") is not None
