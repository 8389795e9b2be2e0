"""Accounting: MariaDB and slurmdbd on one member, with its own password, daily backups and the spec's accounts."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import Command, Directory, Document, File, Item, Secret, Service
from shoal.agent.facts import Facts
from shoal.roles.cluster import Cluster
from shoal.roles.own_address import DROP_INS, awaits_address, own_address
from shoal.roles.part import How, Part
from shoal.roles.stage import Stage
from shoal.slurm import accounting as text
from shoal.slurm.versions import Version
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec

SACCTMGR_CONF = "/etc/shoal/accounting.conf"
"""Where it is, this host has, or had, the database: nothing else asks for it."""
ACCOUNTS = "/etc/shoal/accounts.json"
RECORD = "/var/lib/shoal/accounts.json"
LIMITS = "accounts, users and limits"
PASSWORD = "/etc/shoal/slurmdbd.password"
SQL = "/etc/shoal/slurmdbd.sql"
LOGIN = "/etc/shoal/slurmdbd.cnf"
SLURMDBD_CONF = "/etc/slurm/slurmdbd.conf"
SLURMDBD_DROP_IN = "/etc/systemd/system/slurmdbd.service.d/shoal.conf"
SLURMCTLD_DROP_IN = "/etc/systemd/system/slurmctld.service.d/shoal.conf"
MARIADB_CONF = "/etc/mysql/mariadb.conf.d/90-shoal.cnf"
PROGRAMS = "/usr/local/lib/shoal"
DATABASE_PROGRAM = f"{PROGRAMS}/accounting-database"
ACCOUNTS_PROGRAM = f"{PROGRAMS}/accounts.py"
BACKUP_SERVICE = "/etc/systemd/system/shoal-backup.service"
BACKUP_TIMER = "/etc/systemd/system/shoal-backup.timer"
TIMER = "shoal-backup.timer"

FILLS = ((text.PASSWORD_WORD, PASSWORD),)
WITH_OUR_CONF = ("env", f"SLURM_CONF={SACCTMGR_CONF}")


class AccountingPart(Part):
    files: Mapping[str, How] = {SACCTMGR_CONF: "there", SLURMCTLD_DROP_IN: "there"}
    services = ("mariadb", "slurmdbd", TIMER)

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        return ("mariadb-server", "slurmdbd") if has_database(spec, member) else ()

    def ports(self, spec: Spec, member: Member) -> tuple[str, ...]:
        return (str(text.SLURMDBD_PORT),) if has_database(spec, member) else ()

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if has_database(cluster.spec, member):
            services = (*patience(cluster, member), *database(cluster, member))
            return {Stage.SERVICES: services, Stage.NODES: accounts(cluster, member)}
        gone = without_database() if _there(cluster, member, SACCTMGR_CONF) else ()
        return {Stage.SERVICES: (*patience(cluster, member), *gone)}

    def farewell(self) -> Document:
        return (File(SLURMCTLD_DROP_IN), *without_database())

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        finding = left_records(cluster.spec, cluster.facts)
        return (finding,) if finding else ()


def patience(cluster: Cluster, member: Member) -> Document:
    """slurmctld ends at its start when slurmdbd goes away just then; with accounting it tries again by itself."""
    if "controller" not in member.roles:
        return ()
    if cluster.spec.accounting is not None:
        return (
            Directory("/etc/systemd/system/slurmctld.service.d"),
            File(SLURMCTLD_DROP_IN, text.slurmctld_drop_in()),
        )
    return (File(SLURMCTLD_DROP_IN),) if _there(cluster, member, SLURMCTLD_DROP_IN) else ()


def _there(cluster: Cluster, member: Member, path: str) -> bool:
    return _has(cluster.facts[member.name], path)


def _has(facts: Facts, path: str) -> bool:
    found = facts.files.get(path)
    return found is not None and found.there


def database_host(spec: Spec) -> str | None:
    """The member that has the database; None without accounting."""
    if spec.accounting is None:
        return None
    return spec.accounting.host or members_of(spec)[0].name


def has_database(spec: Spec, member: Member) -> bool:
    return database_host(spec) == member.name


def database(cluster: Cluster, member: Member) -> Document:
    """MariaDB, slurmdbd and backups; slurmctld finds all of it running when it starts."""
    facts, spec, address = cluster.facts[member.name], cluster.spec, own_address(cluster, member)
    assert spec.accounting is not None
    mine = {"owner": "root", "group": "root", "mode": 0o600, "fills": FILLS}
    return (
        Directory("/etc/shoal"),
        File(MARIADB_CONF, text.mariadb_conf(facts.memory_mb), restarts=("mariadb",)),
        Service("mariadb", command=("/usr/bin/mariadbd-safe",)),
        Secret(PASSWORD),
        File(SQL, text.database_sql(), **mine),  # type: ignore[arg-type]
        File(LOGIN, text.database_login(), **mine),  # type: ignore[arg-type]
        Command(
            "accounting database",
            # The password is in the statement, and MariaDB shows the one that it does not take.
            ("bash", "-o", "pipefail", "-c", f"mariadb < {SQL} 2>&1 | sed -n '/^ERROR/{{s/ near .*//;p}}'"),
            unless=("mariadb", f"--defaults-extra-file={LOGIN}", "-e", "SELECT 1", text.DATABASE),
            retries=5,
            restarts=("slurmdbd",),
        ),
        Directory("/etc/systemd/system/slurmdbd.service.d"),
        File(SLURMDBD_DROP_IN, text.slurmdbd_drop_in()),
        awaits_address(cluster, member, "slurmdbd"),
        File(
            SLURMDBD_CONF,
            text.slurmdbd_conf(facts.hostname, spec.auth, address),
            owner="slurm",
            group="slurm",
            mode=0o600,
            restarts=("slurmdbd",),
            keep=True,
            fills=FILLS,
        ),
        Directory("/var/log/slurm", owner="slurm", group="slurm"),
        Service("slurmdbd", command=("/usr/sbin/slurmdbd", "-D")),
        File(SACCTMGR_CONF, text.sacctmgr_conf(spec.cluster, cluster.controller.name, spec.auth, address)),
        Command(
            "register the cluster",
            (*WITH_OUR_CONF, "sacctmgr", "-i", "add", "cluster", spec.cluster),
            unless=(
                *(*WITH_OUR_CONF, "bash", "-c"),
                f"{answers(address)} && "
                f"sacctmgr -nP show cluster {spec.cluster} format=cluster | grep -qx {spec.cluster}",
            ),
            # The first start makes all the tables.
            retries=15,
        ),
        Directory(PROGRAMS),
        File(DATABASE_PROGRAM, text.database_program(spec.cluster, spec.accounting.backups), mode=0o755),
        File(BACKUP_SERVICE, text.backup_service(DATABASE_PROGRAM)),
        File(BACKUP_TIMER, text.backup_timer(), restarts=(TIMER,)),
        Service(TIMER),
    )


def answers(address: str | None) -> str:
    """Whether slurmdbd listens, for bash. sacctmgr itself waits half a minute for one that does not."""
    return f"exec 3<>/dev/tcp/{address or '127.0.0.1'}/{text.SLURMDBD_PORT}"


def accounts(cluster: Cluster, member: Member) -> Document:
    """The spec's accounts, users and QOS. slurmctld runs by then, from which slurmdbd learns that there are GPUs."""
    spec = cluster.spec
    assert spec.accounting is not None
    program = (*WITH_OUR_CONF, "python3", "-I", ACCOUNTS_PROGRAM)
    answering = answers(own_address(cluster, member))
    return (
        File(ACCOUNTS_PROGRAM, text.accounts_program(), mode=0o755),
        File(ACCOUNTS, text.wanted_accounts(spec.cluster, spec.accounting), reloads=(f"command {LIMITS}",)),
        Command(
            LIMITS,
            (*program, "apply", ACCOUNTS, RECORD, DATABASE_PROGRAM, "backup", "change"),
            unless=("bash", "-c", f"{answering} && exec {' '.join(program)} check {ACCOUNTS} {RECORD}"),
            fix="mend what it names",
        ),
    )


