"""A ledger that moves with its controller: complete, or merged with the one on the new host."""

import json
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.unit.cloud.rentals import rental

from shoal.cloud.providers.api import FailureKind
from shoal.cloud.service.ledger import Ledger
from shoal.remote import program_text


class Controller:
    """The files of one, and the program as it runs there."""

    def __init__(self, directory: Path) -> None:
        self.ledger = directory / "var" / "ledger.db"
        self.since = directory / "etc" / "since"
        self.succeeded = directory / "var" / "succeeded"

    def run(self, verb: str, told: str = "") -> str:
        program = program_text("rental_ledger_move")
        place = [self.ledger, self.since, *([self.succeeded] if verb == "take" else [])]
        done = subprocess.run(
            [sys.executable, "-I", "-c", program, verb, *map(str, place)], input=told, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def old(tmp_path: Path) -> Controller:
    return Controller(tmp_path / "old")


@pytest.fixture
def new(tmp_path: Path) -> Controller:
    return Controller(tmp_path / "new")


def test_new_controller_gets_the_whole_ledger_with_mode_600(old: Controller, new: Controller) -> None:
    with Ledger.open(old.ledger) as ledger:
        ledger.intend(rental("t1"), rental("t2", "burst2"))
        ledger.record_machine("t1", "i-1", 2.5, 110.0)
        ledger.block("lambda", "", "", "", None, "its key is wrong")
        before, blocked = ledger.all(), ledger.blocks(0.0)
    new.run("take", old.run("give"))
    with Ledger.open(new.ledger) as ledger:
        assert (ledger.all(), ledger.blocks(0.0)) == (before, blocked)
    assert new.ledger.stat().st_mode & 0o777 == 0o600


def test_former_controller_merges_its_rows_with_the_newer_ledger(old: Controller, new: Controller) -> None:
    with Ledger.open(new.ledger) as ledger:
        ledger.intend(rental("t0", "burst3"), rental("t1"))
        ledger.record_failure("t0", FailureKind.CAPACITY, "none left", 120.0)
    with Ledger.open(old.ledger) as ledger:
        ledger.intend(rental("t1"), rental("t2", "burst2"))
        ledger.record_machine("t1", "i-1", 2.5, 110.0)
        ledger.record_release("t1", "idle", 200.0)
        ledger.record_end("t1", 210.0)
        known = {one.token: one for one in ledger.all()}
    new.run("take", old.run("give"))
    with Ledger.open(new.ledger) as ledger:
        found = {one.token: one for one in ledger.all()}
    assert found.keys() == {"t0", "t1", "t2"}
    assert (found["t1"], found["t2"], found["t0"].state) == (known["t1"], known["t2"], "failed")
    assert [path.name for path in new.ledger.parent.iterdir() if "carried" in path.name] == []


def test_older_schema_merges_by_shared_columns(old: Controller, new: Controller) -> None:
    for place in (old, new):
        with Ledger.open(place.ledger) as ledger:
            ledger.intend(rental("t1"))
            ledger.record_machine("t1", "i-1", 2.5, 110.0)
    with sqlite3.connect(old.ledger) as database:
        for column in ("prices", "unfit_machine"):
            database.execute(f"ALTER TABLE rentals DROP COLUMN {column}")
        database.execute("UPDATE rentals SET state = 'gone', gone_at = 300.0")
        database.execute("PRAGMA user_version = 1")
    database.close()
    new.run("take", old.run("give"))
    with Ledger.open(new.ledger) as ledger:
        [found] = ledger.all()
    assert (found.state, found.gone_at) == ("gone", 300.0)
    assert replace(found, state="made", gone_at=None).prices == ((0.0, 2.5),)


@cases("theirs, ours", ("", ""), ("2000000000", ""), ("1000", "2000000000"), ("no time", ""))
def test_new_leader_is_later_than_both_and_not_superseded(
    theirs: str, ours: str, old: Controller, new: Controller
) -> None:
    for place, text in ((old, theirs), (new, ours)):
        place.since.parent.mkdir(parents=True)
        place.since.write_text(text)
    new.succeeded.parent.mkdir(parents=True)
    new.succeeded.write_text("i-1 was rented by a later service")
    began = int(time.time())
    told = old.run("give")
    assert json.loads(told)["ledger"] == ""
    new.run("take", told)
    known = [int(text) for text in (theirs, ours) if text.isdigit()]
    assert int(new.since.read_text()) >= max([began, *(one + 1 for one in known)])
    assert not new.succeeded.exists() and not new.ledger.exists()
