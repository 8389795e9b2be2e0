"""Files for accounting: slurmdbd.conf, MariaDB's settings, the backup units, and the spec's accounts.

Pure functions. `remote/slurm_accounts.py` and `remote/database.sh` run on the host with the database.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.agent.document import HEADER, render_unit
from shoal.remote import program_text
from shoal.slurm.model import AccountingConf
from shoal.slurm.state import JOBCOMP
from shoal.spec.accounting import Account, Accounting, Limits, Qos, Share
from shoal.spec.checks import minutes, slurm_time
from shoal.spec.qos_options import QOS_OPTIONS, tres_counts

SLURMDBD_PORT = 6819
DATABASE = "slurm_acct_db"
PASSWORD_PLACEHOLDER = "@PASSWORD@"
"""The host replaces it with the password that it generated."""

BACKUPS = "/var/backups/shoal"

GPU = "gres/gpu"
MIN_BUFFER_MB, MAX_BUFFER_MB = 256, 8192


def accounting_settings(accounting: AccountingConf | None) -> dict[str, str]:
    """The settings of slurm.conf for slurmdbd. Fair share needs accounts."""
    if accounting is None:
        return {}
    settings = {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": accounting.host,
        "AccountingStoragePort": str(SLURMDBD_PORT),
        "AccountingStorageTRES": GPU,
        "JobAcctGatherType": "jobacct_gather/linux",
    }
    if not accounting.enforce:
        return settings
    return {
        **settings,
        "AccountingStorageEnforce": accounting.enforce,
        "PriorityType": "priority/multifactor",
        "PriorityWeightFairshare": "10000",
        "PriorityWeightQOS": "10000",
        "PriorityWeightAge": "1000",
    }


def slurmdbd_conf(hostname: str, auth: str = "munge", address: str | None = None, *, munge: bool = True) -> str:
    """slurmdbd.conf. slurmdbd reaches MariaDB through a socket; MariaDB listens nowhere else.

    `address` is where slurmdbd listens; None listens on all addresses.
    """
    other = "AuthAltTypes=auth/munge\n" if munge and auth != "munge" else ""
    parameters = [] if address is None else ["NoInAddrAny"] if ":" not in address else ["NoInAddrAny", "EnableIPv6"]
    listening = f"CommunicationParameters={','.join(parameters)}\n" if parameters else ""
    return (
        f"{HEADER}AuthType=auth/{auth}\n{other}"
        f"DbdHost={hostname}\n"
        f"DbdPort={SLURMDBD_PORT}\n{listening}"
        "SlurmUser=slurm\n"
        "LogFile=/var/log/slurm/slurmdbd.log\n"
        "PidFile=/run/slurmdbd.pid\n"
        "StorageType=accounting_storage/mysql\n"
        "StorageHost=localhost\n"
        "StorageUser=slurm\n"
        f"StoragePass={PASSWORD_PLACEHOLDER}\n"
        f"StorageLoc={DATABASE}\n"
    )


def mariadb_conf(memory_mb: int) -> str:
    """MariaDB's settings: no TCP port, and the sizes that slurmdbd needs, by the memory of the host."""
    return (
        f"{HEADER}[mariadbd]\n"
        "skip-networking\n"
        f"innodb_buffer_pool_size={buffer_mb(memory_mb)}M\n"
        "innodb_log_file_size=64M\n"
        "innodb_lock_wait_timeout=900\n"
        "max_allowed_packet=64M\n"
    )


def buffer_mb(memory_mb: int) -> int:
    """About an eighth of the memory, as a power of two: what a host reports differs a little from boot to boot."""
    eighth = memory_mb * 110 // 100 // 8
    return min(max(MIN_BUFFER_MB, 1 << max(0, eighth.bit_length() - 1)), MAX_BUFFER_MB)


def database_sql() -> str:
    """SQL that creates the database and its user, with the password of slurmdbd.conf."""
    return (
        "-- Written by shoal; changes here are lost.\n"
        f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n"
        f"CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED BY '{PASSWORD_PLACEHOLDER}';\n"
        f"ALTER USER 'slurm'@'localhost' IDENTIFIED BY '{PASSWORD_PLACEHOLDER}';\n"
        f"GRANT ALL ON {DATABASE}.* TO 'slurm'@'localhost';\n"
        "FLUSH PRIVILEGES;\n"
    )


def database_login() -> str:
    """A client configuration that logs in as slurmdbd does, to test the password."""
    return f"{HEADER}[client]\nuser=slurm\npassword={PASSWORD_PLACEHOLDER}\n"


def sacctmgr_conf(cluster: str, controller: str, auth: str = "munge", address: str | None = None) -> str:
    """A slurm.conf for sacctmgr on the host with the database, usable before the cluster has one."""
    credentials = "CredType=cred/slurm\n" if auth == "slurm" else ""  # by default munge signs them
    return (
        f"{HEADER}ClusterName={cluster}\n"
        f"SlurmctldHost={controller}\n"
        f"AuthType=auth/{auth}\n{credentials}"
        "AccountingStorageType=accounting_storage/slurmdbd\n"
        f"AccountingStorageHost={address or 'localhost'}\n"
        f"AccountingStoragePort={SLURMDBD_PORT}\n"
    )


