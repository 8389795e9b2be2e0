"""Reads the ledger's rows on the controller, and marks rentals as gone whose machines no provider lists any more.

`shoal reap` and `shoal down` send it: the service may be stopped, and the Shoal there may be another version.

    rental_ledger.py LEDGER STATUS < {"ended": {TOKEN: [STATE, SECONDS AGO]}}

First marks the rentals of `ended` that are still in that state, or are being released since, as ended. Then prints the
machines that exist or may exist as JSON. Exits with status 3 where there is no ledger.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

NO_LEDGER = 3
LIVE_STATES: Final = ("intended", "made", "joined", "releasing")
"""States in which a machine exists, or may exist."""
LATE_ORDER_S = 86400.0
"""An order whose answer was lost, and that was abandoned, is still reported for this long."""
LOCK_TIMEOUT_S = 30.0
"""How long to wait for another process that writes the ledger."""
SYSTEMCTL_TIMEOUT_S = 30.0
SERVICE = "shoal-elastic"
REASON = "no list of its provider shows it: reported by `shoal reap` or `shoal down`"

SELECT_MACHINES = (
    "SELECT token, node, account, id, state, intended_at, billed_until FROM rentals WHERE state IN (?, ?, ?, ?)"
    " OR (state = 'failed' AND trouble = 'ambiguous' AND gone_at > ?) ORDER BY intended_at"
)
MARK_FAILED = (
    "UPDATE rentals SET state = 'failed', gone_at = ?, trouble = 'ambiguous', reason = ?"
    " WHERE token = ? AND state = 'intended'"
)
MARK_GONE = "UPDATE rentals SET state = 'gone', gone_at = ? WHERE token = ? AND state IN (?, 'releasing')"


def main(argv: list[str]) -> int:
    ledger, status = map(Path, argv[1:])
    if not ledger.exists():
        return NO_LEDGER
    ended = json.loads(sys.stdin.read() or "{}").get("ended", {})
    database = sqlite3.connect(ledger, timeout=LOCK_TIMEOUT_S, isolation_level=None)
    try:
        if ended:
            mark_ended(database, ended, time.time())
            remove_from_status(status, {*ended})
        now = time.time()
        print(json.dumps({"machines": read_machines(database, now, service_start(now))}))
    finally:
        database.close()
    return 0


def read_machines(database: sqlite3.Connection, now: float, started: float = float("inf")) -> list[dict[str, Any]]:
    """The machines that exist or may exist. `age` is the seconds that the provider has had to list one.

    It is 0 where the machine should exist: a list that lacks it may lag. `of_now` tells whether the running service,
    which started at `started`, ordered it.
    """
    machines = []
    rows = database.execute(SELECT_MACHINES, (*LIVE_STATES, now - LATE_ORDER_S))
    for token, node, account, id, state, intended_at, billed_until in rows:
        if state == "releasing" and billed_until is not None:
            age = LATE_ORDER_S  # its provider has accepted our delete
        else:
            age = 0.0 if state in LIVE_STATES else max(0.0, now - intended_at)
        machine = {"token": token, "node": node, "account": account, "id": id, "state": state, "age": age}
        machines.append({**machine, "of_now": intended_at >= started})
    return machines


def service_start(now: float) -> float:
    """When the running service started; never (infinity) if none runs or systemd does not say."""
    command = ["systemctl", "show", SERVICE, "-p", "ExecMainStartTimestampMonotonic", "-p", "MainPID"]
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=SYSTEMCTL_TIMEOUT_S)
        values = dict(line.split("=", 1) for line in result.stdout.decode().splitlines() if "=" in line)
        if int(values["MainPID"]):
            return now - (time.monotonic() - int(values["ExecMainStartTimestampMonotonic"]) / 1e6)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        pass
    return float("inf")


def mark_ended(database: sqlite3.Connection, ended: dict[str, list[Any]], now: float) -> None:
    """Record the end of machines in one transaction. Rows in another state by now stay as they are."""
    database.execute("BEGIN IMMEDIATE")
    for token, (state, ago) in ended.items():
        if state == "intended":
            database.execute(MARK_FAILED, (now - ago, REASON, token))
        elif state in LIVE_STATES:
            database.execute(MARK_GONE, (now - ago, token, state))
    database.execute("COMMIT")


def remove_from_status(path: Path, tokens: set[str]) -> None:
    """Remove machines from the service's status file, as the service may not run.

    The file stays readable for its owner only, whatever umask this runs with.
    """
    try:
        owner = path.stat()
        status = json.loads(path.read_text(encoding="utf-8"))
        status["machines"] = {token: machine for token, machine in status["machines"].items() if token not in tokens}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    temporary = path.with_suffix(".struck")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
        file.write(json.dumps(status))
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
