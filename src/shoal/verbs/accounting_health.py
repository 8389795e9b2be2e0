"""How accounting does: whether its two daemons run, and when the newest backup was made."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from shoal.agent.facts import Facts
from shoal.errors import HostError
from shoal.plan.connections import Connections
from shoal.roles.accounting import database_host, has_records
from shoal.slurm.accounting import BACKUPS
from shoal.spec.finding import Finding
from shoal.spec.model import Spec

PATIENCE = 15.0
OLD = 2 * 86400
"""Seconds after which a backup that is made every night should have a successor."""
COMMAND = (
    "sh",
    "-c",
    "systemctl is-active mariadb slurmdbd; systemctl show -p Result --value shoal-backup; "
    f"find {BACKUPS} -maxdepth 1 -name '*.sql.gz' -printf '%T@\\n' | sort -n | tail -n 1",
)


@dataclass(frozen=True)
class AccountingHealth:
    host: str
    """The member that has the database."""
    mariadb: str
    """`active`, or what systemd says instead."""
    slurmdbd: str
    last_backup: float | None = None
    """Seconds since the epoch; None while there is none."""
    backup_failed: bool = False
    """Whether the one of last night could not be made."""
    error: str = ""
    """Why the host could not be asked."""

    @property
    def well(self) -> bool:
        return self.mariadb == self.slurmdbd == "active"

    @property
    def down(self) -> str:
        """`MariaDB is failed, slurmdbd is inactive`; empty where both run."""
        daemons = (("MariaDB", self.mariadb), ("slurmdbd", self.slurmdbd))
        return ", ".join(f"{name} is {state}" for name, state in daemons if state != "active")

    @property
    def backup_is_missing(self) -> bool:
        """Whether last night's could not be made, or was not even tried."""
        return self.backup_failed or (self.last_backup is not None and time.time() - self.last_backup > OLD)

    @property
    def newest_backup(self) -> str:
        when = self.last_backup
        return "no backup yet" if when is None else f"newest backup {datetime.fromtimestamp(when):%Y-%m-%d %H:%M}"


async def accounting_health(fleet: Connections, spec: Spec) -> AccountingHealth | None:
    """None where the spec asks for no accounting. A host that does not answer is told of, and stops nothing."""
    name = database_host(spec)
    if name is None:
        return None
    if name not in fleet.targets:
        return AccountingHealth(name, "unknown", "unknown", error="the host is not there yet")
    try:
        result = await (await fleet.host(name)).run(COMMAND, timeout=PATIENCE)
    except HostError as error:
        return AccountingHealth(name, "unknown", "unknown", error=error.cause)
    mariadb, slurmdbd, night, made = [*result.text.split(), *["unknown"] * 4][:4]
    return AccountingHealth(name, mariadb, slurmdbd, _number(made), night not in ("success", "unknown"))


async def accounting_findings(fleet: Connections, spec: Spec, facts: Mapping[str, Facts]) -> list[Finding]:
    """What is wrong with a database that an earlier `up` made; before that there is nothing to say."""
    name = database_host(spec)
    if name is None or name not in facts or not has_records(facts[name]):
        return []
    health = await accounting_health(fleet, spec)
    if health is None or health.error:
        return []  # what is wrong with the host is said elsewhere
    findings = []
    if not health.well:
        what = "accounting does not work: jobs run on, and slurmctld keeps their records until it does"
        fix = f"run `shoal up`; `shoal ssh {name} journalctl -u mariadb -u slurmdbd` shows why"
        findings.append(Finding("error", what, health.down, fix, host=name))
    if health.backup_is_missing:
        fix = f"`shoal ssh {name} journalctl -u shoal-backup` shows why; is the disk full?"
        what = "the accounting database was not backed up last night"
        findings.append(Finding("warning", what, health.newest_backup, fix, host=name))
    return findings


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
