"""The program that reads the ledger on the controller, and that marks rentals as ended."""

import json
import os
import stat
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.programs import stand_in
from tests.unit.cloud.rentals import rental

from shoal.cloud.providers.api import FailureKind
from shoal.cloud.rental import LIVE
from shoal.cloud.service.ledger import Ledger
from shoal.cloud.status_file import ServiceStatus, read_status, write_status
from shoal.remote import rental_ledger as program


def told(ledger: Path, ended: dict[str, list[object]] | None = None) -> Any:
    """Run it as a controller does: with the system's Python, and no Shoal beside it."""
    command = [
        "python3",
        "-I",
        "-c",
        Path(program.__file__).read_text(),
        str(ledger),
        str(ledger.with_name("status.json")),
    ]
    done = subprocess.run(command, input=json.dumps({"ended": ended or {}}).encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return {one["token"]: one for one in json.loads(done.stdout)["machines"]}


def kept(path: Path) -> Ledger:
    """A ledger with a rental in every state."""
    now = time.time()
    ledger = Ledger.open(path)
    for state in (*LIVE, "taken", "gone", "late", "long ago", "out"):
        ledger.intend(rental(state, state.replace(" ", "-"), intended_at=now - 500))
    for token in ("made", "joined", "releasing", "taken", "gone"):
        ledger.record_machine(token, f"i-{token}", None, now - 480)
    ledger.record_join("joined", now - 400)
    for token in ("releasing", "taken"):
        ledger.record_release(token, "idle", now - 20)
    ledger.record_billing("taken", until=now - 10)
    ledger.record_end("gone", now - 100)
    ledger.record_failure("late", FailureKind.AMBIGUOUS, "no answer", now - 300)
    ledger.record_failure("long ago", FailureKind.AMBIGUOUS, "no answer", now - 2 * 86400)
    ledger.record_failure("out", FailureKind.CAPACITY, "none left", now - 300)
    return ledger


def test_live_and_late_rows_are_listed_with_their_age(tmp_path: Path) -> None:
    kept(tmp_path / "ledger.db").close()
    found = told(tmp_path / "ledger.db")
    assert set(found) == {*LIVE, "taken", "late"}
    assert found["joined"] == {
        "token": "joined", "node": "joined", "account": "lambda", "id": "i-joined", "state": "joined", "age": 0.0,
        "of_now": False,
    }  # fmt: skip
    assert {one["age"] for token, one in found.items() if token in LIVE} == {0.0}
    assert found["taken"]["age"] == program.LATE_ORDER_S
    assert 500 <= found["late"]["age"] < program.LATE_ORDER_S


@cases(
    "pid, began, of_now",
    (1, 300, {"late"}),
    (1, 3000, {"early", "late"}),
    (0, 300, set()),
    (1, None, set()),
    ids=["between them", "before both", "none runs", "systemd does not say"],
)
def test_rows_ordered_by_the_running_service_are_marked(
    pid: int, began: float | None, of_now: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        ledger.intend(rental("early", intended_at=now - 1000), rental("late", "burst2", intended_at=now - 100))
    since = "" if began is None else int((time.monotonic() - began) * 1e6)
    stand_in(tmp_path / "systemctl", f"echo MainPID={pid}\necho ExecMainStartTimestampMonotonic={since}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert {token for token, one in told(tmp_path / "ledger.db").items() if one["of_now"]} == of_now


def test_service_sees_rows_ended_beside_the_running_service(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with kept(path) as ledger:
        assert len(ledger.live()) == 5
        ended = {token: [token, 60.0] for token in LIVE}
        assert set(told(path, ended)) == {"taken", "intended", "late"}, "an order that made nothing may still do so"
        assert [one.token for one in ledger.live()] == ["taken"]
        gone, failed = ledger.get("joined"), ledger.get("intended")
        assert gone is not None and gone.state == "gone" and gone.gone_at is not None
        assert 59 < time.time() - gone.gone_at < 500
        assert failed is not None and (failed.state, failed.trouble) == ("failed", "ambiguous")


def test_newer_ledger_state_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with kept(path) as ledger:
        told(path, {"joined": ["made", 0.0], "made": ["intended", 0.0], "gone": ["gone", 0.0], "out": ["failed", 0.0]})
        states = {token: (ledger.get(token) or rental()).state for token in ("joined", "made", "gone", "out")}
        assert states == {"joined": "joined", "made": "made", "gone": "gone", "out": "failed"}
        told(path, {"releasing": ["joined", 0.0]})
        assert (ledger.get("releasing") or rental()).state == "gone", "on its way out since, and gone"


def test_ended_machines_are_removed_from_the_service_status(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    kept(path).close()
    said = ServiceStatus(at=5.0, machines={"made": {"node": "n"}, "joined": {"node": "m"}}, jobs={"7": "waits"})
    write_status(tmp_path / "status.json", said)
    told(path, {"made": ["made", 0.0]})
    left = read_status((tmp_path / "status.json").read_text())
    assert left == replace(said, machines={"joined": {"node": "m"}})


def test_service_status_stays_readable_only_by_its_owner(tmp_path: Path) -> None:
    """The session that runs this has its own umask, mostly 022."""
    path = tmp_path / "ledger.db"
    kept(path).close()
    said = tmp_path / "status.json"
    write_status(said, ServiceStatus(at=5.0, machines={"made": {"node": "n"}}))
    said.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(said, 12345, 12346)
    before = said.stat()
    (tmp_path / "status.struck").write_text("left by one that was killed")
    told(path, {"made": ["made", 0.0]})
    after = said.stat()
    assert read_status(said.read_text()).machines == {}
    assert (stat.S_IMODE(after.st_mode), after.st_uid, after.st_gid) == (0o600, before.st_uid, before.st_gid)
    assert not (tmp_path / "status.struck").exists()


def test_missing_ledger_has_its_own_exit_status(tmp_path: Path) -> None:
    assert program.main(["held", str(tmp_path / "none.db"), str(tmp_path / "status.json")]) == program.NO_LEDGER
    assert list(tmp_path.iterdir()) == []
