"""The ledger: every rental, its states and times, in one SQLite file on the controller.

A row is written before a machine is ordered, so that after a crash the machine is searched for by the row's token. Each
call is one transaction and is on disk when it returns. Rows are never deleted.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from shoal.cloud import rental as rows
from shoal.cloud.providers.api import FailureKind
from shoal.cloud.rental import LIVE, REJECTED, REPLACED, OrderBlock, Rental, RentalState, price_of, prices_text
from shoal.cloud.service.scheduling import MAX_DELAY_S, is_due
from shoal.errors import LedgerError
from shoal.remote.rental_ledger import LOCK_TIMEOUT_S
from shoal.roles import elastic

LEDGER = Path(elastic.LEDGER)

HOST_SEEN_INTERVAL_S = 60.0
"""How often it is written that a rented host still runs."""

APPLICATION = 0x5348_4F4C  # "SHOL", in the header of the file
SCHEMA = 6

_TABLES = (
    """CREATE TABLE rentals (
    token TEXT PRIMARY KEY, node TEXT NOT NULL, nodeset TEXT NOT NULL, account TEXT NOT NULL, offer TEXT NOT NULL,
    state TEXT NOT NULL, id TEXT NOT NULL DEFAULT '', micros_hour INTEGER,
    intended_at REAL NOT NULL, made_at REAL, joined_at REAL, released_at REAL, gone_at REAL,
    billed_from REAL, billed_until REAL, billing TEXT NOT NULL,
    jobs TEXT NOT NULL, trouble TEXT NOT NULL DEFAULT '', reason TEXT NOT NULL DEFAULT '',
    prices TEXT NOT NULL DEFAULT '[]', host_key TEXT NOT NULL DEFAULT '',
    unfit_machine TEXT NOT NULL DEFAULT ''
)""",
    "CREATE INDEX rentals_state ON rentals (state)",
    "CREATE INDEX rentals_node ON rentals (node)",
    "CREATE TRIGGER rentals_stay BEFORE DELETE ON rentals BEGIN SELECT RAISE(ABORT, 'no row of the ledger goes'); END",
    "CREATE INDEX rentals_trouble ON rentals (trouble)",
    """CREATE TABLE blocks (
    account TEXT NOT NULL, type TEXT NOT NULL, place TEXT NOT NULL, market TEXT NOT NULL,
    until REAL, why TEXT NOT NULL, nodeset TEXT NOT NULL DEFAULT '', PRIMARY KEY (account, type, place, market, nodeset)
)""",
    "CREATE TABLE paces (account TEXT PRIMARY KEY, at REAL NOT NULL)",
    # The times in which rented hosts ran: a row from a start to a stop.
    """CREATE TABLE hosts (
    token TEXT NOT NULL, begun REAL NOT NULL, seen REAL NOT NULL, stopped INTEGER NOT NULL DEFAULT 0,
    node TEXT NOT NULL, account TEXT NOT NULL, offer TEXT NOT NULL, id TEXT NOT NULL, micros_hour INTEGER,
    billing TEXT NOT NULL, PRIMARY KEY (token, begun)
)""",
)


class Ledger:
    """The open file. One process writes; any number may read."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self._database = database
        self._live: tuple[tuple[int, int], list[Rental]] = ((-1, -1), [])

    @classmethod
    def open(cls, path: Path = LEDGER) -> Self:
        """Open it for writing; create it if missing. Raises LedgerError if it is broken or has another schema."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise LedgerError(f"cannot open the ledger {path}: {error.strerror}") from error
        ledger = cls(sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None), path)
        return ledger._after(ledger._prepare)

    @classmethod
    def read(cls, path: Path = LEDGER) -> Self:
        """Open it read-only, beside the service that writes."""
        uri = f"{path.absolute().as_uri()}?mode=ro"
        try:
            ledger = cls(sqlite3.connect(uri, uri=True, timeout=LOCK_TIMEOUT_S, isolation_level=None), path)
        except sqlite3.Error as error:
            hint = "" if path.exists() else "nothing was rented yet; `shoal up` creates it"
            raise LedgerError(f"cannot open the ledger {path}: {error}", hint=hint) from error
        return ledger._after(ledger._check)

    def _after(self, check: Callable[[], None]) -> Self:
        """Itself, after a check; it is closed where that fails."""
        try:
            with self._mapped_errors():
                check()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def intend(self, *rentals: Rental) -> None:
        """Record machines that are about to be ordered: all of them or none. Call it before the order."""
        with self._transaction():
            for rental in rentals:
                if rental.state != "intended":
                    raise LedgerError(f"{rental.node}: a rental starts as intended, not as {rental.state}")
                try:
                    self._insert(rental)
                except sqlite3.IntegrityError as error:
                    raise LedgerError(f"{rental.node}: token {rental.token} is already in the ledger") from error

    def record_machine(self, token: str, id: str, usd_hour: float | None, at: float) -> None:
        """The provider made the machine. Without a price the offer's stays. A rental that is releasing stays so."""
        with self._transaction():
            before = self._require(token)
            if before.id and before.id != id:
                raise LedgerError(
                    f"{before.node}: {before.account} has two machines for one order, {before.id} and {id}",
                    hint=f"keep {before.id} and delete {id}",
                )
            if before.id and before.live:
                return
            price = before.usd_hour if usd_hour is None else usd_hour
            values = {"id": id, "micros_hour": price_of(price), "made_at": at, "gone_at": None, "trouble": ""}
            if usd_hour is not None:
                values["prices"] = prices_text([(0.0, usd_hour)])
            if before.state != "releasing":
                values |= {"state": _checked(before, "made"), "reason": ""}
            self._set(token, **values)

    def record_join(self, token: str, at: float) -> None:
        """The node takes jobs."""
        self._advance(token, "joined", joined_at=at)

    def record_release(self, token: str, why: str, at: float) -> None:
        """The machine must go. Call it before the delete. The first reason and time stay."""
        self._advance(token, "releasing", reason=why, **_release_times(at))

    def record_rejection(self, token: str, why: str, at: float, unfit_machine: str = "") -> None:
        """The same for a machine that did not become a node."""
        values = {"reason": why, "trouble": REJECTED, "unfit_machine": unfit_machine}
        self._advance(token, "releasing", **values, **_release_times(at))

    def record_start(self, job: str) -> None:
        """A job has started: its rejected machines were replaced."""
        for rental in self.rejected():
            if job in rental.jobs:
                with self._transaction():
                    self._set(rental.token, trouble=REPLACED)

    def record_end(self, token: str, at: float) -> None:
        """The provider no longer lists it: it costs nothing more."""
        self._advance(token, "gone", gone_at=at)

    def record_failure(self, token: str, failure: FailureKind, message: str, at: float) -> None:
        """Nothing was made. A machine that was made and is defective is `releasing`."""
        self._advance(token, "failed", gone_at=at, trouble=failure.value, reason=message)

    def record_billing(self, token: str, *, since: float | None = None, until: float | None = None) -> None:
        """When billing starts or ends, as the provider tells. None leaves it unchanged."""
        times = {"billed_from": since, "billed_until": until}
        with self._transaction():
            self._require(token)
            self._set(token, **{name: value for name, value in times.items() if value is not None})

    def record_price(self, token: str, usd_hour: float, at: float) -> None:
        """Record a price that the provider told: the first counts from the beginning, later ones from `at`."""
        with self._transaction():
            before = self._require(token)
            if not before.prices or price_of(usd_hour) != price_of(before.usd_hour):
                prices = [*before.prices, (at if before.prices else 0.0, usd_hour)]
                self._set(token, micros_hour=price_of(usd_hour), prices=prices_text(prices))

    def record_host_key(self, token: str, host_key: str) -> None:
        """The public host key that the machine must show from now on."""
        with self._transaction():
            self._require(token)
            self._set(token, host_key=host_key)

    def get(self, token: str) -> Rental | None:
        """The rental of a token, in any state."""
        return next(iter(self._rentals("token = ?", token)), None)

    def live(self) -> list[Rental]:
        """Rentals whose machine exists, or may exist, oldest first. Cached until something is written."""
        version = self.version
        if self._live[0] != version:
            self._live = (version, self._rentals(f"state IN ({_marks(LIVE)})", *LIVE))
        return list(self._live[1])

    @property
    def version(self) -> tuple[int, int]:
        """Changes with every write, by this or another process."""
        with self._mapped_errors():
            return self._database.total_changes, self._pragma("data_version")

    def all(self, since: float = 0.0) -> list[Rental]:
        """Rentals that were live at that time or later, oldest first; then the times of rented hosts."""
        return [*self._rentals("gone_at IS NULL OR gone_at >= ?", since), *self.hosts(since)]

    def hosts(self, since: float = 0.0) -> list[Rental]:
        """The times in which rented hosts ran, each as a rental without a nodeset. They are never `live()`."""
        with self._mapped_errors():
            found = self._execute("SELECT * FROM hosts WHERE NOT stopped OR seen >= ? ORDER BY begun, token", since)
            names = [column[0] for column in found.description]
            return [rows.host_from_row(dict(zip(names, row, strict=True))) for row in found.fetchall()]

    def record_host(self, host: Rental, at: float) -> None:
        """A rented host ran at this time. One that was started since it was last seen begins anew."""
        row = rows.host_to_row(host, at)
        with self._transaction():
            query = "SELECT begun, seen, stopped, micros_hour FROM hosts WHERE token = ? ORDER BY begun DESC"
            begun, seen, stopped, price = self._execute(query, host.token).fetchone() or (None, 0.0, 0, None)
            if begun is not None and host.begun <= seen:  # the same time, or a list has missed it
                if stopped or at - seen >= HOST_SEEN_INTERVAL_S or price != row["micros_hour"]:
                    values = (max(at, seen), row["micros_hour"], host.token, begun)
                    self._execute(
                        "UPDATE hosts SET stopped = 0, seen = ?, micros_hour = ? WHERE token = ? AND begun = ?", *values
                    )
                return
            self._execute("UPDATE hosts SET stopped = 1 WHERE token = ?", host.token)
            # The names are those of our own table.
            self._execute(f"INSERT INTO hosts ({', '.join(row)}) VALUES ({_marks(row)})", *row.values())  # nosec B608

    def record_stopped_hosts(self, account: str, running: Collection[str], at: float) -> None:
        """The hosts of an account that run no longer, at this time: all but those with these tokens."""
        for host in self.hosts(at):
            token = host.token.rpartition("@")[0]
            if host.live and host.account == account and token not in running:
                with self._transaction():
                    self._execute("UPDATE hosts SET stopped = 1, seen = ? WHERE token = ? AND NOT stopped", at, token)

    def of_node(self, node: str) -> list[Rental]:
        """The rentals of a node, newest first: the first live one counts."""
        return self._rentals("node = ?", node)[::-1]

    def rejected(self) -> list[Rental]:
        """The rentals whose machine did not become a node, oldest first, of jobs that have not started since."""
        return self._rentals("trouble = ?", REJECTED)

    def unfit_machines(self, account: str) -> frozenset[str]:
        """The physical machines of an account that are not rented again, as its provider names them."""
        with self._mapped_errors():
            query = "SELECT unfit_machine FROM rentals WHERE trouble IN (?, ?) AND account = ? AND unfit_machine != ''"
            return frozenset(row[0] for row in self._execute(query, REJECTED, REPLACED, account))

    def block(
        self, account: str, type: str, place: str, market: str, until: float | None, why: str, nodeset: str = ""
    ) -> None:
        """Block orders for something, of one nodeset or of all. A longer block stays, unless a clock was set back."""
        with self._transaction():
            if until is not None:
                self._execute("DELETE FROM blocks WHERE until > ?", until + MAX_DELAY_S)
            self._execute(
                "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET until = excluded.until,"
                " why = excluded.why WHERE until IS NOT NULL AND (excluded.until IS NULL OR excluded.until >= until)",
                *(account, type, place, market, until, why, nodeset),
            )

    def blocks(self, now: float, nodeset: str | None = None) -> list[OrderBlock]:
        """The blocks at that time, all or those for a nodeset, without those of a clock that was set back."""
        with self._mapped_errors():
            query = "SELECT * FROM blocks WHERE ?1 IS NULL OR nodeset IN ('', ?1)"
            blocks = [OrderBlock(*row) for row in self._execute(query, nodeset)]
        return [block for block in blocks if block.until is None or not is_due(block.until, now)]

    def unblock_accounts(self) -> None:
        """Remove blocks of whole accounts that end with time. `shoal up` removes those that last until then."""
        with self._transaction():
            self._execute("DELETE FROM blocks WHERE type = '' AND until IS NOT NULL")

    def record_order_time(self, account: str, at: float) -> None:
        """Record the time of an order, for the provider's minimum interval."""
        with self._transaction():
            self._execute("INSERT INTO paces VALUES (?, ?) ON CONFLICT DO UPDATE SET at = excluded.at", account, at)

    def last_order_time(self, account: str) -> float:
        """When the last order was sent; 0 for never."""
        with self._mapped_errors():
            row = self._execute("SELECT at FROM paces WHERE account = ?", account).fetchone()
        return float(row[0]) if row else 0.0

    def _prepare(self) -> None:
        if self._pragma("schema_version"):  # 0 while there are no tables
            self._check()
        self._execute("PRAGMA journal_mode = WAL")
        self._execute("PRAGMA synchronous = FULL")
        with self._transaction():
            if not self._pragma("schema_version"):
                for statement in _TABLES:
                    self._execute(statement)
                self._execute(f"PRAGMA application_id = {APPLICATION}")
                self._execute(f"PRAGMA user_version = {SCHEMA}")
        damage = self._execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise sqlite3.DatabaseError(damage)

    def _check(self) -> None:
        """Raise LedgerError if this is no ledger, or one of another schema."""
        if self._pragma("application_id") != APPLICATION:
            raise LedgerError(f"{self.path} is not a Shoal ledger", hint="move it away")
        version = self._pragma("user_version")
        if version != SCHEMA:
            raise LedgerError(
                f"the ledger {self.path} is of another Shoal: it has schema {version}, this Shoal reads {SCHEMA}",
                hint="run `shoal up` with the Shoal that wrote it; or run `shoal reap`, and move it away",
            )

    def _pragma(self, name: str) -> int:
        return int(self._execute(f"PRAGMA {name}").fetchone()[0])

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._database.execute(statement, values)

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        """Map errors of SQLite to LedgerError."""
        try:
            yield
        except sqlite3.Error as error:
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                raise LedgerError(
                    f"another process has locked the ledger {self.path}", hint="only shoal-elastic.service may write it"
                ) from error
            hint = "keep a copy, restore a good one, or move it away; `shoal reap` shows what is rented"
            raise LedgerError(f"cannot use the ledger {self.path}: {error}", hint=hint) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """One transaction."""
        with self._mapped_errors():
            self._execute("BEGIN IMMEDIATE")
            try:
                yield
                self._execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._execute("ROLLBACK")
                raise

    def _advance(self, token: str, to: RentalState, **values: object) -> None:
        """One transition of a rental. A repeated one changes nothing."""
        with self._transaction():
            before = self._require(token)
            if to != before.state:
                self._set(token, state=_checked(before, to), **values)

    def _require(self, token: str) -> Rental:
        rental = self.get(token)
        if rental is None:
            raise LedgerError(f"the ledger has no rental {token}")
        return rental

    def _set(self, token: str, **values: object) -> None:
        names = ", ".join(f"{name} = ?" for name in values)
        # The names are arguments in our own code.
        self._execute(f"UPDATE rentals SET {names} WHERE token = ?", *values.values(), token)  # nosec B608

    def _insert(self, rental: Rental) -> None:
        row = rows.to_row(rental)
        # The names are fields of Rental.
        self._execute(f"INSERT INTO rentals ({', '.join(row)}) VALUES ({_marks(row)})", *row.values())  # nosec B608

    def _rentals(self, where: str, *values: object) -> list[Rental]:
        with self._mapped_errors():
            # The conditions are in this file; what they compare with is passed beside them.
            query = f"SELECT * FROM rentals WHERE {where} ORDER BY intended_at, rowid"  # nosec B608
            cursor = self._execute(query, *values)
            names = [column[0] for column in cursor.description]
            return [rows.from_row(dict(zip(names, row, strict=True))) for row in cursor.fetchall()]


def _release_times(at: float) -> dict[str, float | None]:
    return {"released_at": at, "gone_at": None, "billed_until": None}


def _checked(before: Rental, to: RentalState) -> RentalState:
    """The new state of a rental. Raises LedgerError where it cannot become that."""
    if to not in rows.TRANSITIONS[before.state]:
        raise LedgerError(f"{before.node}: rental {before.token} is {before.state} and cannot become {to}")
    return to


def _marks(values: Sized) -> str:
    return ", ".join("?" * len(values))
