"""What every command needs: the spec, the cluster's known host keys, and how to reach its hosts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ProviderError, UsageError
from shoal.hostlist import HostlistError, expand
from shoal.hosts.api import Connector, Host, Target
from shoal.hosts.provider import Instance, Provider, Request
from shoal.hosts.provider import names as all_providers
from shoal.hosts.provider import provider as find_provider
from shoal.local_files import state_directory
from shoal.plan.connections import Connections
from shoal.plan.progress import NoProgress, Phase, ProgressReporter
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.verbs.joined_cluster import JoinedCluster, JoinedConnector, find_joined, known_hosts
from shoal.verbs.rented_record import placements, recorded_accounts, recorded_instances
from shoal.verbs.spec_cache import CachedSpec, read_cache, write_cache

if TYPE_CHECKING:
    from shoal.plan.connections import Fleet
    from shoal.spec.model import Spec
    from shoal.verbs.rented_hosts import RentedHosts

DEFAULT_FILE = Path("shoal.yaml")
NO_FILE = SANDBOX = "sandbox"
"""The cluster without a file and without --cluster."""


@dataclass(frozen=True)
class ProviderInstances:
    """All instances that providers have for a cluster, also those that the file no longer names."""

    found: tuple[tuple[str, Instance], ...]
    """Each instance with the name of its provider."""
    findings: tuple[Finding, ...] = ()
    """Providers that did not answer."""


@dataclass(frozen=True)
class Context:
    """One cluster as one run of a command sees it."""

    known: Spec | CachedSpec | JoinedCluster
    """The spec, or its cached part; for an ordinary user, what the cluster says of itself."""
    file: Path | None = None
    warnings: tuple[Finding, ...] = ()
    progress: ProgressReporter = field(default_factory=NoProgress)
    providers: Callable[[str], Provider] = find_provider
    registry: Callable[[], Iterable[str]] = all_providers
    """The names of all providers."""
    connector: Connector | None = None
    """How hosts are reached; None is SSH with this cluster's known host keys."""
    accounts: dict[str, RentedHosts] = field(default_factory=dict, compare=False, repr=False)
    """The provider accounts that were asked for hosts that stay; they keep what they have quoted."""

    @property
    def spec(self) -> Spec:
        """The whole spec, with rented hosts where they are. Raises UsageError for ordinary users."""
        spec = self._file_spec
        if not any(member.machine for member in self.members):
            return spec
        from shoal.spec.rented_hosts import place_hosts

        return place_hosts(spec, placements(self.cluster))

    @property
    def _file_spec(self) -> Spec:
        """The spec as the file has it. Reads it where only the hosts are cached."""
        if isinstance(self.known, JoinedCluster):
            raise needs_operator(self.cluster)
        if not isinstance(self.known, CachedSpec):
            return self.known
        return open_context(self.file, None if self.file else self.known.cluster)._file_spec

    @property
    def cluster(self) -> str:
        return self.known.cluster

    @property
    def members(self) -> tuple[Member, ...]:
        if isinstance(self.known, CachedSpec | JoinedCluster):
            return self.known.members
        from shoal.spec.members import members

        return members(self.known)

    @property
    def shares(self) -> bool:
        """Whether it has storage that its hosts share."""
        return self.known.shares if isinstance(self.known, CachedSpec | JoinedCluster) else bool(self.known.storage)

    def require_operator(self) -> None:
        """Raise UsageError for an ordinary user, before anything is asked or done."""
        if self.joined is not None:
            raise needs_operator(self.cluster)

    @property
    def joined(self) -> JoinedCluster | None:
        """The cluster of an ordinary user, who has no file and is not root."""
        return self.known if isinstance(self.known, JoinedCluster) else None

    @property
    def accounting(self) -> bool:
        """Whether Slurm keeps accounts."""
        return self.joined.record.accounting if self.joined else self.spec.accounting is not None

    @property
    def controller(self) -> Member:
        return self.members[0]

    @property
    def known_hosts(self) -> Path:
        if self.joined is not None:
            return known_hosts()
        return state_directory(self.cluster) / "known_hosts"

    def connect(self) -> Connector:
        if self.joined is not None:
            return JoinedConnector(self.joined, self.connector)
        from shoal.hosts.ssh import SshConnector  # slow to import, and some commands connect to nothing

        return self.connector or SshConnector(self.known_hosts)

    async def fleet(self, chosen: Iterable[Member] | None = None) -> Fleet:
        """The hosts of a run, not yet connected."""
        from shoal.plan.connections import Fleet

        return Fleet(await self.targets(chosen), self.connect())

    async def connections(self, chosen: Iterable[Member] | None = None) -> Connections:
        """The same for commands that need no agent: they start faster."""
        return Connections(await self.targets(chosen), self.connect())

    @asynccontextmanager
    async def controller_host(self) -> AsyncIterator[Host]:
        """A connection to the controller alone."""
        async with await self.connections([self.controller]) as fleet:
            yield await fleet.host(self.controller.name)

    async def targets(self, chosen: Iterable[Member] | None = None) -> dict[str, Target]:
        """The addresses of members, by name. Raises ProviderError for a host that is not made yet."""
        members = self.members if chosen is None else tuple(chosen)
        if self.joined is not None:
            return {member.name: self.joined.target() for member in members}
        instances = await self.instances() if any(member.provider for member in members) else {}
        return {member.name: _target(self.cluster, member, instances) for member in members}

    async def instances(self) -> dict[str, Instance]:
        """The members that their providers have made, by name."""
        provider_of = {member.name: member.provider for member in self.members}
        rented = [member.name for member in self.members if member.machine]
        instances_by_name = recorded_instances(self.cluster, rented) if rented else {}
        for name in self.provider_names():
            if all(member.name in instances_by_name for member in self.members if member.provider == name):
                continue  # where they were last is known; `shoal up` and `shoal check` ask again
            instances = await self.provider(name).instances(self.cluster)
            instances_by_name |= {
                instance.name: instance for instance in instances if provider_of.get(instance.name) == name
            }
        return instances_by_name

    async def all_instances(self) -> ProviderInstances:
        """All instances of this cluster at any provider: one that left the file still runs, and may cost money."""
        instances: list[tuple[str, Instance]] = []
        findings: list[Finding] = []
        file_providers = self.provider_names()
        former = recorded_accounts(self.cluster) & {*self._file_spec.providers}  # for hosts no longer in the file
        for name in sorted({*file_providers, *self.registry(), *former}):
            try:
                instances += [(name, instance) for instance in await self.provider(name).instances(self.cluster)]
            except ProviderError as error:
                if name in file_providers:
                    raise
                what = f"cannot ask {name} whether it has hosts of cluster {self.cluster}"
                findings.append(Finding("warning", what, error.message, error.hint))
        return ProviderInstances(tuple(instances), tuple(findings))

    def provider(self, name: str) -> Provider:
        """The provider of that name, or the provider account."""
        if name == SANDBOX or name not in self._file_spec.providers:
            return self.providers(name)
        if name not in self.accounts:
            from shoal.verbs.rented_accounts import open_rented_hosts

            self.accounts[name] = open_rented_hosts(self._file_spec, name, self.connect)
        return self.accounts[name]

    def provider_names(self) -> list[str]:
        """The providers that the file names."""
        return sorted({member.provider for member in self.members if member.provider})

    def choose(self, hosts: str | None, nodeset: str | None = None, *, rented: bool = False) -> list[Member]:
        """The members in a hostlist and a nodeset; all members without either. With `rented`, also rented nodes."""
        members = [member for member in self.members if nodeset in (None, member.nodeset)]
        if rented:
            from shoal.spec.members import rented_members

            members += [member for member in rented_members(self.spec) if nodeset in (None, member.nodeset)]
        if not members:
            sets = ", ".join(dict.fromkeys(member.nodeset for member in self.members))
            raise UsageError(f"there is no nodeset {nodeset!r} in cluster {self.cluster}", hint=f"use one of {sets}")
        if hosts is None:
            return members
        try:
            names = expand(hosts)
        except ValueError as error:
            problem = error.problem if isinstance(error, HostlistError) else error
            raise UsageError(
                f"{hosts!r} is not a hostlist: {problem}", hint="write gpu01,gpu02 or gpu[01-16]"
            ) from None
        by_name = {member.name: member for member in members}
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise UsageError(
                f"cluster {self.cluster} has no host {', '.join(unknown)}", hint=f"use one of {', '.join(by_name)}"
            )
        if not names:
            raise UsageError("no host is named", hint=f"use one of {', '.join(by_name)}")
        return [by_name[name] for name in names]

    def choose_one(self, host: str) -> Member:
        """The one member of that name."""
        members = self.choose(host)
        if len(members) > 1:
            raise UsageError(
                f"{host} names {len(members)} hosts, and this command takes one", hint=f"use {members[0].name}"
            )
        return members[0]


