"""A cluster as an ordinary user has it: one host to log in to, without root, and a description that the cluster gives.

The description of each cluster that a user has joined is in the user's config directory. It is compared with the
cluster's at each command, and replaced where the operator has changed the cluster. On the controller and on login hosts
no join is needed: the description is there.
"""

from __future__ import annotations

import json
import os
import pwd
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shoal.contract import VERSION
from shoal.errors import ShoalError, UsageError
from shoal.hosts.api import Connector, Host, Target
from shoal.hosts.local import LocalHost
from shoal.remote.agent.file_io import write_atomic
from shoal.spec.cluster_record import RECORD_PATH, ClusterRecord, check_version, parse_record
from shoal.spec.member import Member

READ_TIMEOUT_S = 30.0
READ_RECORD = ("cat", RECORD_PATH)


@dataclass(frozen=True)
class Login:
    """How a user logs in; what is None comes from `~/.ssh/config`."""

    host: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        return f"{self.user}@{self.host}" if self.user else self.host

    @property
    def target(self) -> Target:
        # A name of ~/.ssh/config is looked up there; other names and addresses are used as they are.
        return Target(self.host, None, self.port, self.user)


@dataclass
class JoinedCluster:
    """The cluster that a command is about. The description is the newest that is known."""

    record: ClusterRecord
    login: Login | None = None
    """None: this machine is the controller or a login host."""
    changed: bool = False
    """The operator has changed the cluster since the last command."""

    @property
    def cluster(self) -> str:
        return self.record.cluster

    @property
    def user(self) -> str:
        """The user's name there; empty where `~/.ssh/config` has it, or this machine has no name for the user."""
        if self.login is not None:
            return self.login.user or ""
        try:
            return pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            return ""

    @property
    def members(self) -> tuple[Member, ...]:
        """The one host that users' commands connect to, in the place of the controller."""
        return (Member(self.record.controller, frozenset({"controller"}), "controller"),)

    @property
    def shares(self) -> bool:
        return bool(self.record.shares)

    def target(self) -> Target:
        return self.login.target if self.login else Target(self.record.controller)

    def take(self, text: str) -> None:
        """Compare the description with what the cluster says now."""
        record = parse_record(text, f"{RECORD_PATH} of {self.cluster}")
        if record.cluster != self.cluster:
            raise UsageError(
                f"{self.login or 'this machine'} belongs to cluster {record.cluster} now, not to {self.cluster}",
                hint=f"`shoal join {self.login}` joins it; then use --cluster {record.cluster}",
            )
        check_version(record, VERSION)
        if record != self.record:
            # Nodes come and go, and Slurm tells users which there are.
            self.changed = record.without_nodes() != self.record.without_nodes()
            self.record = record
            if self.login is not None:
                store(record, self.login)


class JoinedConnector:
    """Logs in as the user and never becomes root. Reads the cluster's description anew at each login."""

    def __init__(self, joined: JoinedCluster, connector: Connector | None = None) -> None:
        self._joined = joined
        self._connector = connector

    async def connect(self, target: Target) -> Host:
        host = await self._connect(target)
        try:
            result = await host.run(READ_RECORD, timeout=READ_TIMEOUT_S, root=False)
            if result.status == 0:
                self._joined.take(result.text)
        except BaseException:
            await host.close()
            raise
        return host

    async def _connect(self, target: Target) -> Host:
        if self._connector is not None:
            return await self._connector.connect(target)
        if self._joined.login is None:
            return LocalHost(target, through_sudo=False)
        return await user_connector().connect(target)


def user_connector() -> Connector:
    """Logs in as the user, over SSH."""
    from shoal.hosts.ssh import SshConnector  # slow to import, and on the cluster itself nothing needs it

    return SshConnector(known_hosts(), may_sudo=False)