def without_database() -> Document:
    """All of it stopped and taken away, but the records: the database, its backups and what we made in it stay."""
    ours = ("test", "!", "-e", SACCTMGR_CONF)
    files = (
        *(SQL, LOGIN, PASSWORD, ACCOUNTS, ACCOUNTS_PROGRAM, DATABASE_PROGRAM, BACKUP_TIMER, BACKUP_SERVICE),
        *(SLURMDBD_DROP_IN, DROP_INS["slurmdbd"], SLURMDBD_CONF, MARIADB_CONF),
    )
    items: list[Item] = [
        Command("last backup of the accounting database", (DATABASE_PROGRAM, "backup", "last"), unless=ours),
        Service("slurmdbd", enabled=False, running=False),
        Service(TIMER, enabled=False, running=False),
        # Where it is not ours it may be somebody else's.
        Command("stop MariaDB", ("systemctl", "disable", "--now", "mariadb"), unless=ours),
        *(File(path) for path in files),
        File(SACCTMGR_CONF),
    ]
    return tuple(items)


def has_records(facts: Facts) -> bool:
    """Whether an earlier run made the database on this host."""
    return _has(facts, SACCTMGR_CONF)


def left_records(spec: Spec, facts: Mapping[str, Facts]) -> Finding | None:
    """That the database is to be on another host than it is, where it begins empty."""
    new = database_host(spec)
    if new is None or new not in facts or has_records(facts[new]):
        return None
    old = next((name for name, found in facts.items() if has_records(found)), None)
    if old is None:
        return None
    last = f"{text.BACKUPS}/{text.DATABASE}-*-last.sql.gz"
    return Finding(
        "warning",
        f"accounting moves here from {old}, and its database begins empty: the records of all jobs so far stay there",
        fix=f"to take them along, once it has moved: as root, copy the newest {last}, the dump that {old} makes at the "
        f"end, to the same place on {new}; then `shoal restore NAME`, as `shoal restore` lists it",
        host=new,
    )


def slurmdbd_skew(spec: Spec, versions: Mapping[str, Version]) -> tuple[Finding, ...]:
    """slurmdbd must not be older than slurmctld."""
    host, controller = database_host(spec), members_of(spec)[0].name
    if host is None or host not in versions or controller not in versions:
        return ()
    if versions[host].release >= versions[controller].release:
        return ()
    return (
        Finding(
            "error",
            what="slurmdbd older than slurmctld",
            found=f"Slurm {versions[host]}; the controller {controller} has {versions[controller]}",
            fix=f"take `accounting.host` out, so that {controller} has the database, or name a host with a newer Slurm",
            host=host,
        ),
    )
