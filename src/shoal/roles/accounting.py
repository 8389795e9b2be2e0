"""Accounting: MariaDB and slurmdbd on one member, with daily backups and the spec's accounts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal.agent.document import Command, Directory, Document, File, Secret, Service, restart_drop_in
from shoal.agent.facts import Facts
from shoal.remote import program_text, shell_command
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.roles.host_address import DROP_INS, address_wait_file, listen_address
from shoal.roles.slurm_source import release_mark, unreadable
from shoal.roles.slurm_tree import daemon
from shoal.slurm import accounting as text
from shoal.slurm.versions import Version
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec
from shoal.spec.partitions import partition_qos

SACCTMGR_CONF = "/etc/shoal/accounting.conf"
"""Exists only on a host that has, or had, the database."""
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

PLACEHOLDERS = ((text.PASSWORD_PLACEHOLDER, PASSWORD),)
SACCTMGR_ENV = ("env", f"SLURM_CONF={SACCTMGR_CONF}")


class AccountingComponent(Component):
    files: Mapping[str, FileQuery] = {SACCTMGR_CONF: "there", SLURMCTLD_DROP_IN: "there"}
    services = ("mariadb", "slurmdbd", TIMER)

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        return ("mariadb-server", "slurmdbd") if has_database(spec, member) else ()

    def ports(self, spec: Spec, member: Member) -> tuple[str, ...]:
        return (str(text.SLURMDBD_PORT),) if has_database(spec, member) else ()

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if has_database(cluster.spec, member):
            services = (*slurmctld_restarts(cluster, member), *database(cluster, member))
            return {Stage.SERVICES: services, Stage.NODES: accounts(cluster, member)}
        removed = database_removal() if has_records(cluster.facts[member.name]) else ()
        return {Stage.SERVICES: (*slurmctld_restarts(cluster, member), *removed)}

    def removal(self) -> Document:
        return (File(SLURMCTLD_DROP_IN), *database_removal())

    def cluster_services(self, facts: Facts) -> tuple[str, ...]:
        return ("the accounting database",) if has_records(facts) else ()

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        finding = moved_database_finding(cluster.spec, cluster.facts)
        return (finding,) if finding else ()


def slurmctld_restarts(cluster: Cluster, member: Member) -> Document:
    """A drop-in for slurmctld with accounting: it exits when slurmdbd stops while it starts, and must try again."""
    if "controller" not in member.roles:
        return ()
    if cluster.spec.accounting is not None:
        # It restarts until slurmdbd is up.
        return (Directory("/etc/systemd/system/slurmctld.service.d"), File(SLURMCTLD_DROP_IN, restart_drop_in()))
    return (File(SLURMCTLD_DROP_IN),) if cluster.facts[member.name].has_file(SLURMCTLD_DROP_IN) else ()


def database_host(spec: Spec) -> str | None:
    """The member with the database; None without accounting."""
    if spec.accounting is None:
        return None
    return spec.accounting.host or members_of(spec)[0].name


def has_database(spec: Spec, member: Member) -> bool:
    return database_host(spec) == member.name


def database(cluster: Cluster, member: Member) -> Document:
    """MariaDB, slurmdbd and backups; all run before slurmctld starts."""
    facts, spec, address = cluster.facts[member.name], cluster.spec, listen_address(cluster, member)
    assert spec.accounting is not None
    sql = File(SQL, text.database_sql(), mode=0o600, fills=PLACEHOLDERS)
    login = File(LOGIN, text.database_login(), mode=0o600, fills=PLACEHOLDERS)
    conf_text = text.slurmdbd_conf(facts.hostname, spec.auth, address, munge=cluster.conf.munge)
    conf = File(SLURMDBD_CONF, conf_text, mode=0o600, fills=PLACEHOLDERS)
    return (
        Directory("/etc/shoal"),
        File(MARIADB_CONF, text.mariadb_conf(facts.memory_mb), restarts=("mariadb",)),
        Service("mariadb", command=("/usr/bin/mariadbd-safe",)),
        *_old_records(cluster, member),
        *release_mark(cluster, member.name, "slurmdbd"),
        Secret(PASSWORD),
        sql,
        login,
        Command(
            "accounting database",
            # The password is in the statement, and MariaDB's error quotes it.
            ("bash", "-o", "pipefail", "-c", f"mariadb < {SQL} 2>&1 | sed -n '/^ERROR/{{s/ near .*//;p}}'"),
            unless=("mariadb", f"--defaults-extra-file={LOGIN}", "-e", "SELECT 1", text.DATABASE),
            retries=5,
            restarts=("slurmdbd",),
        ),
        Directory("/etc/systemd/system/slurmdbd.service.d"),
        File(SLURMDBD_DROP_IN, restart_drop_in({"Wants": "mariadb.service"})),  # until MariaDB is up
        address_wait_file(cluster, member, "slurmdbd"),
        replace(conf, owner="slurm", group="slurm", restarts=("slurmdbd",), keep=True),
        Directory("/var/log/slurm", owner="slurm", group="slurm"),
        *daemon(cluster, "slurmdbd"),
        File(SACCTMGR_CONF, text.sacctmgr_conf(spec.cluster, cluster.controller.name, spec.auth, address)),
        Command(
            "register the cluster",
            (*SACCTMGR_ENV, "sacctmgr", "-i", "add", "cluster", spec.cluster),
            unless=(
                *(*SACCTMGR_ENV, "bash", "-c"),
                f"{port_check(address)} && "
                f"sacctmgr -nP show cluster {spec.cluster} format=cluster | grep -qx {spec.cluster}",
            ),
            # The first start creates all tables.
            retries=15,
        ),
        *_partition_qos(cluster, address),
        Directory(PROGRAMS),
        File(DATABASE_PROGRAM, text.database_program(spec.cluster, spec.accounting.backups), mode=0o755),
        File(BACKUP_SERVICE, text.backup_service(DATABASE_PROGRAM)),
        File(BACKUP_TIMER, text.backup_timer(), restarts=(TIMER,)),
        Service(TIMER),
    )


def _old_records(cluster: Cluster, member: Member) -> Document:
    """Puts records aside that slurmdbd cannot read."""
    old = unreadable(cluster, member.name, "slurmdbd")
    if old is None:
        return ()
    kept = f"{text.DATABASE}_slurm_{old.major}_{old.minor:02}"
    keep = shell_command(program_text("keep_records.sh"), text.DATABASE, kept)
    return (Command(f"keep the records of Slurm {old} as database {kept}", keep, restarts=("slurmdbd",)),)


def _partition_qos(cluster: Cluster, address: str | None) -> Document:
    """The QOS of partitions, without which slurmctld does not start. Their limits come with the accounts."""
    assert cluster.spec.accounting is not None
    own_names = [name for name in partition_qos(cluster.spec.partitions) if name in cluster.spec.accounting.qos]
    if not own_names:
        return ()
    names, count = ",".join(own_names), len(own_names)
    listed = f"sacctmgr -nP show qos {names} format=name | wc -l"
    return (
        Command(
            "add the QOS of partitions",
            (*SACCTMGR_ENV, "sacctmgr", "-i", "add", "qos", names),
            unless=(*SACCTMGR_ENV, "bash", "-c", f'{port_check(address)} && test "$({listed})" = {count}'),
            retries=15,
        ),
    )


def port_check(address: str | None) -> str:
    """A test in bash whether slurmdbd listens: sacctmgr itself waits half a minute for one that does not."""
    return f"exec 3<>/dev/tcp/{address or '127.0.0.1'}/{text.SLURMDBD_PORT}"


def accounts(cluster: Cluster, member: Member) -> Document:
    """The spec's accounts, users and QOS. slurmctld must run first: it tells slurmdbd about GPUs."""
    spec = cluster.spec
    assert spec.accounting is not None
    program = (*SACCTMGR_ENV, "python3", "-I", ACCOUNTS_PROGRAM)
    check = port_check(listen_address(cluster, member))
    return (
        File(ACCOUNTS_PROGRAM, program_text("slurm_accounts"), mode=0o755),
        File(ACCOUNTS, text.accounts_file(spec.cluster, spec.accounting), reloads=(f"command {LIMITS}",)),
        Command(
            LIMITS,
            (*program, "apply", ACCOUNTS, RECORD, DATABASE_PROGRAM, "backup", "change"),
            unless=("bash", "-c", f"{check} && exec {' '.join(program)} check {ACCOUNTS} {RECORD}"),
            fix="correct what it names",
        ),
    )


