"""`shoal restore`: the backups of the accounting database, and one of them put back."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ShoalError, SlurmError, UsageError
from shoal.hosts.api import Host
from shoal.roles.accounting import DATABASE_PROGRAM, WITH_OUR_CONF, database_host
from shoal.verbs.context import Context
from shoal.verbs.usage import require_accounting

LATEST = "latest"
PATIENCE = 3600.0
"""Seconds for a large database."""
ASK = (
    *(*WITH_OUR_CONF, "sh", "-c"),
    "timeout 60 sacctmgr -nP show cluster >/dev/null 2>&1 && echo answers || systemctl is-active slurmdbd",
)
"""Prints `answers` where slurmdbd does; else after half a minute what systemd says of it."""


@dataclass(frozen=True)
class Backup:
    name: str
    size: int
    """Bytes, compressed."""
    made: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class RestoreResult:
    cluster: str
    host: str
    """The member that has the database."""
    backups: tuple[Backup, ...]
    """Newest first."""
    restored: str | None = None
    """The one that was put back."""
    before: str | None = None
    """The backup of what was there until then."""


async def list_backups(context: Context) -> RestoreResult:
    """The backups there are."""
    name = _database_host(context)
    async with await context.connections([context.choose_one(name)]) as fleet:
        return RestoreResult(context.cluster, name, await _backups(await fleet.host(name)))


async def restore(context: Context, wanted: str) -> RestoreResult:
    """Put a backup back. What is there now is backed up first, and jobs do not notice."""
    name = _database_host(context)
    hosts = {member.name: member for member in (context.choose_one(name), context.controller)}
    async with await context.connections(hosts.values()) as fleet:
        host = await fleet.host(name)
        before = await _backups(host)
        chosen = _choose(before, wanted)
        with context.progress.phase(f"restore {chosen.name}", 1) as phase:
            done = await host.run((DATABASE_PROGRAM, "restore", chosen.name), timeout=PATIENCE)
            if done.status != 0:
                raise ShoalError(
                    f"{name}: {chosen.name} could not be restored: {done.error_text.strip() or done.text.strip()}",
                    hint="the records are as they were; `shoal restore` lists the other backups",
                )
            phase.at(0.8, "waiting for slurmdbd")
            await _wait_for_slurmdbd(host, before=_newest_of(await _backups(host), "restore"))
            # It has the accounts of the other database in mind; it reads them when it starts, and jobs run on.
            controller = await fleet.host(context.controller.name)
            again = await controller.run(
                ("sh", "-c", "systemctl restart slurmctld || scontrol reconfigure"), timeout=120
            )
            if again.status != 0:
                raise SlurmError(
                    f"{chosen.name} is restored, but slurmctld on {controller.name} did not start again: "
                    f"{again.error_text.strip()}",
                    hint="run `shoal up`",
                )
            phase.done(name)
        after = await _backups(host)
    return RestoreResult(context.cluster, name, after, chosen.name, _newest_of(after, "restore"))


async def _backups(host: Host) -> tuple[Backup, ...]:
    result = await host.run((DATABASE_PROGRAM, "list"), timeout=60)
    if result.status != 0:
        raise ShoalError(f"{host.name} has no accounting database yet", hint="run `shoal up`")
    rows = [line.split(" ") for line in result.text.splitlines() if line.count(" ") == 2]
    found = [Backup(name, int(size), float(made)) for name, size, made in rows]
    return tuple(sorted(found, key=lambda backup: (backup.made, backup.name), reverse=True))


def _choose(backups: tuple[Backup, ...], wanted: str) -> Backup:
    if not backups:
        raise ShoalError("there is no backup yet", hint="one is made every night, and before every change")
    if wanted == LATEST:
        return backups[0]
    for backup in backups:
        if backup.name == wanted:
            return backup
    raise UsageError(
        f"there is no backup {wanted!r}", hint=f"`shoal restore` lists them; the newest: {backups[0].name}"
    )


def _newest_of(backups: tuple[Backup, ...], reason: str) -> str | None:
    return next((backup.name for backup in backups if backup.name.endswith(f"-{reason}.sql.gz")), None)


async def _wait_for_slurmdbd(host: Host, before: str | None) -> None:
    """It may first have to bring the tables of an older Slurm to its own. Those of a newer one it does not take."""
    failed = 0
    for _ in range(20):
        said = (await host.run(ASK, timeout=90)).text.strip()
        if said == "answers":
            return
        failed += said != "active"
        if failed == 3:
            break
    raise SlurmError(
        f"slurmdbd on {host.name} does not start with this backup; `shoal ssh {host.name} journalctl -u slurmdbd` "
        "shows why",
        hint=f"`shoal restore {before} --yes` puts back what was there",
    )


def _database_host(context: Context) -> str:
    require_accounting(context)
    name = database_host(context.spec)
    assert name is not None
    return name
