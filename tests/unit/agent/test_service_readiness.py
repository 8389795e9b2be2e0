"""When a started unit counts as up."""

from pathlib import Path

import pytest

from shoal.remote.agent import context as contexts
from shoal.remote.agent import services
from shoal.remote.agent.context import ConvergeContext, OperatorConnection


class Slept(Exception):
    pass


def wait(folder: Path, monkeypatch: pytest.MonkeyPatch, unit: dict[str, str]) -> None:
    def sleep(seconds: float) -> None:
        raise Slept

    monkeypatch.setattr(contexts, "show_units", lambda names: {name: unit for name in names})
    monkeypatch.setattr(services, "unit_log", lambda name: "its log")
    monkeypatch.setattr(services.time, "sleep", sleep)
    services.wait_until_stable("it", ConvergeContext(OperatorConnection(), str(folder), [], False, str))


def test_timer_is_up_at_once_and_a_daemon_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active = {"LoadState": "loaded", "ActiveState": "active", "Result": "success"}
    wait(tmp_path, monkeypatch, active)
    with pytest.raises(Slept):
        wait(tmp_path, monkeypatch, {**active, "Type": "simple", "MainPID": "0"})
    with pytest.raises(services.Failure, match="did not stay up"):
        wait(tmp_path, monkeypatch, {**active, "ActiveState": "failed"})
