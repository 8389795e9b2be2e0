"""Keeps the state of verbs away from that of the person who runs the tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the host keys of cluster `reef` are kept; its sandbox would be beside it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "state" / "shoal" / "reef").mkdir(parents=True)
    return tmp_path / "state" / "shoal" / "reef"
