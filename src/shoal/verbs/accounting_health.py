"""How accounting does: whether its two daemons run, and when the newest backup was made."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import HostError
from shoal.plan.connections import Connections
from shoal.roles.accounting import database_host
from shoal.slurm.accounting import BACKUPS
from shoal.spec.model import Spec

PATIENCE = 15.0
COMMAND = (
    "sh",
    "-c",
    "systemctl is-active mariadb slurmdbd; "
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
    error: str = ""
    """Why the host could not be asked."""

    @property
    def well(self) -> bool:
        return self.mariadb == self.slurmdbd == "active"


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
    said = [*result.text.split(), "unknown", "unknown"]
    return AccountingHealth(name, said[0], said[1], _number(said[2]))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
