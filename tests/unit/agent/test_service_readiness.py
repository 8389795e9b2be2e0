"""When a started unit counts as up."""

from __future__ import annotations

import pytest

from shoal.remote.agent import services


class Slept(Exception):
    pass


def wait(monkeypatch: pytest.MonkeyPatch, unit: dict[str, str]) -> None:
    def sleep(seconds: float) -> None:
        raise Slept

    monkeypatch.setattr(services, "show_units", lambda names: {name: unit for name in names})
    monkeypatch.setattr(services, "unit_log", lambda name: "its log")
    monkeypatch.setattr(services.time, "sleep", sleep)
    services.wait_until_stable("it")


def test_timer_is_up_at_once_and_a_daemon_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    active = {"LoadState": "loaded", "ActiveState": "active", "Result": "success"}
    wait(monkeypatch, active)
    with pytest.raises(Slept):
        wait(monkeypatch, {**active, "Type": "simple", "MainPID": "0"})
    with pytest.raises(services.Failure, match="did not stay up"):
        wait(monkeypatch, {**active, "ActiveState": "failed"})
