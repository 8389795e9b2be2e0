"""`shoal restore`: list the backups of the accounting database, and restore one of them."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import ShoalError, SlurmError, UsageError
from shoal.hosts.api import Host
from shoal.roles.accounting import DATABASE_PROGRAM, SACCTMGR_ENV
from shoal.verbs.context import Context
from shoal.verbs.usage import require_accounting

LATEST = "latest"
RESTORE_TIMEOUT_S = 3600.0
"""For a large database."""
SLURMDBD_COMMAND = (
    *(*SACCTMGR_ENV, "sh", "-c"),
    "timeout 60 sacctmgr -nP show cluster >/dev/null 2>&1 && echo answers || systemctl is-active slurmdbd",
)
"""Prints `answers` where slurmdbd does; else, after half a minute, its state in systemd."""


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
    """The member that runs the database."""
    backups: tuple[Backup, ...]
    """Newest first."""
    restored: str | None = None
    """The name of the backup that was restored."""
    before: str | None = None
    """The backup of the database before that."""


async def list_backups(context: Context) -> RestoreResult:
    """List the backups."""
    name = require_accounting(context)
    async with await context.connections([context.choose_one(name)]) as fleet:
        return RestoreResult(context.cluster, name, await _backups(await fleet.host(name)))


async def restore(context: Context, backup: str) -> RestoreResult:
    """Restore a backup. The current database is backed up first; jobs are not affected."""
    name = require_accounting(context)
    hosts = {member.name: member for member in (context.choose_one(name), context.controller)}
    async with await context.connections(hosts.values()) as fleet:
        host = await fleet.host(name)
        backups = await _backups(host)
        selected_backup = _choose(backups, backup)
        with context.progress.phase(f"restore {selected_backup.name}", 1) as phase:
            result = await host.run((DATABASE_PROGRAM, "restore", selected_backup.name), timeout=RESTORE_TIMEOUT_S)
            if result.status != 0:
                raise ShoalError(
                    f"{name}: cannot restore {selected_backup.name}: "
                    f"{result.error_text.strip() or result.text.strip()}",
                    hint="try another backup (`shoal restore` lists them); the records are unchanged",
                )
            phase.set_fraction(0.8, "waiting for slurmdbd")
            await _wait_for_slurmdbd(host, backup=_newest_of(await _backups(host), "restore"))
            # slurmctld reads the accounts only when it starts; jobs run on.
            controller = await fleet.host(context.controller.name)
            restart = await controller.run(
                ("sh", "-c", "systemctl restart slurmctld || scontrol reconfigure"), timeout=120
            )
            if restart.status != 0:
                raise SlurmError(
                    f"{selected_backup.name} is restored, but slurmctld on {controller.name} did not start again: "
                    f"{restart.error_text.strip()}",
                    hint="run `shoal up`",
                )
            phase.done(name)
        new_backups = await _backups(host)
    return RestoreResult(context.cluster, name, new_backups, selected_backup.name, _newest_of(new_backups, "restore"))


async def _backups(host: Host) -> tuple[Backup, ...]:
    result = await host.run((DATABASE_PROGRAM, "list"), timeout=60)
    if result.status != 0:
        raise ShoalError(f"{host.name} has no accounting database yet", hint="run `shoal up`")
    rows = [line.split(" ") for line in result.text.splitlines() if line.count(" ") == 2]
    backups = [Backup(name, int(size), float(made_at)) for name, size, made_at in rows]
    return tuple(sorted(backups, key=lambda backup: (backup.made, backup.name), reverse=True))


def _choose(backups: tuple[Backup, ...], name: str) -> Backup:
    if not backups:
        raise ShoalError("there is no backup yet", hint="one is made every night, and before every change")
    if name == LATEST:
        return backups[0]
    for backup in backups:
        if backup.name == name:
            return backup
    raise UsageError(f"there is no backup {name!r}", hint=f"`shoal restore` lists them; the newest: {backups[0].name}")


def _newest_of(backups: tuple[Backup, ...], reason: str) -> str | None:
    return next((backup.name for backup in backups if backup.name.endswith(f"-{reason}.sql.gz")), None)


async def _wait_for_slurmdbd(host: Host, backup: str | None) -> None:
    """slurmdbd first converts the tables of an older Slurm. It does not start with those of a newer one."""
    failures = 0
    for _ in range(20):
        state = (await host.run(SLURMDBD_COMMAND, timeout=90)).text.strip()
        if state == "answers":
            return
        failures += state != "active"
        if failures == 3:
            break
    raise SlurmError(
        f"slurmdbd on {host.name} does not start with this backup; `shoal ssh {host.name} journalctl -u slurmdbd` "
        "shows why",
        hint=f"`shoal restore {backup} --yes` puts back what was there",
    )
