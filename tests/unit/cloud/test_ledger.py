"""The ledger keeps every record complete and on disk, whatever happens to the process that writes."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.cases import cases
from tests.unit.cloud.rentals import A100, H100, rental

from shoal.cloud.providers.api import Billing, FailureKind
from shoal.cloud.rental import LIVE, TRANSITIONS, OrderBlock
from shoal.cloud.service.ledger import SCHEMA, Ledger
from shoal.errors import LedgerError
from shoal.remote import python_command
from shoal.remote import rental_blocks as program


def order(ledger: Ledger, token: str = "t1", **values: Any) -> None:
    """A machine that was ordered and made."""
    ledger.intend(rental(token, **values))
    ledger.record_machine(token, f"i-{token}", None, 110.0)


def test_states_of_a_machine_are_stored_with_their_times_and_once(path: Path) -> None:
    whole = rental(jobs=("17", "18_3"), billing=Billing(60, 120, from_up=True))
    with Ledger.open(path) as ledger:
        ledger.intend(whole)
    with Ledger.open(path) as ledger:
        assert (ledger.get("t1"), ledger.live()) == (whole, [whole])
        for name, first, again in (
            ("made", ("i-1", 30.5, 110.0), ("i-1", 99.0, 999.0)),
            ("joined", (200.0,), (999.0,)),
            ("made", ("i-1", 99.0, 999.0), ("i-1", 99.0, 999.0)),
            ("releasing", ("idle for 10m", 900.0), ("another reason", 999.0)),
            ("gone", (930.0,), (999.0,)),
        ):
            for values in (first, again):
                RECORDERS[name](ledger, "t1", *values)
        ledger.record_billing("t1", since=120.0, until=901.5)
        times = {"made_at": 110.0, "joined_at": 200.0, "released_at": 900.0, "gone_at": 930.0}
        bill = {"billed_from": 120.0, "billed_until": 901.5, "usd_hour": 30.5, "prices": ((0.0, 30.5),)}
        assert ledger.get("t1") == replace(whole, state="gone", id="i-1", reason="idle for 10m", **times, **bill)
        assert ledger.live() == []


def test_missing_price_falls_back_to_the_offer(ledger: Ledger) -> None:
    order(ledger, usd_hour=None)
    assert ledger.get("t1").usd_hour == 31.92
    ledger.record_price("t1", 0.123457, 120.0)
    assert ledger.get("t1").usd_hour == 0.123457


def test_first_price_counts_from_the_start_and_later_prices_from_their_change(ledger: Ledger) -> None:
    order(ledger)
    for price, at in ((30.0, 120.0), (30.0000001, 130.0), (33.0, 140.0), (33.0, 150.0), (29.5, 160.0)):
        ledger.record_price("t1", price, at)
    found = ledger.get("t1")
    assert found.prices == ((0.0, 30.0), (140.0, 33.0), (160.0, 29.5))
    assert found.usd_hour == 29.5


def test_failed_order_stores_its_failure_kind(ledger: Ledger) -> None:
    ledger.intend(rental())
    ledger.record_failure("t1", FailureKind.CAPACITY, "Not enough capacity", 105.0)
    found = ledger.get("t1")
    assert (found.state, found.trouble, found.live) == ("failed", "capacity", False)
    assert found.reason == "Not enough capacity"
    ledger.record_machine("t1", "i-1", None, 110.0)  # it turned up after all
    assert ledger.get("t1") == rental(state="made", id="i-1", made_at=110.0)


def test_released_order_keeps_the_id_of_a_late_machine(ledger: Ledger) -> None:
    ledger.intend(rental())
    ledger.record_release("t1", "job 17 was cancelled", 102.0)
    ledger.record_machine("t1", "i-1", 29.0, 110.0)
    found = ledger.get("t1")
    assert (found.state, found.id, found.made_at, found.usd_hour) == ("releasing", "i-1", 110.0, 29.0)
    assert found.reason == "job 17 was cancelled"


def test_reappearing_machine_is_billed_again(ledger: Ledger) -> None:
    order(ledger)
    ledger.record_release("t1", "idle", 200.0)
    ledger.record_billing("t1", until=201.0)
    ledger.record_end("t1", 230.0)
    ledger.record_release("t1", "listed again", 300.0)
    found = ledger.get("t1")
    assert (found.state, found.gone_at, found.billed_until) == ("releasing", None, None)


def test_second_machine_of_an_order_is_rejected_with_both_ids(ledger: Ledger) -> None:
    order(ledger)
    with pytest.raises(LedgerError) as caught:
        ledger.record_machine("t1", "i-2", None, 120.0)
    assert str(caught.value) == (
        "burst1: lambda has two machines for one order, i-t1 and i-2\n  fix: keep i-t1 and delete i-2"
    )
    assert ledger.get("t1").id == "i-t1"


def test_impossible_step_is_rejected_with_the_current_state(ledger: Ledger) -> None:
    ledger.intend(rental())
    with pytest.raises(LedgerError, match=r"^burst1: rental t1 is intended and cannot become joined$"):
        ledger.record_join("t1", 1.0)
    with pytest.raises(LedgerError, match=r"^the ledger has no rental nobody$"):
        ledger.record_join("nobody", 1.0)
    assert ledger.get("t1") == rental()


def test_gang_is_recorded_whole_or_not_at_all(ledger: Ledger) -> None:
    ledger.intend(rental("t3"))
    with pytest.raises(LedgerError, match=r"^burst1: token t3 is already in the ledger$"):
        ledger.intend(rental("t1"), rental("t2"), rental("t3"))
    with pytest.raises(LedgerError, match=r"^burst1: a rental starts as intended, not as made$"):
        ledger.intend(rental("t1"), rental("t2", state="made"))
    assert [one.token for one in ledger.all()] == ["t3"]
    ledger.intend(rental("t1"), rental("t2"))
    assert [one.token for one in ledger.all()] == ["t3", "t1", "t2"]


def test_all_since_a_time_returns_rentals_alive_then(ledger: Ledger) -> None:
    for token in ("early", "late", "now"):
        order(ledger, token)
    ledger.record_end("early", 150.0)
    ledger.record_end("late", 250.0)
    assert [one.token for one in ledger.all(200.0)] == ["late", "now"]
    assert [one.token for one in ledger.all()] == ["early", "late", "now"]


def test_rentals_of_a_node_are_newest_first(ledger: Ledger) -> None:
    ledger.intend(rental("old", intended_at=100.0))
    ledger.intend(rental("other", node="burst2", intended_at=150.0))
    ledger.intend(rental("new", intended_at=200.0))
    assert [one.token for one in ledger.of_node("burst1")] == ["new", "old"]
    assert ledger.of_node("burst3") == []


def test_no_row_can_be_deleted(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.intend(rental())
    with sqlite3.connect(path) as database, pytest.raises(sqlite3.IntegrityError, match="no row of the ledger goes"):
        database.execute("DELETE FROM rentals")
    database.close()


def test_block_ends_with_time_or_by_up(ledger: Ledger, path: Path) -> None:
    ledger.block("lambda", "gpu_8x_h100_sxm5", "us-west-1", "on-demand", 700.0, "out of it")
    ledger.block("runpod", "", "", "", None, "no money left")
    first = OrderBlock("lambda", "gpu_8x_h100_sxm5", "us-west-1", "on-demand", 700.0, "out of it")
    second = OrderBlock("runpod", why="no money left")
    assert ledger.blocks(699.0) == [first, second]
    assert ledger.blocks(700.0) == [second]
    assert (program.main(["", str(path)]), program.main(["", str(path), "remove"])) == (1, 0)
    assert ledger.blocks(0.0) == [first]
    assert program.main(["", str(path)]) == 0


def test_program_that_unblocks_leaves_no_ledger_and_names_a_broken_one(tmp_path: Path) -> None:
    command = python_command("rental_blocks", str(tmp_path / "ledger.db"))
    for verb in ((), ("remove",)):
        assert subprocess.run([*command, *verb]).returncode == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "ledger.db").write_text("no database" * 100)
    assert subprocess.run(command).returncode == 0
    failed = subprocess.run([*command, "remove"], capture_output=True, text=True)
    assert (failed.returncode, failed.stderr) == (
        1,
        f"cannot use the ledger {tmp_path}/ledger.db: file is not a database\n",
    )


def test_timed_blocks_of_whole_accounts_can_be_removed(ledger: Ledger) -> None:
    ledger.block("lambda", "", "", "", 700.0, "no money left")
    ledger.block("lambda", "gpu", "us-west-1", "on-demand", 700.0, "broken")
    ledger.block("lambda", "", "", "", None, "its image does not fit", "burst")
    ledger.unblock_accounts()
    assert [block.why for block in ledger.blocks(0.0)] == ["broken", "its image does not fit"]


def test_rejected_rentals_count_until_their_job_starts(ledger: Ledger) -> None:
    for token, job, machine in (("t1", "1", "m-1"), ("t2", "2", "m-2"), ("t3", "1", "")):
        order(ledger, token, node=token, jobs=(job,))
        ledger.record_rejection(token, "broken", 120.0, machine)
        ledger.record_end(token, 130.0)
    assert [one.token for one in ledger.rejected()] == ["t1", "t2", "t3"]
    ledger.record_start("1")
    assert [(one.token, one.unfit_machine) for one in ledger.rejected()] == [("t2", "m-2")]
    assert ledger.unfit_machines("lambda") == {"m-1", "m-2"}, "they are no better since"
    assert ledger.unfit_machines("vast") == set()
    ledger.record_release("t2", "listed again", 140.0)
    assert [one.token for one in ledger.rejected()] == ["t2"]


def test_block_of_a_nodeset_leaves_the_others_open(ledger: Ledger) -> None:
    for nodeset, until in (("large", 700.0), ("huge", 800.0)):
        ledger.block("lambda", "cpu", "us-west-1", "on-demand", until, f"too small for {nodeset}", nodeset)
    ledger.block("lambda", "gpu", "us-west-1", "on-demand", 700.0, "out of it")
    assert [block.why for block in ledger.blocks(0.0, "large")] == ["too small for large", "out of it"]
    assert [block.why for block in ledger.blocks(0.0, "small")] == ["out of it"]
    assert [block.until for block in ledger.blocks(0.0)] == [700.0, 800.0, 700.0]


def test_longer_block_is_not_shortened(ledger: Ledger) -> None:
    ledger.block("a", "t", "p", "spot", 1000.0, "long")
    ledger.block("a", "t", "p", "spot", 500.0, "short")
    assert ledger.blocks(0.0) == [OrderBlock("a", "t", "p", "spot", 1000.0, "long")]
    ledger.block("a", "t", "p", "spot", None, "for good")
    ledger.block("a", "t", "p", "spot", 2000.0, "again")
    assert ledger.blocks(0.0) == [OrderBlock("a", "t", "p", "spot", None, "for good")]


@cases(
    "block, covers",
    (OrderBlock("gcp"), True),
    (OrderBlock("gcp", "a2-highgpu-1g", "us-central1-b", "on-demand"), True),
    (OrderBlock("gcp", "a2-highgpu-1g", "us-central1", "on-demand"), True),
    (OrderBlock("gcp", "a2-highgpu-1g", "us-central1-c", "on-demand"), False),
    (OrderBlock("gcp", "a2-highgpu-1g", "us-central1-b", "spot"), False),
    (OrderBlock("gcp", "a2-highgpu-8g"), False),
    (OrderBlock("lambda"), False),
)
def test_block_covers_the_offers_of_its_scope(block: OrderBlock, covers: bool) -> None:
    assert block.covers(A100) is covers


def test_last_order_time_of_an_account_survives_a_restart(path: Path) -> None:
    with Ledger.open(path) as ledger:
        assert ledger.last_order_time("lambda") == 0.0
        ledger.record_order_time("lambda", 120.0)
        ledger.record_order_time("lambda", 110.0)  # after it, by a clock that was set back
    with Ledger.open(path) as ledger:
        assert ledger.last_order_time("lambda") == 110.0


def test_ledger_is_readable_only_by_its_owner(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.intend(rental())
        modes = {one.name: one.stat().st_mode & 0o777 for one in path.parent.iterdir()}
    assert modes == {"ledger.db": 0o600, "ledger.db-wal": 0o600, "ledger.db-shm": 0o600}
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_reader_sees_whole_transactions_while_the_service_writes(path: Path) -> None:
    with Ledger.open(path) as writer:
        writer.intend(*(rental(f"a{number}") for number in range(4)))
        counts: list[int] = []
        stop = threading.Event()

        def look() -> None:
            with Ledger.read(path) as reader:
                while not stop.is_set():
                    counts.append(len(reader.live()))

        thread = threading.Thread(target=look)
        thread.start()
        for gang in range(20):
            writer.intend(*(rental(f"{gang}-{number}") for number in range(4)))
        stop.set()
        thread.join()
    assert counts
    assert all(count % 4 == 0 for count in counts)  # a gang is there whole


def test_reader_sees_writes_of_another_process_at_once(path: Path) -> None:
    with Ledger.open(path) as writer, Ledger.read(path) as reader:
        assert reader.live() == []
        writer.intend(rental())
        assert reader.live() == [rental()]
        writer.record_machine("t1", "i-1", None, 110.0)
        assert [one.state for one in reader.live()] == [one.state for one in writer.live()] == ["made"]
        writer.live().clear()  # what a caller does with its list is its own affair
        writer.record_end("t1", 120.0)
        assert reader.live() == writer.live() == []


def test_reader_cannot_write(path: Path) -> None:
    with Ledger.open(path) as writer:
        writer.intend(rental())
    with Ledger.read(path) as reader:
        assert reader.live() == [rental()]
        with pytest.raises(LedgerError, match=r"attempt to write a readonly database"):
            reader.intend(rental("t2"))


def test_second_writer_gets_a_lock_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger.open(path) as first:
        first.intend(rental())
        monkeypatch.setattr("shoal.cloud.service.ledger.LOCK_TIMEOUT_S", 0.01)
        with Ledger.open(path) as second:
            first._database.execute("BEGIN IMMEDIATE")
            with pytest.raises(LedgerError) as caught:
                second.intend(rental("t2"))
            first._database.execute("ROLLBACK")
    assert str(caught.value) == (
        f"another process has locked the ledger {path}\n  fix: only shoal-elastic.service may write it"
    )


@cases(
    "script, problem",
    *(
        (
            f"PRAGMA user_version = {schema}",
            f"the ledger {{path}} is of another Shoal: it has schema {schema}, this Shoal reads {SCHEMA}\n"
            "  fix: run `shoal up` with the Shoal that wrote it; or run `shoal reap`, and move it away",
        )
        for schema in (SCHEMA - 1, SCHEMA + 1)
    ),
    ("CREATE TABLE theirs (a)", "{path} is not a Shoal ledger\n  fix: move it away"),
    ids=["older", "newer", "foreign"],
)
def test_ledger_of_another_schema_or_program_is_rejected_and_unchanged(path: Path, script: str, problem: str) -> None:
    if "theirs" not in script:
        Ledger.open(path).close()
    path.parent.mkdir(exist_ok=True)
    with sqlite3.connect(path) as database:
        database.execute(script)
    database.close()
    before = path.read_bytes()
    for way in (Ledger.open, Ledger.read):
        with pytest.raises(LedgerError) as caught:
            way(path)
        assert problem.format(path=path) in str(caught.value)
    assert path.read_bytes() == before


@cases("damage", "text", "page")
def test_damaged_file_is_rejected_with_the_fix(path: Path, damage: str) -> None:
    if damage == "text":
        path.parent.mkdir()
        path.write_text("this is no database, and long enough to be looked at as one " * 20)
    else:
        with Ledger.open(path) as ledger:
            ledger.intend(*(rental(f"t{number}") for number in range(200)))
        content = bytearray(path.read_bytes())
        content[4096 : 2 * 4096] = os.urandom(4096)
        path.write_bytes(content)
    with pytest.raises(LedgerError) as caught:
        Ledger.open(path)
    assert str(caught.value).startswith(f"cannot use the ledger {path}: ")
    assert caught.value.hint == ("keep a copy, restore a good one, or move it away; `shoal reap` shows what is rented")


def test_unwritable_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match=r": Not a directory|: File exists"):
        Ledger.open(tmp_path / "file" / "ledger.db")


def test_unknown_field_of_an_offer_is_ignored(ledger: Ledger) -> None:
    ledger.intend(rental())
    text = ledger._database.execute("SELECT offer FROM rentals").fetchone()[0]
    ledger._database.execute("UPDATE rentals SET offer = ?", [json.dumps({**json.loads(text), "moon": 1})])
    assert ledger.get("t1") == rental()


# The state machine, by chance.

Call = tuple[str, tuple[Any, ...]]
RECORDERS = {
    "made": Ledger.record_machine,
    "joined": Ledger.record_join,
    "releasing": Ledger.record_release,
    "gone": Ledger.record_end,
    "failed": Ledger.record_failure,
}
"""The method that records each state."""
CALLS = st.sampled_from(
    [
        ("made", ("i-1", None, 2.0)),
        ("made", ("i-2", 3.5, 3.0)),
        ("joined", (4.0,)),
        ("releasing", ("idle", 5.0)),
        ("gone", (6.0,)),
        ("failed", (FailureKind.CAPACITY, "none left", 7.0)),
    ]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(CALLS, max_size=12))
def test_only_legal_steps_are_stored_and_rejected_steps_leave_no_trace(
    calls: list[Call], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Ledger.open(tmp_path_factory.mktemp("ledger") / "ledger.db") as ledger:
        ledger.intend(rental())
        for name, values in calls:
            before = ledger.get("t1")
            try:
                RECORDERS[name](ledger, "t1", *values)
            except LedgerError:
                assert ledger.get("t1") == before
                assert name not in TRANSITIONS[before.state] or (name == "made" and before.id not in ("", values[0]))
                continue
            after = ledger.get("t1")
            if after.state != before.state:
                assert after.state == name
                assert name in TRANSITIONS[before.state]
            assert (after in ledger.live()) == (after.state in LIVE)
            assert not before.id or after.id == before.id  # a recorded machine is never removed
            assert after.offer == H100


# Killed at every statement.

CHILD = """
import os, signal, sqlite3, sys
from pathlib import Path
from shoal.cloud.service.ledger import Ledger
from shoal.cloud.providers.api import FailureKind
from tests.unit.cloud.rentals import rental