def database_program(cluster: str, keep: int) -> str:
    """The program that makes, lists and restores backups."""
    return program_text("database.sh", CLUSTER=cluster, DATABASE=DATABASE, BACKUPS=BACKUPS, KEEP=keep)


def backup_service(program: str) -> str:
    return render_unit(
        Unit={"Description": "Backup of the accounting database", "After": "mariadb.service"},
        Service={"Type": "oneshot", "ExecStart": f"{program} backup daily", "Nice": 10, "IOSchedulingClass": "idle"},
    )


def backup_timer() -> str:
    """Every night, or at the next boot when the host was off."""
    return render_unit(
        Unit={"Description": "Daily backup of the accounting database"},
        Timer={"OnCalendar": "*-*-* 03:00:00", "RandomizedDelaySec": "1h", "Persistent": "true"},
        Install={"WantedBy": "timers.target"},
    )


def jobcomp_rotation() -> str:
    """logrotate's rule for the file of ended jobs. slurmctld keeps the file open, so logrotate copies it."""
    return (
        f"{HEADER}{JOBCOMP} {{\n"
        "  su slurm slurm\n"
        "  size 64M\n"
        "  rotate 4\n"
        "  compress\n"
        "  delaycompress\n"
        "  copytruncate\n"
        "  missingok\n"
        "  notifempty\n"
        "}\n"
    )


# ---- accounts


def accounts_file(cluster: str, accounting: Accounting) -> str:
    """The accounts, users and QOS of the spec in sacctmgr's terms, as `remote/slurm_accounts.py` reads them.

    A setting with the value null must not be set.
    """
    users: dict[str, dict[str, dict[str, Any]]] = {}
    for name, account in accounting.accounts.items():
        for user, share in account.users.items():
            users.setdefault(user, {})[name] = _share(share)
    data = {
        "cluster": cluster,
        "qos": {name: _qos(qos) for name, qos in accounting.qos.items()},
        "accounts": {
            name: {
                "parent": account.parent,
                "description": account.description or name,
                "settings": _share(account),
            }
            for name, account in _parents_first(accounting)
        },
        "users": {name: {"default": next(iter(inside)), "accounts": inside} for name, inside in users.items()},
    }
    if any(qos.options for qos in accounting.qos.values()):
        data["qos_options"] = {name: _qos_options(qos.options) for name, qos in accounting.qos.items()}
    return json.dumps(data, indent=1) + "\n"


def _parents_first(accounting: Accounting) -> Iterator[tuple[str, Account]]:
    remaining = dict(accounting.accounts)
    while remaining:
        for name in [name for name, account in remaining.items() if account.parent not in remaining]:
            yield name, remaining.pop(name)


def _share(share: Share) -> dict[str, Any]:
    return {
        "Fairshare": str(share.fairshare),
        "QOS": ",".join(sorted(share.qos)) or None,
        "DefaultQOS": share.default_qos,
        "MaxJobs": _number(share.max_jobs),
        "MaxSubmitJobs": _number(share.max_submit),
        **_common(share),
    }


def _qos(qos: Qos) -> dict[str, Any]:
    return {
        "Priority": str(qos.priority),
        "MaxJobsPerUser": _number(qos.max_jobs),
        "MaxSubmitJobsPerUser": _number(qos.max_submit),
        "MaxTRESPerUser": _tres(gpu=qos.max_gpus_per_user),
        **_common(qos),
    }


def _qos_options(options: Mapping[str, str]) -> dict[str, str | Mapping[str, str]]:
    """Options as sacctmgr takes them: limits of resources as mappings, times as days, hours, minutes and seconds."""
    values: dict[str, str | Mapping[str, str]] = {}
    for key, value in options.items():
        form = QOS_OPTIONS[key]
        values[key] = tres_counts(value) if form == "tres" else _clock(slurm_time(value)) if form == "time" else value
    return values


def _clock(time: str) -> str:
    """A time of the spec as `1-12:00:00`; -1 is no limit."""
    if time == "INFINITE":
        return "-1"
    total = round(minutes(time) * 60)
    return f"{total // 86400}-{total // 3600 % 24:02}:{total // 60 % 60:02}:{total % 60:02}"


def _common(limits: Limits) -> dict[str, Any]:
    hours = limits.gpu_hours
    return {
        "MaxWall": _minutes(limits.max_time),
        "MaxTRESPerJob": _tres(gpu=limits.max_gpus, cpu=limits.max_cpus, node=limits.max_nodes),
        "GrpJobs": _number(limits.group_jobs),
        "GrpTRES": _tres(gpu=limits.group_gpus, cpu=limits.group_cpus),
        "GrpTRESMins": _tres(gpu=None if hours is None else hours * 60),
    }


def _tres(**counts: int | None) -> Mapping[str, str | None]:
    return {GPU if name == "gpu" else name: _number(count) for name, count in counts.items()}


def _number(value: int | None) -> str | None:
    return None if value is None else str(value)


def _minutes(time: str | None) -> str | None:
    return None if time is None or time == "INFINITE" else str(max(1, round(minutes(time))))


def enforcement(accounting: Accounting) -> str:
    """AccountingStorageEnforce: limits that slurmctld enforces. Empty where the spec has no accounts."""
    return "associations,limits,qos" if accounting.accounts else ""
