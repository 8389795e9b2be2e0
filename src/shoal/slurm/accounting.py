"""What accounting needs of Slurm and MariaDB, as text: slurmdbd.conf, the server's settings, the accounts wanted.

Pure functions. `accounts_program.py` and `database.sh` run on the host that has the database.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from shoal.slurm.model import AccountingConf
from shoal.slurm.read import HEADER
from shoal.spec.accounting import Account, Accounting, Limits, Qos, Share
from shoal.spec.words import minutes

SLURMDBD_PORT = 6819
DATABASE = "slurm_acct_db"
PASSWORD_WORD = "@PASSWORD@"
"""Stands where the host fills in the password that it made for itself."""

JOBCOMP = "/var/log/slurm/jobcomp.log"
"""Where slurmctld notes every job that ends, with accounting and without."""
BACKUPS = "/var/backups/shoal"

GPU = "gres/gpu"
BUFFER_LEAST, BUFFER_MOST = 256, 8192


def accounting_settings(accounting: AccountingConf | None) -> dict[str, str]:
    """What slurm.conf says of slurmdbd. Shares among accounts count for something where there are accounts."""
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


def slurmdbd_conf(hostname: str, auth: str = "munge", address: str | None = None) -> str:
    """slurmdbd.conf. It reaches MariaDB through a socket, and MariaDB listens nowhere else.

    `address` is the one that its host's own name has, where it listens there alone.
    """
    other = "" if auth == "munge" else "AuthAltTypes=auth/munge\n"
    words = [] if address is None else ["NoInAddrAny"] if ":" not in address else ["NoInAddrAny", "EnableIPv6"]
    listening = f"CommunicationParameters={','.join(words)}\n" if words else ""
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
        f"StoragePass={PASSWORD_WORD}\n"
        f"StorageLoc={DATABASE}\n"
    )


def slurmdbd_drop_in() -> str:
    """slurmdbd comes back by itself, also when MariaDB is slow to start."""
    return _comes_back("Wants=mariadb.service\n")


def slurmctld_drop_in() -> str:
    """slurmctld comes back by itself, also when slurmdbd is slow to start."""
    return _comes_back()


def _comes_back(wants: str = "") -> str:
    return f"{HEADER}[Unit]\n{wants}StartLimitIntervalSec=0\n\n[Service]\nRestart=on-failure\nRestartSec=3\n"


def mariadb_conf(memory_mb: int) -> str:
    """MariaDB's settings: no port at all, and what slurmdbd wants, by the memory of the host."""
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
    wanted = memory_mb * 110 // 100 // 8
    return min(max(BUFFER_LEAST, 1 << max(0, wanted.bit_length() - 1)), BUFFER_MOST)


def database_sql() -> str:
    """The database and its one user, made or given the password that slurmdbd.conf has."""
    return (
        "-- Written by shoal; changes here are lost.\n"
        f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n"
        f"CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED BY '{PASSWORD_WORD}';\n"
        f"ALTER USER 'slurm'@'localhost' IDENTIFIED BY '{PASSWORD_WORD}';\n"
        f"GRANT ALL ON {DATABASE}.* TO 'slurm'@'localhost';\n"
        "FLUSH PRIVILEGES;\n"
    )


def database_login() -> str:
    """How the client of MariaDB logs in as slurmdbd does, to see whether that works."""
    return f"{HEADER}[client]\nuser=slurm\npassword={PASSWORD_WORD}\n"


def sacctmgr_conf(cluster: str, controller: str, auth: str = "munge", address: str | None = None) -> str:
    """A slurm.conf for sacctmgr alone, on the host of the database: it serves before the cluster has one."""
    return (
        f"{HEADER}ClusterName={cluster}\n"
        f"SlurmctldHost={controller}\n"
        f"AuthType=auth/{auth}\n"
        "AccountingStorageType=accounting_storage/slurmdbd\n"
        f"AccountingStorageHost={address or 'localhost'}\n"
        f"AccountingStoragePort={SLURMDBD_PORT}\n"
    )


def database_program(cluster: str, keep: int) -> str:
    """The program that makes, lists and restores backups."""
    text = files("shoal.slurm").joinpath("database.sh").read_text()
    settings = {"@CLUSTER@": cluster, "@DATABASE@": DATABASE, "@BACKUPS@": BACKUPS, "@KEEP@": str(keep)}
    for word, value in settings.items():
        text = text.replace(word, value)
    return text


def accounts_program() -> str:
    """The program that brings Slurm's accounts to what is wanted."""
    return files("shoal.slurm").joinpath("accounts_program.py").read_text()


def backup_service(program: str) -> str:
    return (
        f"{HEADER}[Unit]\n"
        "Description=Backup of the accounting database\n"
        "After=mariadb.service\n"
        "\n"
        "[Service]\n"
        "Type=oneshot\n"
        f"ExecStart={program} backup daily\n"
        "Nice=10\n"
        "IOSchedulingClass=idle\n"
    )


def backup_timer() -> str:
    """Every night, or at the next boot when the host was off."""
    return (
        f"{HEADER}[Unit]\n"
        "Description=Daily backup of the accounting database\n"
        "\n"
        "[Timer]\n"
        "OnCalendar=*-*-* 03:00:00\n"
        "RandomizedDelaySec=1h\n"
        "Persistent=true\n"
        "\n"
        "[Install]\n"
        "WantedBy=timers.target\n"
    )


def jobcomp_rotation() -> str:
    """logrotate's rule for the file of ended jobs. slurmctld keeps it open and appends, so it is copied."""
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


def wanted_accounts(cluster: str, accounting: Accounting) -> str:
    """The accounts, users and QOS of the spec in sacctmgr's words, for `accounts_program.py` to bring about.

    A setting without a value is one that must not be set.
    """
    users: dict[str, dict[str, dict[str, Any]]] = {}
    for name, account in accounting.accounts.items():
        for user, share in account.users.items():
            users.setdefault(user, {})[name] = _share(share)
    wanted = {
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
    return json.dumps(wanted, indent=1) + "\n"


def _parents_first(accounting: Accounting) -> Iterator[tuple[str, Account]]:
    waiting = dict(accounting.accounts)
    while waiting:
        for name in [name for name, account in waiting.items() if account.parent not in waiting]:
            yield name, waiting.pop(name)


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
    """AccountingStorageEnforce: what slurmctld refuses. Nothing where the spec does not say who may use the cluster."""
    return "associations,limits,qos" if accounting.accounts else ""