def database_removal() -> Document:
    """Removes everything but the records: the database and its backups stay."""
    not_ours = ("test", "!", "-e", SACCTMGR_CONF)
    files = (
        *(SQL, LOGIN, PASSWORD, ACCOUNTS, ACCOUNTS_PROGRAM, DATABASE_PROGRAM, BACKUP_TIMER, BACKUP_SERVICE),
        *(SLURMDBD_DROP_IN, DROP_INS["slurmdbd"], SLURMDBD_CONF, MARIADB_CONF),
    )
    return (
        Command("last backup of the accounting database", (DATABASE_PROGRAM, "backup", "last"), unless=not_ours),
        Service("slurmdbd", enabled=False, running=False),
        Service(TIMER, enabled=False, running=False),
        # A MariaDB that Shoal did not set up keeps running.
        Command("stop MariaDB", ("systemctl", "disable", "--now", "mariadb"), unless=not_ours),
        *(File(path) for path in files),
        File(SACCTMGR_CONF),
    )


def has_records(facts: Facts) -> bool:
    """Whether an earlier run created the database on this host."""
    return facts.has_file(SACCTMGR_CONF)


def moved_database_finding(spec: Spec, facts: Mapping[str, Facts]) -> Finding | None:
    """A warning where the database moves to another host: it begins empty there."""
    new = database_host(spec)
    old = next((name for name, fact in facts.items() if has_records(fact)), None)
    if new is None or old is None or new not in facts or has_records(facts[new]):
        return None
    last = f"{text.BACKUPS}/{text.DATABASE}-*-last.sql.gz"
    what = f"accounting moves here from {old} and begins with an empty database: the records of earlier jobs stay there"
    fix = (
        f"to move them: after `shoal up`, as root, copy the newest {last}, the last dump on {old}, "
        f"to the same path on {new}; then run `shoal restore NAME`, as `shoal restore` lists it"
    )
    return Finding("warning", what, fix=fix, host=new)


def slurmdbd_skew(spec: Spec, versions: Mapping[str, Version]) -> tuple[Finding, ...]:
    """slurmdbd must not be older than slurmctld."""
    host, controller = database_host(spec), members_of(spec)[0].name
    if host is None or host not in versions or controller not in versions:
        return ()
    if versions[host].release >= versions[controller].release:
        return ()
    evidence = f"Slurm {versions[host]}; the controller {controller} has {versions[controller]}"
    fix = f"delete `accounting.host`, so that {controller} has the database, or name a host with a newer Slurm"
    return (Finding("error", "slurmdbd older than slurmctld", evidence, fix, host=host),)
