"""The tracking server on one host, and its address on the controller, for `shoal run`.

MLflow stores a run's files by their path below one directory, so a server with another directory does not find earlier
files. The server's host has a record of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.agent.document import Command, Directory, Document, File, Item, Secret, SecretRef, Service
from shoal.agent.facts import Facts
from shoal.remote import program_text
from shoal.roles import tracking_logins
from shoal.roles.client import ENTRY_ROLES
from shoal.roles.component import Cluster, Component, FileQuery, SharedSecret, Stage
from shoal.roles.environments import install_venv
from shoal.roles.shares import ServedShare, shares
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members
from shoal.spec.model import Spec
from shoal.tracking import login, mlflow
from shoal.tracking.mlflow import MlflowServer

JOBS_SECRET = "mlflow-jobs"
PASSWORD_DIGITS = 48
RECORD = f"{login.SETTINGS}/artifacts"
"""The directory of artifacts; the record stays when the server is removed."""
OWN_DISK = f"{mlflow.STATE}/artifacts"


class TrackingComponent(Component):
    """MLflow, where the spec has `tracking`."""

    files: Mapping[str, FileQuery] = {
        **dict.fromkeys((mlflow.UNIT, login.ADDRESS, OWN_DISK), "there"),
        login.JOBS_PASSWORD: "hash",
        RECORD: "text",
    }
    services = (mlflow.SERVICE,)

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        return mlflow.packages(spec.tracking.database) if spec.tracking and is_server(spec, member) else ()

    def ports(self, spec: Spec, member: Member) -> tuple[str, ...]:
        return (str(spec.tracking.port),) if spec.tracking and is_server(spec, member) else ()

    def shared_secrets(self, spec: Spec) -> Mapping[str, SharedSecret]:
        """The password of jobs, which the controller needs as well, and those of users, which all hosts have."""
        host = server_host(spec)
        jobs = {JOBS_SECRET: SharedSecret(host, login.JOBS_PASSWORD, PASSWORD_DIGITS)}
        return {**jobs, **tracking_logins.user_passwords(spec, PASSWORD_DIGITS)} if host else {}

    def fact_files(self, spec: Spec) -> Mapping[str, FileQuery]:
        return tracking_logins.fact_files(spec)

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        items: dict[Stage, tuple[Item, ...]] = {}
        server = server_of(cluster)
        if logins := tracking_logins.login_items(cluster, member, server.uri if server else "", PASSWORD_DIGITS):
            items[Stage.SERVICES] = logins
        if server and is_server(cluster.spec, member):
            # Shares of other hosts are mounted with the nodes.
            stage = Stage.NODES if remote_share(cluster.spec, server) else Stage.SERVICES
            items[stage] = items.get(stage, ()) + _server_items(cluster.spec, server)
        elif cluster.facts_of(member.name).has_file(mlflow.UNIT):
            items[Stage.SERVICES] = items.get(Stage.SERVICES, ()) + SERVER_REMOVAL
        if ENTRY_ROLES & member.roles:
            items[Stage.SERVICES] = items.get(Stage.SERVICES, ()) + _address_items(cluster, member, server)
        return {stage: document for stage, document in items.items() if document}

    def removal(self) -> Document:
        """The records stay, and so do the accounts and their passwords."""
        return (*SERVER_REMOVAL, File(login.ADDRESS), *tracking_logins.REMOVAL)

    def cluster_services(self, facts: Facts) -> tuple[str, ...]:
        return ("the MLflow server",) if facts.has_file(mlflow.UNIT) else ()

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        host = server_host(cluster.spec)
        return tuple(artifacts_findings(cluster, host)) if host else ()


def server_host(spec: Spec) -> str:
    """The member with the server; empty without one, or with an external server."""
    if spec.tracking is None or spec.tracking.url:
        return ""
    return spec.tracking.host or members(spec)[0].name


def is_server(spec: Spec, member: Member) -> bool:
    return server_host(spec) == member.name


def server_of(cluster: Cluster) -> MlflowServer | None:
    """The server that Shoal sets up; None while its host's address is unknown."""
    host, tracking = server_host(cluster.spec), cluster.spec.tracking
    address = cluster.addresses.get(host)
    if not tracking or not host or not address:
        return None
    return MlflowServer(host, address, tracking.port, tracking.database, artifacts_directory(cluster, host))


def remote_share(spec: Spec, server: MlflowServer) -> ServedShare | None:
    """The share of another host that contains the artifacts."""
    inside = [share for share in shares(spec) if f"{server.artifacts}/".startswith(f"{share.where}/")]
    return next((share for share in inside if share.server != server.name), None)


SERVER_REMOVAL = (Service(mlflow.SERVICE, enabled=False, running=False), File(mlflow.UNIT))
"""Removes the service. What jobs reported stays."""