connect = sqlite3.connect
left = 0

def one_statement(_):
    global left
    left -= 1
    if left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)

def connected(*args, **values):
    database = connect(*args, **values)
    database.set_trace_callback(one_statement)
    return database

def live(path, pipe):
    sqlite3.connect = connected
    told = lambda what: os.write(pipe, what.encode() + b" ")
    ledger = Ledger.open(path); told("open")
    ledger.intend(rental("a"), rental("b")); told("intended")
    ledger.record_machine("a", "i-a", 2.0, 110.0); told("made")
    ledger.record_join("a", 120.0); told("joined")
    ledger.record_failure("b", FailureKind.QUOTA, "no", 115.0); told("failed")
    ledger.block("lambda", "", "", "", None, "quota"); told("blocked")
    ledger.record_release("a", "idle", 130.0); told("releasing")
    ledger.record_end("a", 140.0); told("gone")

for statement in range(1, 200):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        left = statement
        live(Path(sys.argv[1]) / f"{statement}.db", writing)
        os._exit(0)
    os.close(writing)
    words = b""
    while more := os.read(reading, 1000):
        words += more
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(statement, status, words.decode(), flush=True)
    if status != -signal.SIGKILL:
        break
"""
STATES = {
    "": (None, None),
    "open": (None, None),
    "intended": ("intended", "intended"),
    "made": ("made", "intended"),
    "joined": ("joined", "intended"),
    "failed": ("joined", "failed"),
    "blocked": ("joined", "failed"),
    "releasing": ("releasing", "failed"),
    "gone": ("gone", "failed"),
}


def test_kill_at_any_statement_keeps_acknowledged_writes_and_no_partial_write(path: Path) -> None:
    path.parent.mkdir()
    command = [sys.executable, "-c", CHILD, str(path.parent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    order = list(STATES)
    seen: set[str] = set()
    for line in ended.stdout.splitlines():
        statement, status, *told = line.split()
        last = told[-1] if told else ""
        seen.add(last)
        with Ledger.open(path.with_name(f"{statement}.db")) as ledger:
            found = tuple(one.state if one else None for one in (ledger.get("a"), ledger.get("b")))
            # What came back is done; what was under way is done wholly or not at all.
            following = order[min(order.index(last) + 1, len(order) - 1)]
            assert found in (STATES[last], STATES[following]), (statement, last)
            if order.index(last) >= order.index("blocked"):
                assert [block.account for block in ledger.blocks(0.0)] == ["lambda"]
            ledger.intend(replace(rental("after"), node="burst2"))  # and it goes on from there
    assert status == "0", "the child never came to its end"
    assert int(statement) > 40
    assert seen == set(order)