def needs_operator(cluster: str) -> UsageError:
    """The error of a command that ordinary users cannot use."""
    return UsageError(
        f"this command needs the operator's file of cluster {cluster}, and the right to become root",
        hint="ask the operator; or, for the sandbox on this machine, use --cluster sandbox",
    )


def open_context(
    file: Path | None = None, cluster: str | None = None, progress: ProgressReporter | None = None
) -> Context:
    """The cluster of a spec file; without a file, one that was joined, or else the sandbox."""
    progress = progress or NoProgress()
    file = _file(file, cluster)
    joined = find_joined(cluster) if file is None else None
    if joined is not None:
        return Context(joined, progress=progress)
    if file is None:
        return Context(_sandbox(cluster or NO_FILE), progress=progress)
    from shoal.spec.loader import load_all

    spec, warnings = load_all(file)
    if spec.environments:
        from shoal.environments.requirements import note_git

        spec = spec.model_copy(update={"environments": note_git(spec.environments, file.parent)})
    return Context(spec, file, tuple(warnings), progress)


def open_hosts(file: Path | None = None, cluster: str | None = None) -> Context:
    """The same for commands that need only its hosts: they come from a cache where the file is unchanged."""
    if (recalled := recall_hosts(file, cluster)) is not None:
        return recalled
    context = open_context(file, cluster)
    name, text = _read_cache_key(context.file, cluster)
    write_cache(state_directory(), name, text, CachedSpec(context.cluster, context.members, context.shares))
    return context


