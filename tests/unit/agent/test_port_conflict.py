"""When a started unit counts as up, and who has the port that a daemon cannot have."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.remote.agent import context as contexts
from shoal.remote.agent import services
from shoal.remote.agent.context import ConvergeContext, OperatorConnection


@pytest.fixture
def port() -> Iterator[int]:
    """A port of this machine that is taken, by ourselves."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@cases(
    "journal, unit",
    ("slurmd: error: Error binding slurm stream socket to port ({port}): Address already in use", ""),
    ("ERROR: [Errno 98] Address already in use", "ExecStart={{ argv[]=/opt/mlflow server --port {port} --workers 2 }}"),
    ("[Errno 98] error while attempting to bind on address: address already in use", "argv[]=x --port {port}"),
    ids=["Slurm", "MLflow", "another MLflow"],
)
def test_holder_of_the_port_is_named(monkeypatch: pytest.MonkeyPatch, port: int, journal: str, unit: str) -> None:
    said = {"journalctl": journal.format(port=port), "systemctl": unit.format(port=port)}
    monkeypatch.setattr(services, "run", lambda argv: (0, said[argv[0]]))
    told = services.describe_port_conflict("it")
    assert told.startswith(f"\nport {port} is taken by ") and told.endswith(
        f"(pid {os.getpid()}); stop it and run again"
    )


@cases("journal", "Failed with result 'exit-code'.", "Address already in use")
def test_unrelated_or_unknown_errors_add_no_port_holder(
    monkeypatch: pytest.MonkeyPatch, port: int, journal: str
) -> None:
    unit = f"--port {port}" if "use" not in journal else "ExecStart=it"
    monkeypatch.setattr(services, "run", lambda argv: (0, journal if argv[0] == "journalctl" else unit))
    assert services.describe_port_conflict("it") == ""


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
