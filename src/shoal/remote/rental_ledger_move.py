"""Moves the ledger from the old controller to the new one.

`shoal up` runs this program on both hosts while neither runs the rental service.

    rental_ledger_move.py give LEDGER SINCE                      prints {"ledger": "…", "since": 1763200000}
    rental_ledger_move.py take LEDGER SINCE SUPERSEDED < that    makes the service here the leader
"""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import sys
import tempfile
import time
import zlib
from contextlib import closing
from pathlib import Path


def main(argv: list[str]) -> int:
    verb, ledger, since, *superseded = argv[1], *map(Path, argv[2:])
    if verb == "give":
        print(json.dumps({"ledger": export_ledger(ledger), "since": leader_since(since)}))
        return 0
    moved = json.loads(sys.stdin.read())
    ledger.parent.mkdir(parents=True, exist_ok=True)
    if moved["ledger"]:
        import_ledger(ledger, zlib.decompress(base64.b64decode(moved["ledger"])))
    since.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    since.write_text(f"{max(int(time.time()), moved['since'] + 1, leader_since(since) + 1)}\n")
    for path in superseded:
        path.unlink(missing_ok=True)
    return 0


def export_ledger(ledger: Path) -> str:
    """The whole ledger as text; empty where there is none."""
    if not ledger.exists():
        return ""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "ledger.db"
        with closing(sqlite3.connect(ledger)) as database, closing(sqlite3.connect(copy)) as target:
            database.backup(target)
        return base64.b64encode(zlib.compress(copy.read_bytes())).decode()


def import_ledger(ledger: Path, content: bytes) -> None:
    """Put it in place; where this host has one of its own, from when it was the controller before, both become one."""
    fresh = ledger.with_suffix(".carried")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if ledger.exists():
        merge(ledger, fresh)
        fresh.unlink()
    else:
        fresh.replace(ledger)


def merge(ledger: Path, carried: Path) -> None:
    """Add the moved ledger's rows, which are newer. Its version may differ: only columns that both have are copied."""
    with closing(sqlite3.connect(ledger, isolation_level=None)) as database:
        database.execute("ATTACH ? AS carried", (str(carried),))
        names = sorted(columns(database, "main") & columns(database, "carried"))
        changed = ", ".join(f"{name} = excluded.{name}" for name in names if name != "token")
        listed = ", ".join(names)
        # The names are columns of our own table.
        query = f"INSERT INTO main.rentals ({listed}) SELECT {listed} FROM carried.rentals WHERE true"  # nosec B608
        database.execute(query + f" ON CONFLICT (token) DO UPDATE SET {changed}")  # nosec B608
        listed = ", ".join(sorted(columns(database, "main", "hosts") & columns(database, "carried", "hosts")))
        if listed:  # an older ledger has no such table
            query = f"INSERT OR REPLACE INTO main.hosts ({listed}) SELECT {listed} FROM carried.hosts"  # nosec B608
            database.execute(query)


def columns(database: sqlite3.Connection, schema: str, table: str = "rentals") -> set[str]:
    return {row[1] for row in database.execute(f"PRAGMA {schema}.table_info({table})")}


def leader_since(path: Path) -> int:
    """Since when the service on this host is in charge; 0 where nothing says so."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