def recall_hosts(file: Path | None, cluster: str | None) -> Context | None:
    """The cluster, where no file has to be read anew."""
    try:
        path = _file(file, cluster)
        if path is None and (joined := find_joined(cluster)) is not None:
            return Context(joined)
        cached_spec = read_cache(state_directory(), *_read_cache_key(path, cluster))
    except (OSError, ValueError, UsageError):
        return None  # what is wrong with the file is raised by who reads it
    return Context(cached_spec, path) if cached_spec is not None else None


def _read_cache_key(file: Path | None, cluster: str | None) -> tuple[str, str]:
    """The key of a spec in the cache, and its text."""
    if file is None:
        return f"sandbox {cluster or NO_FILE}", ""
    return str(file.absolute()), file.read_text(encoding="utf-8")


def _file(file: Path | None, cluster: str | None) -> Path | None:
    if file is None and DEFAULT_FILE.exists():
        file = DEFAULT_FILE
    if file is None and cluster is None:
        _reject_ambiguous_directory()
    if file is not None and cluster is not None:
        raise UsageError(
            f"the cluster's name is in {file}; --cluster {cluster} names one that has no file",
            hint="leave out --cluster and unset SHOAL_CLUSTER, or run this where there is no shoal.yaml",
        )
    return file


def _reject_ambiguous_directory() -> None:
    """Raise UsageError in a directory below that of a file: a sandbox is not what the person means."""
    try:
        directory = Path.cwd()
    except FileNotFoundError:  # the directory was removed
        return
    file = next((parent / DEFAULT_FILE for parent in directory.parents if (parent / DEFAULT_FILE).is_file()), None)
    if file is not None:
        raise UsageError(
            f"there is no {DEFAULT_FILE} here, and one in {file.parent}",
            hint=f"use -f {os.path.relpath(file)}, or --cluster {NO_FILE} for the sandbox",
        )


def _sandbox(cluster: str) -> Spec:
    from shoal.sandbox.engine import default_kind
    from shoal.spec.finding import printable
    from shoal.spec.members import default_spec

    try:
        return default_spec(cluster, kind=default_kind())
    except ValueError:
        raise UsageError(
            f"{printable(cluster)!r} is not a cluster name", hint="use lower-case letters, digits and -, as in reef"
        ) from None


def compute_hosts(context: Context) -> list[str]:
    """The hosts that run jobs."""
    return [member.name for member in context.members if "compute" in member.roles]


def job_file_hosts(context: Context) -> list[str]:
    """The hosts that keep files of jobs: compute nodes, and the controller for rented nodes."""
    return list(dict.fromkeys((*compute_hosts(context), context.controller.name)))


def requests(chosen: Iterable[Member], provider: str) -> list[Request]:
    """The instances to request from a provider."""
    return [Request(member.name, member.shape, member.machine) for member in chosen if member.provider == provider]


def _target(cluster: str, member: Member, instances: dict[str, Instance]) -> Target:
    if member.provider is None:
        return Target(member.name, member.address, member.port, member.user, member.identity)
    if member.name not in instances:
        # A sandbox that root made is visible to root only.
        sudo_hint = "" if os.geteuid() == 0 else "; if root made it, use sudo"
        file_hint = (
            f"; for your own hosts, change to the directory of their {DEFAULT_FILE}; to use a cluster of others, "
            "`shoal join USER@HOST`"
            if cluster == NO_FILE
            else ""
        )
        raise ProviderError(
            f"cluster {cluster}: host {member.name} is not made yet", hint=f"run `shoal up`{sudo_hint}{file_hint}"
        )
    return instances[member.name].target


def cannot_make(provider: str, problems: Sequence[Finding]) -> ProviderError:
    """The error of a provider that cannot make hosts: one problem with its fix, or one line each."""
    if len(problems) == 1:
        return ProviderError(str(replace(problems[0], fix="")), hint=problems[0].fix)
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ProviderError(f"cannot make {provider} hosts here:{lines}", hint="solve these, then run the command again")


def report_to(phase: Phase) -> Callable[[str, float], None]:
    """A callback that shows a provider's progress in a phase."""
    return lambda text, fraction: phase.set_fraction(fraction, text)


_NOTES: list[Callable[[], str]] = []


@contextmanager
def note_at_exit(text: Callable[[], str]) -> Iterator[None]:
    """Print this text if the command exits at once inside the block. It is made only then."""
    _NOTES.append(text)
    try:
        yield
    finally:
        _NOTES.remove(text)


def exit_notes() -> list[str]:
    """The notes of all open blocks, the innermost last."""
    return [text() for text in _NOTES]
