"""Lets the rental service order again what it ordered no more until `shoal up` runs.

rental_blocks.py LEDGER            exits with status 1 where there is something like that
rental_blocks.py LEDGER remove     the service then orders it again
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

LOCK_TIMEOUT_S = 20.0
"""How long to wait for the service, which writes the ledger."""
FIND_LASTING = "SELECT 1 FROM blocks WHERE until IS NULL LIMIT 1"
REMOVE_LASTING = "DELETE FROM blocks WHERE until IS NULL"


def main(argv: list[str]) -> int:
    ledger, *verbs = argv[1:]
    if not Path(ledger).exists():
        return 0
    database = sqlite3.connect(ledger, timeout=LOCK_TIMEOUT_S, isolation_level=None)
    try:
        if verbs == ["remove"]:
            database.execute(REMOVE_LASTING)
            return 0
        return 1 if database.execute(FIND_LASTING).fetchone() else 0
    except sqlite3.DatabaseError as error:
        if verbs:
            sys.exit(f"cannot use the ledger {ledger}: {error}")
        return 0  # the service reports it
    finally:
        database.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
