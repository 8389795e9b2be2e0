"""The ledger: every machine that was ever wanted, what became of it, and when, in one SQLite file on the controller.

A row is written before a machine is ordered, so that after a crash the machine is looked for by the row's token. Each
call is one transaction and on the disk when it returns; no row is ever deleted.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from shoal.elastic.clock import LONGEST, due
from shoal.elastic.rentals import LIVE, STEPS, Block, Rental, RentalState, from_row, price_of, prices_text, to_row
from shoal.errors import LedgerError
from shoal.providers.rental import Trouble

__all__ = ["LEDGER", "LIVE", "STEPS", "Block", "Ledger", "Rental", "RentalState"]

LEDGER = Path("/var/lib/shoal/elastic/ledger.db")

APPLICATION = 0x5348_4F4C  # "SHOL", in the header of the file
SCHEMA = 2
PATIENCE = 30.0
"""Seconds to wait for another process that writes."""

_TABLES = """
CREATE TABLE rentals (
    token TEXT PRIMARY KEY, node TEXT NOT NULL, nodeset TEXT NOT NULL, account TEXT NOT NULL, offer TEXT NOT NULL,
    state TEXT NOT NULL, id TEXT NOT NULL DEFAULT '', micros_hour INTEGER,
    intended_at REAL NOT NULL, made_at REAL, joined_at REAL, released_at REAL, gone_at REAL,
    billed_from REAL, billed_until REAL, billing TEXT NOT NULL,
    jobs TEXT NOT NULL, trouble TEXT NOT NULL DEFAULT '', reason TEXT NOT NULL DEFAULT '',
    prices TEXT NOT NULL DEFAULT '[]'
);
CREATE INDEX rentals_state ON rentals (state);
CREATE INDEX rentals_node ON rentals (node);
CREATE TRIGGER rentals_stay BEFORE DELETE ON rentals BEGIN SELECT RAISE(ABORT, 'no row of the ledger goes'); END;
CREATE TABLE blocks (
    account TEXT NOT NULL, type TEXT NOT NULL, place TEXT NOT NULL, market TEXT NOT NULL,
    until REAL, why TEXT NOT NULL, PRIMARY KEY (account, type, place, market)
);
CREATE TABLE paces (account TEXT PRIMARY KEY, at REAL NOT NULL);
"""
_STEPS = {2: "ALTER TABLE rentals ADD COLUMN prices TEXT NOT NULL DEFAULT '[]'"}
"""What makes a ledger of the schema before one of this."""


class Ledger:
    """The open file. One process writes; any number read meanwhile."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self._database = database
        self._live: tuple[tuple[int, int], list[Rental]] = ((-1, -1), [])

    @classmethod
    def open(cls, path: Path = LEDGER) -> Self:
        """Open it to write, and make it where there is none. Raises LedgerError where it is broken or too new."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise LedgerError(f"the ledger {path} cannot be opened: {error.strerror}") from error
        ledger = cls(sqlite3.connect(path, timeout=PATIENCE, isolation_level=None), path)
        try:
            ledger._prepare()
        except BaseException:
            ledger.close()
            raise
        return ledger

    @classmethod
    def read(cls, path: Path = LEDGER) -> Self:
        """Open it to read only, beside the service that writes."""
        uri = f"{path.absolute().as_uri()}?mode=ro"
        try:
            ledger = cls(sqlite3.connect(uri, uri=True, timeout=PATIENCE, isolation_level=None), path)
        except sqlite3.Error as error:
            hint = "" if path.exists() else "nothing was rented yet; `shoal up` sets it up"
            raise LedgerError(f"the ledger {path} cannot be opened: {error}", hint=hint) from error
        try:
            with ledger._mapped():
                ledger._check()
        except BaseException:
            ledger.close()
            raise
        return ledger

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What becomes of a machine, in the order of its life.

    def intend(self, *rentals: Rental) -> None:
        """Write down machines that are about to be ordered: all of them, or none. To be called before the order."""
        with self._writing():
            for rental in rentals:
                if rental.state != "intended":
                    raise LedgerError(f"{rental.node}: a rental begins as intended, not as {rental.state}")
                try:
                    self._insert(rental)
                except sqlite3.IntegrityError as error:
                    raise LedgerError(f"{rental.node}: token {rental.token} is in the ledger already") from error

    def made(self, token: str, id: str, usd_hour: float | None, at: float) -> None:
        """The provider has made the machine. Without a price the offer's stays. One that is to go already stays so."""
        with self._writing():
            before = self._one(token)
            if before.id and before.id != id:
                raise LedgerError(
                    f"{before.node}: {before.account} has two machines of one order, {before.id} and {id}",
                    hint=f"keep {before.id}, give {id} back",
                )
            if before.id and before.live:
                return
            price = before.usd_hour if usd_hour is None else usd_hour
            known = {"id": id, "micros_hour": price_of(price), "made_at": at, "gone_at": None, "trouble": ""}
            if usd_hour is not None:
                known["prices"] = prices_text([(0.0, usd_hour)])
            if before.state == "releasing":
                self._set(token, **known)
            else:
                self._advance(before, "made", **known, reason="")

    def joined(self, token: str, at: float) -> None:
        """The node takes jobs."""
        with self._writing():
            self._advance(self._one(token), "joined", joined_at=at)

    def releasing(self, token: str, why: str, at: float) -> None:
        """The machine is to go. To be called before the delete. Why and when it was first said stays."""
        with self._writing():
            self._advance(self._one(token), "releasing", released_at=at, reason=why, gone_at=None, billed_until=None)

    def gone(self, token: str, at: float) -> None:
        """The provider lists it no longer: it costs nothing more."""
        with self._writing():
            self._advance(self._one(token), "gone", gone_at=at)

    def failed(self, token: str, trouble: Trouble, message: str, at: float) -> None:
        """Nothing was made. A machine that was made and is no good is `releasing`."""
        with self._writing():
            self._advance(self._one(token), "failed", gone_at=at, trouble=trouble.value, reason=message)

    def billed(self, token: str, *, since: float | None = None, until: float | None = None) -> None:
        """What the provider itself tells of its bill: from when, until when. None leaves it as it is."""
        told = {"billed_from": since, "billed_until": until}
        with self._writing():
            self._one(token)
            for name, value in told.items():
                if value is not None:
                    self._set(token, **{name: value})

    def priced(self, token: str, usd_hour: float, at: float) -> None:
        """What the provider tells of the price: the first counts from the beginning, another one from then on."""
        with self._writing():
            before = self._one(token)
            if not before.prices or price_of(usd_hour) != price_of(before.usd_hour):
                prices = [*before.prices, (at if before.prices else 0.0, usd_hour)]
                self._set(token, micros_hour=price_of(usd_hour), prices=prices_text(prices))

    # What is written there.

    def get(self, token: str) -> Rental | None:
        """The rental of a token, whatever became of it."""
        return next(iter(self._rentals("token = ?", token)), None)

    def live(self) -> list[Rental]:
        """All that is there, or may be, oldest first. Asked again before anything was written, it costs nothing."""
        version = self.version
        if self._live[0] != version:
            self._live = (version, self._rentals(f"state IN ({', '.join('?' * len(LIVE))})", *LIVE))
        return list(self._live[1])

    @property
    def version(self) -> tuple[int, int]:
        """Another one after each thing that was written, by us or by another process."""
        with self._mapped():
            return self._database.total_changes, self._pragma("data_version")

    def all(self, since: float = 0.0) -> list[Rental]:
        """All that lived at that time or later, oldest first."""
        return self._rentals("gone_at IS NULL OR gone_at >= ?", since)

    def of_node(self, node: str) -> list[Rental]:
        """What a node has had, newest first: of the live ones, the first is the one that counts."""
        return self._rentals("node = ?", node)[::-1]

    # What is not to be ordered for a while, and how fast.

    def block(self, account: str, type: str, place: str, market: str, until: float | None, why: str) -> None:
        """Remember that something is not to be had. A longer block stays as it is, but for one of a clock set back."""
        with self._writing():
            if until is not None:
                self._execute("DELETE FROM blocks WHERE until > ?", until + LONGEST)
            self._execute(
                "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET until = excluded.until,"
                " why = excluded.why WHERE until IS NOT NULL AND (excluded.until IS NULL OR excluded.until >= until)",
                *(account, type, place, market, until, why),
            )

    def blocks(self, now: float) -> list[Block]:
        """What is blocked at that time. What was blocked by a clock that has been set back since is not."""
        with self._mapped():
            found = [Block(*row) for row in self._execute("SELECT * FROM blocks")]
        return [one for one in found if one.until is None or not due(one.until, now)]

    def unblock(self, account: str = "") -> None:
        """Forget what was blocked, of one account or of all: somebody has acted."""
        with self._writing():
            self._execute("DELETE FROM blocks WHERE ? IN ('', account)", account)

    def paced(self, account: str, at: float) -> None:
        """An order goes out now: the next one waits as long as the provider asks."""
        with self._writing():
            self._execute("INSERT INTO paces VALUES (?, ?) ON CONFLICT DO UPDATE SET at = excluded.at", account, at)

    def last_rate(self, account: str) -> float:
        """When the last order went out there; 0 for never."""
        with self._mapped():
            row = self._execute("SELECT at FROM paces WHERE account = ?", account).fetchone()
        return float(row[0]) if row else 0.0

    # How it is kept.

    def _prepare(self) -> None:
        with self._mapped():
            if self._pragma("schema_version"):  # 0 while there are no tables
                self._check()
            self._execute("PRAGMA journal_mode = WAL")
            self._execute("PRAGMA synchronous = FULL")
            with self._writing():
                if not self._pragma("schema_version"):
                    self._make()
                for version in range(self._pragma("user_version") + 1, SCHEMA + 1):
                    self._execute(_STEPS[version])
                    self._execute(f"PRAGMA user_version = {version}")
            found = self._execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(found)

    def _make(self) -> None:
        for statement in _statements(_TABLES):
            self._execute(statement)
        self._execute(f"PRAGMA application_id = {APPLICATION}")
        self._execute(f"PRAGMA user_version = {SCHEMA}")

    def _check(self) -> None:
        """Whether it is a ledger, and one that we know how to read."""
        if self._pragma("application_id") != APPLICATION:
            raise LedgerError(f"{self.path} is not a ledger of Shoal's", hint="move it away")
        version = self._pragma("user_version")
        if version > SCHEMA:
            raise LedgerError(
                f"the ledger {self.path} is a newer Shoal's: it has schema {version}, this one knows {SCHEMA}",
                hint="run `shoal up` with the newer Shoal",
            )

    def _pragma(self, name: str) -> int:
        return int(self._execute(f"PRAGMA {name}").fetchone()[0])

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._database.execute(statement, values)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """SQLite's errors in our words."""
        try:
            yield
        except sqlite3.Error as error:
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                raise LedgerError(
                    f"another process writes the ledger {self.path}", hint="only shoal-elastic.service is to write it"
                ) from error
            hint = "keep a copy, put back a good one, or move it away: `shoal reap` shows what is rented"
            raise LedgerError(f"the ledger {self.path} cannot be used: {error}", hint=hint) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction."""
        with self._mapped():
            self._execute("BEGIN IMMEDIATE")
            try:
                yield
                self._execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._execute("ROLLBACK")
                raise

    def _advance(self, before: Rental, to: RentalState, **values: object) -> None:
        """One step of a rental's life. One that was taken before changes nothing."""
        if to == before.state:
            return
        if to not in STEPS[before.state]:
            raise LedgerError(f"{before.node}: rental {before.token} is {before.state}, and cannot become {to}")
        self._set(before.token, state=to, **values)

    def _one(self, token: str) -> Rental:
        found = self.get(token)
        if found is None:
            raise LedgerError(f"the ledger has no rental {token}")
        return found

    def _set(self, token: str, **values: object) -> None:
        names = ", ".join(f"{name} = ?" for name in values)
        self._execute(f"UPDATE rentals SET {names} WHERE token = ?", *values.values(), token)

    def _insert(self, rental: Rental) -> None:
        row = to_row(rental)
        self._execute(f"INSERT INTO rentals ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", *row.values())

    def _rentals(self, where: str, *values: object) -> list[Rental]:
        with self._mapped():
            cursor = self._execute(f"SELECT * FROM rentals WHERE {where} ORDER BY intended_at, rowid", *values)
            names = [column[0] for column in cursor.description]
            return [from_row(dict(zip(names, row, strict=True))) for row in cursor.fetchall()]


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one: `executescript` would end the transaction it runs in."""
    statement = ""
    for line in script.strip().splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
