"""The tracking server on one host, and on the controller what `shoal run` tells jobs about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.agent.document import Command, Directory, Document, File, Item, Secret, SecretRef, Service
from shoal.agent.facts import Facts
from shoal.roles.artifacts import OWN_DISK, RECORD, artifacts_findings, artifacts_of
from shoal.roles.part import How, Kept, Part
from shoal.roles.shares import Served, shares
from shoal.roles.stage import Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members
from shoal.spec.model import Spec
from shoal.tracking import mlflow
from shoal.tracking.mlflow import Server

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

JOBS_SECRET = "mlflow-jobs"
PASSWORD_DIGITS = 48


class TrackingPart(Part):
    """MLflow where the spec wants it, and nothing of it where it does not."""

    files: Mapping[str, How] = {
        **dict.fromkeys((mlflow.UNIT, mlflow.ADDRESS, OWN_DISK), "there"),
        mlflow.JOBS_PASSWORD: "hash",
        RECORD: "text",
    }
    services = (mlflow.SERVICE,)

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        return mlflow.packages(spec.tracking.database) if spec.tracking and serves(spec, member) else ()

    def ports(self, spec: Spec, member: Member) -> tuple[str, ...]:
        return (str(spec.tracking.port),) if spec.tracking and serves(spec, member) else ()

    def kept(self, spec: Spec) -> Mapping[str, Kept]:
        """The password of jobs, which the controller needs too where the server is on another host."""
        host = server_host(spec)
        return {JOBS_SECRET: Kept(host, mlflow.JOBS_PASSWORD, PASSWORD_DIGITS)} if host else {}

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        items: dict[Stage, tuple[Item, ...]] = {}
        server = server_of(cluster)
        if server and serves(cluster.spec, member):
            # Shares of other hosts are mounted with the nodes.
            stage = Stage.NODES if share_elsewhere(cluster.spec, server) else Stage.SERVICES
            items[stage] = _serving(cluster.spec, server)
        elif _there(cluster, member, mlflow.UNIT):
            items[Stage.SERVICES] = without_server()
        if "controller" in member.roles:
            items[Stage.SERVICES] = items.get(Stage.SERVICES, ()) + _told(cluster, server)
        return {stage: some for stage, some in items.items() if some}

    def farewell(self) -> Document:
        """The accounts stay with what was recorded, and so does the password that opens them."""
        return (*without_server(), File(mlflow.ADDRESS))

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        host = server_host(cluster.spec)
        return tuple(artifacts_findings(cluster, host)) if host else ()


def server_host(spec: Spec) -> str:
    """The member that the server runs on; empty where there is none, or where it is somebody else's."""
    if spec.tracking is None or spec.tracking.url:
        return ""
    return spec.tracking.host or members(spec)[0].name


def serves(spec: Spec, member: Member) -> bool:
    return server_host(spec) == member.name


def server_of(cluster: Cluster) -> Server | None:
    """The server that Shoal sets up, once its host's address is known."""
    host, tracking = server_host(cluster.spec), cluster.spec.tracking
    address = cluster.addresses.get(host)
    if not tracking or not host or not address:
        return None
    return Server(host, address, tracking.port, tracking.database, artifacts_of(cluster, host))


def share_elsewhere(spec: Spec, server: Server) -> Served | None:
    """The share of another host that the artifacts are in."""
    inside = [share for share in shares(spec) if f"{server.artifacts}/".startswith(f"{share.where}/")]
    return next((share for share in inside if share.server != server.name), None)


def without_server() -> tuple[Item, ...]:
    """The service taken away. What jobs reported stays."""
    return (Service(mlflow.SERVICE, enabled=False, running=False), File(mlflow.UNIT))


