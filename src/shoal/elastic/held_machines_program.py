"""What the ledger holds, told to the operator's machine, and struck off where that has seen that it is gone.

`shoal reap` and `shoal down` send this program to the controller and run it there with the host's own python3 and
nothing but the standard library: the service may be stopped, and the Shoal there another version.

    held_machines_program.py LEDGER STATUS < {"ended": {TOKEN: [STATE, SECONDS AGO]}}

Prints the machines that are there or may be as JSON, after those of `ended` that are still in that state, or on their
way out since, were struck off. Ends with status 3 where there is no ledger.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NO_LEDGER = 3
LIVE = ("intended", "made", "joined", "releasing")
LATE_SECONDS = 86400.0
"""So long after it was given up on, a machine of an order whose answer got lost is still told of."""
PATIENCE = 30.0
SERVICE = "shoal-elastic"
WHY = "no list of its provider's shows it: told by `shoal reap` or `shoal down`"

_HELD = """
SELECT token, node, account, id, state, intended_at, billed_until FROM rentals
WHERE state IN ('intended', 'made', 'joined', 'releasing')
OR (state = 'failed' AND trouble = 'ambiguous' AND gone_at > ?) ORDER BY intended_at
"""


def main(argv: list[str]) -> int:
    ledger, status = map(Path, argv[1:])
    if not ledger.exists():
        return NO_LEDGER
    ended = json.loads(sys.stdin.read() or "{}").get("ended", {})
    database = sqlite3.connect(ledger, timeout=PATIENCE, isolation_level=None)
    try:
        if ended:
            strike(database, ended, time.time())
            forget(status, {*ended})
        print(json.dumps({"machines": held(database, time.time(), started(time.time()))}))
    finally:
        database.close()
    return 0


def held(database: sqlite3.Connection, now: float, began: float = float("inf")) -> list[dict[str, Any]]:
    """Each machine, with the seconds that its provider has had to list it, and whether the service of now ordered it.

    One that should be there has had none: where no list shows it, that is the list's fault until it has had its time.
    """
    found = []
    rows = database.execute(_HELD, (now - LATE_SECONDS,))
    for token, node, account, id, state, intended_at, billed_until in rows:
        if state == "releasing" and billed_until is not None:
            age = LATE_SECONDS  # its provider has taken our delete, and knows it
        else:
            age = 0.0 if state in LIVE else max(0.0, now - intended_at)
        known = {"token": token, "node": node, "account": account, "id": id, "state": state, "age": age}
        found.append({**known, "of_now": intended_at >= began})
    return found


def started(now: float) -> float:
    """When the service began that runs now; never, where none runs or systemd does not say."""
    ask = ["systemctl", "show", SERVICE, "-p", "ExecMainStartTimestampMonotonic", "-p", "MainPID"]
    try:
        said = subprocess.run(ask, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=PATIENCE).stdout.decode()
        told = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
        if int(told["MainPID"]):
            return now - (time.monotonic() - int(told["ExecMainStartTimestampMonotonic"]) / 1e6)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        pass
    return float("inf")


def strike(database: sqlite3.Connection, ended: dict[str, list[Any]], now: float) -> None:
    """Note the end of machines, all in one transaction. What the ledger knows better by now is left as it is."""
    database.execute("BEGIN IMMEDIATE")
    for token, (state, ago) in ended.items():
        if state == "intended":
            database.execute(
                "UPDATE rentals SET state = 'failed', gone_at = ?, trouble = 'ambiguous', reason = ?"
                " WHERE token = ? AND state = 'intended'",
                (now - ago, WHY, token),
            )
        elif state in LIVE:
            database.execute(
                "UPDATE rentals SET state = 'gone', gone_at = ? WHERE token = ? AND state IN (?, 'releasing')",
                (now - ago, token, state),
            )
    database.execute("COMMIT")


def forget(path: Path, tokens: set[str]) -> None:
    """Take machines out of what the service last said: it may not be there to say anything else.

    Nobody else may read it, as when the service writes it, whatever umask this runs with.
    """
    try:
        owner = path.stat()
        told = json.loads(path.read_text(encoding="utf-8"))
        told["machines"] = {token: one for token, one in told["machines"].items() if token not in tokens}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    temporary = path.with_suffix(".struck")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
        file.write(json.dumps(told))
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