def config_directory() -> Path:
    """Where a user's clusters are described."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "shoal" / "clusters"


def known_hosts() -> Path:
    """The host keys of all hosts that a user has joined."""
    return config_directory() / "known_hosts"


def find_joined(cluster: str | None, here: Path = Path(RECORD_PATH)) -> JoinedCluster | None:
    """The cluster of that name that was joined, or that this machine belongs to; without a name, the only one."""
    if here.exists():
        record = parse_record(here.read_text(encoding="utf-8"), str(here))
        if cluster in (None, record.cluster):
            check_version(record, VERSION)
            return JoinedCluster(record)
    names = joined_names()
    if cluster is None and len(names) > 1:
        raise UsageError(
            f"you have joined several clusters: {', '.join(names)}",
            hint=f"name one with --cluster {names[0]}, or for good with SHOAL_CLUSTER={names[0]}",
        )
    if cluster is None:
        return load(names[0]) if names else None
    return load(cluster) if cluster in names else None


def joined_names() -> list[str]:
    return sorted(path.stem for path in config_directory().glob("*.json"))


def load(cluster: str) -> JoinedCluster:
    """A cluster that was joined."""
    path = config_directory() / f"{cluster}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return JoinedCluster(parse_record(json.dumps(data["record"]), str(path)), Login(**data["login"]))
    except (ValueError, TypeError, KeyError):
        raise ShoalError(
            f"{path} is damaged", hint="remove it, and join the cluster again with `shoal join USER@HOST`"
        ) from None


def store(record: ClusterRecord, login: Login) -> Path:
    """Keep the description of a cluster."""
    path = config_directory() / f"{record.cluster}.json"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    values = {"login": asdict(login), "record": json.loads(record.as_json())}
    text = json.dumps(values, indent=1, sort_keys=True) + "\n"
    write_atomic(str(path), text.encode(), 0o600, os.geteuid(), os.getegid())
    return path


@dataclass(frozen=True)
class JoinResult:
    """What `shoal join` has learned."""

    cluster: str
    login: str
    file: str
    version: str
    controller: str
    jobs: str
    """Where the user's jobs are kept."""
    environments: tuple[str, ...]
    shares: tuple[str, ...]
    tracking: str
    changed: bool
    """Nothing was known of the cluster, or something else."""


async def join(login: Login, connector: Connector | None = None) -> JoinResult:
    """Fetch the description of the cluster that a host belongs to, and keep it."""
    connector = connector or user_connector()
    async with await connector.connect(login.target) as host:
        result = await host.run(READ_RECORD, timeout=READ_TIMEOUT_S, root=False)
        name = (await host.run(("id", "-un"), timeout=READ_TIMEOUT_S, root=False)).text.strip()
    if result.status != 0:
        raise UsageError(
            f"{login.host} does not say which cluster it belongs to: {result.error_text.strip()}",
            hint="join the controller or a login host; the operator's `shoal up` writes this file there",
        )
    record = parse_record(result.text, f"{RECORD_PATH} on {login.host}")
    check_version(record, VERSION)
    before = load(record.cluster) if record.cluster in joined_names() else None
    if before is not None and before.login is not None and _is_other(before, record, login):
        raise UsageError(
            f"you have joined another cluster that is called {record.cluster}, through {before.login}",
            hint=f"to replace it, remove {config_directory() / record.cluster}.json",
        )
    login = replace(login, user=login.user or name or None)
    path = store(record, login)
    jobs = f"{record.jobs}/{name}" if record.jobs else f"~{name}/.shoal/jobs/{record.cluster}"
    return JoinResult(
        record.cluster,
        str(login),
        str(path),
        record.version,
        record.controller,
        jobs,
        tuple(record.environments),
        tuple(record.shares),
        record.tracking,
        before is None or before.record != record,
    )


def _is_other(before: JoinedCluster, record: ClusterRecord, login: Login) -> bool:
    """Whether this is not the cluster that was joined before: another host, and no host key in common."""
    same_host = before.login is not None and before.login.host == login.host
    return not same_host and not set(before.record.host_keys.values()) & set(record.host_keys.values())


def parse_login(text: str, port: int | None = None) -> Login:
    """`USER@HOST`, or `HOST` of `~/.ssh/config`."""
    user, at, host = text.rpartition("@")
    if not host or (at and not user) or host.startswith("-") or not text.isprintable() or " " in text:
        raise UsageError(f"{text!r} is not a login", hint="write it like alice@desktop")
    return Login(host, user or None, port)