def _serving(spec: Spec, server: Server) -> tuple[Item, ...]:
    proxies = spec.proxy.variables if spec.proxy else {}
    environment = ("env", *(f"{name}={value}" for name, value in proxies.items())) if proxies else ()
    requirements = mlflow.requirements(server.database)
    restarts = (mlflow.SERVICE,)
    return (
        Command(
            "make the user of MLflow",
            ("useradd", "--system", "--user-group", "--no-create-home", "--home-dir", mlflow.STATE, mlflow.USER),
            unless=("id", "-u", mlflow.USER),
        ),
        Directory(mlflow.STATE, owner=mlflow.USER, group=mlflow.USER, mode=0o700),
        _artifacts(spec, server),
        Directory("/etc/shoal"),
        Directory(mlflow.SETTINGS, group=mlflow.USER, mode=0o750),
        File(RECORD, f"{server.artifacts}\n"),
        *(Secret(path, digits=PASSWORD_DIGITS) for path in (mlflow.ADMIN_PASSWORD, mlflow.JOBS_PASSWORD)),
        Secret(mlflow.SESSION_KEY, digits=64),
        Command(
            f"install MLflow {mlflow.VERSION}",
            (*environment, "sh", "-c", mlflow.INSTALL, "sh", server.prefix, *requirements),
            unless=("test", "-e", f"{server.prefix}/.complete"),
            timeout=3600.0,
        ),
        *(_database() if server.database == "postgresql" else ()),
        File(
            mlflow.AUTH,
            mlflow.auth_settings(),
            group=mlflow.USER,
            mode=0o640,
            restarts=restarts,
            fills=(("@PASSWORD@", mlflow.ADMIN_PASSWORD),),
        ),
        File(
            mlflow.VARIABLES,
            mlflow.variables(),
            mode=0o600,
            restarts=restarts,
            fills=(("@KEY@", mlflow.SESSION_KEY),),
        ),
        File(mlflow.UNIT, mlflow.unit(server), restarts=restarts),
        Service(mlflow.SERVICE),
        Command(
            "make the account that jobs report with",
            (f"{server.prefix}/bin/python", "-I", "-"),
            unless=mlflow.ACCOUNTS_MADE,
            stdin=mlflow.account_program(server),
            timeout=300.0,
        ),
    )


def _artifacts(spec: Spec, server: Server) -> Item:
    """The directory for files. On a share of another host root is nobody, so there the server's own user makes it."""
    share = share_elsewhere(spec, server)
    if share is None:
        return Directory(server.artifacts, owner=mlflow.USER, group=mlflow.USER, mode=0o700)
    as_server = ("runuser", "-u", mlflow.USER, "--")
    return Command(
        f"make {server.artifacts}",
        (*as_server, "mkdir", "-p", "-m", "0700", server.artifacts),
        unless=(*as_server, "test", "-w", server.artifacts),
        timeout=20.0,  # its host may be away
        fix=f"let everybody write to {share.path} on {share.server}, or run the server there: `host: {share.server}`",
    )


def _database() -> tuple[Item, ...]:
    """PostgreSQL on the same host. The server logs in by its own socket, as the user it is: there is no password."""
    as_postgres = ("runuser", "-u", "postgres", "--")
    asked = (*as_postgres, "psql", "-tAc")
    return (
        Service("postgresql"),
        Command(
            "make MLflow's role in PostgreSQL",
            (*as_postgres, "createuser", mlflow.USER),
            unless=(*asked, f"select 1 / count(*) from pg_roles where rolname = '{mlflow.USER}'"),
            retries=5,
        ),
        Command(
            "make MLflow's database",
            (*as_postgres, "createdb", "--owner", mlflow.USER, "mlflow"),
            unless=(*asked, "select 1 / count(*) from pg_database where datname = 'mlflow'"),
            retries=5,
        ),
    )


def _told(cluster: Cluster, server: Server | None) -> tuple[Item, ...]:
    """On the controller: where jobs report to, and with what password."""
    tracking = cluster.spec.tracking
    if tracking is None:
        return (File(mlflow.ADDRESS),) if _there(cluster, cluster.controller, mlflow.ADDRESS) else ()
    if tracking.url:
        return (Directory("/etc/shoal"), File(mlflow.ADDRESS, mlflow.address_file(tracking.url, ours=False)))
    if server is None:
        return ()
    items: tuple[Item, ...] = (
        Directory("/etc/shoal"),
        File(mlflow.ADDRESS, mlflow.address_file(server.uri, ours=True)),
    )
    if server.name == cluster.controller.name:
        return items
    kept = cluster.facts.get(server.name)
    digest = kept.files[mlflow.JOBS_PASSWORD].sha256 if kept and mlflow.JOBS_PASSWORD in kept.files else None
    copy = File(mlflow.JOBS_PASSWORD, SecretRef(JOBS_SECRET, digest), mode=0o400)
    return (*items, Directory(mlflow.SETTINGS, mode=0o750), copy)


def _there(cluster: Cluster, member: Member, path: str) -> bool:
    facts = cluster.facts.get(member.name)
    return bool(facts and path in facts.files and facts.files[path].there)