def _server_items(spec: Spec, server: MlflowServer) -> tuple[Item, ...]:
    requirements, restarts = mlflow.requirements(server.database), (mlflow.SERVICE,)
    make_user = ("useradd", "--system", "--user-group", "--no-create-home", "--home-dir", mlflow.STATE, mlflow.USER)
    auth, password = mlflow.auth_settings(), (("@PASSWORD@", login.ADMIN_PASSWORD),)
    session_key = (("@KEY@", mlflow.SESSION_KEY),)
    return (
        Command("make the user of MLflow", make_user, unless=("id", "-u", mlflow.USER)),
        Directory(mlflow.STATE, owner=mlflow.USER, group=mlflow.USER, mode=0o700),
        _artifacts(spec, server),
        Directory("/etc/shoal"),
        Directory(login.SETTINGS, group=mlflow.USER, mode=0o750),
        File(RECORD, f"{server.artifacts}\n"),
        *(Secret(path, digits=PASSWORD_DIGITS) for path in (login.ADMIN_PASSWORD, login.JOBS_PASSWORD)),
        Secret(mlflow.SESSION_KEY, digits=64),
        install_venv(f"install MLflow {mlflow.VERSION}", spec, server.prefix, *requirements),
        *(_database() if server.database == "postgresql" else ()),
        File(mlflow.AUTH, auth, group=mlflow.USER, mode=0o640, restarts=restarts, fills=password),
        File(mlflow.VARIABLES, mlflow.variables(), mode=0o600, restarts=restarts, fills=session_key),
        File(mlflow.UNIT, mlflow.unit(server), restarts=restarts),
        Service(mlflow.SERVICE),
        Command(
            "make the accounts that jobs and users report with",
            (f"{server.prefix}/bin/python", "-I", "-", *mlflow.account_arguments(server, spec.users)),
            unless=mlflow.account_check(spec.users),
            stdin=program_text("probes"),
            timeout=300.0,
        ),
    )


def _artifacts(spec: Spec, server: MlflowServer) -> Item:
    """The directory of artifacts. On another host's share root is mapped to nobody, so the server's user creates it."""
    share = remote_share(spec, server)
    if share is None:
        return Directory(server.artifacts, owner=mlflow.USER, group=mlflow.USER, mode=0o700)
    as_server = ("runuser", "-u", mlflow.USER, "--")
    return Command(
        f"make {server.artifacts}",
        (*as_server, "mkdir", "-p", "-m", "0700", server.artifacts),
        unless=(*as_server, "test", "-w", server.artifacts),
        timeout=20.0,  # the server of the share may be down
        fix=f"make {share.path} on {share.server} writable for all, or run the server there: `host: {share.server}`",
    )


def _database() -> tuple[Item, ...]:
    """PostgreSQL on the same host. The server logs in through a socket as its own user, without a password."""
    as_postgres = ("runuser", "-u", "postgres", "--")

    def command(name: str, table: str, *argv: str) -> Command:
        # The tables are the two below.
        query = f"select 1 / count(*) from {table}"  # nosec B608
        return Command(name, (*as_postgres, *argv), unless=(*as_postgres, "psql", "-tAc", query), retries=5)

    role, database = f"pg_roles where rolname = '{mlflow.USER}'", "pg_database where datname = 'mlflow'"
    return (
        Service("postgresql"),
        command("make MLflow's role in PostgreSQL", role, "createuser", mlflow.USER),
        command("make MLflow's database", database, "createdb", "--owner", mlflow.USER, "mlflow"),
    )


def _address_items(cluster: Cluster, member: Member, server: MlflowServer | None) -> tuple[Item, ...]:
    """Where jobs are submitted: the server's address; on the controller, also the password of root's jobs."""
    tracking = cluster.spec.tracking
    if tracking is None:
        return (File(login.ADDRESS),) if cluster.facts_of(member.name).has_file(login.ADDRESS) else ()
    if tracking.url:
        return (Directory("/etc/shoal"), File(login.ADDRESS, mlflow.address_file(tracking.url, ours=False)))
    if server is None:
        return ()
    address = File(login.ADDRESS, mlflow.address_file(server.uri, ours=True))
    items: tuple[Item, ...] = (Directory("/etc/shoal"), address)
    if server.name == cluster.controller.name or member != cluster.controller:
        return items
    digest = cluster.facts_of(server.name).digest(login.JOBS_PASSWORD)
    copy = File(login.JOBS_PASSWORD, SecretRef(JOBS_SECRET, digest), mode=0o400)
    return (*items, Directory(login.SETTINGS, mode=0o750), copy)


def artifacts_directory(cluster: Cluster, host: str) -> str:
    """The spec's directory, else the recorded one, else one on a share of the host, else one on its own disk."""
    specified = cluster.spec.tracking.artifacts if cluster.spec.tracking else None
    return specified or recorded_directory(cluster.facts_of(host)) or share_directory(cluster.spec, host) or OWN_DISK


def recorded_directory(facts: Facts) -> str:
    """The directory of earlier runs; empty where there was no server."""
    return facts.text(RECORD).strip() or (OWN_DISK if facts.has_file(OWN_DISK) else "")


def share_directory(spec: Spec, host: str) -> str:
    """A directory on the first writable share that the host serves; empty where it serves none.

    Not on another host's share: the server would stop with that host. Not on a share for SSH only, where every user may
    move the files of others.
    """
    for share in shares(spec):
        if share.server == host and share.share.kind == "nfs" and not share.homes and not share.share.read_only:
            return f"{share.path}/shoal-mlflow"
    return ""


def artifacts_findings(cluster: Cluster, host: str) -> Iterator[Finding]:
    """Files of earlier runs in another directory than the server's, or not on a share."""
    before, now = recorded_directory(cluster.facts_of(host)), artifacts_directory(cluster, host)
    share = share_directory(cluster.spec, host)
    if before and before != now:
        what = f"files of earlier runs stay in {before}, where the server does not find them"
        fix = f"copy them: `shoal ssh {host} cp -a {before}/. {now}/`"
        yield Finding("warning", what, f"`artifacts: {now}`", fix, path="tracking.artifacts", host=host)
    elif before == now == OWN_DISK and share:
        what = f"files of runs stay on the disk of {host}: they are older than the share"
        fix = f"set `artifacts: {share}` to store them on the share"
        yield Finding("info", what, before, fix, path="tracking", host=host)
