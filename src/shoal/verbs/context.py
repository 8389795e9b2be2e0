"""What every verb starts from: the spec, where this cluster's host keys are kept, and how hosts are reached."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ProviderError, UsageError
from shoal.hostlist import HostlistError, expand
from shoal.hosts.api import Connector, Target
from shoal.hosts.ssh import SshConnector
from shoal.plan.connections import Connections
from shoal.plan.progress import Phase, Progress, Silence
from shoal.providers import names as all_providers
from shoal.providers import provider as find_provider
from shoal.providers.api import Instance, Provider, Request
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.verbs.spec_cache import Recalled, keep, recall

if TYPE_CHECKING:
    from shoal.plan.fleet import Fleet
    from shoal.spec.model import Spec

DEFAULT_FILE = Path("shoal.yaml")
NO_FILE = "sandbox"
"""The cluster where there is no file, and no name for one either."""


@dataclass(frozen=True)
class Holdings:
    """All that providers have for a cluster, whether or not the file still names them."""

    found: tuple[tuple[str, Instance], ...]
    """Each instance with the name of its provider."""
    findings: tuple[Finding, ...] = ()
    """Providers that could not be asked."""


@dataclass(frozen=True)
class Context:
    """One cluster as one run of a command sees it."""

    known: Spec | Recalled
    """The spec, or what is known of it without reading it."""
    file: Path | None = None
    warnings: tuple[Finding, ...] = ()
    progress: Progress = field(default_factory=Silence)
    providers: Callable[[str], Provider] = find_provider
    registry: Callable[[], Iterable[str]] = all_providers
    """The names of all providers there are."""
    connector: Connector | None = None
    """How hosts are reached; None is SSH with this cluster's known host keys."""

    @property
    def spec(self) -> Spec:
        """All that the file says. Reads it where only the hosts are known so far."""
        if not isinstance(self.known, Recalled):
            return self.known
        return open_context(self.file, None if self.file else self.known.cluster).spec

    @property
    def cluster(self) -> str:
        return self.known.cluster

    @property
    def members(self) -> tuple[Member, ...]:
        if isinstance(self.known, Recalled):
            return self.known.members
        from shoal.spec.members import members

        return members(self.known)

    @property
    def shares(self) -> bool:
        """Whether it has storage that its hosts share."""
        return self.known.shares if isinstance(self.known, Recalled) else bool(self.known.storage)

    @property
    def controller(self) -> Member:
        return self.members[0]

    @property
    def known_hosts(self) -> Path:
        return state_directory(self.cluster) / "known_hosts"

    def connect(self) -> Connector:
        return self.connector or SshConnector(self.known_hosts)

    async def fleet(self, chosen: Iterable[Member] | None = None) -> Fleet:
        """The hosts of a run, not yet connected."""
        from shoal.plan.fleet import Fleet

        targets = await self.targets(chosen if chosen is not None else self.members)
        return Fleet({target.name: target for target in targets}, self.connect())

    async def connections(self, chosen: Iterable[Member] | None = None) -> Connections:
        """The same for verbs that need no agent: they start faster."""
        targets = await self.targets(chosen if chosen is not None else self.members)
        return Connections({target.name: target for target in targets}, self.connect())

    async def targets(self, chosen: Iterable[Member]) -> list[Target]:
        """Where each member is. A member whose host is yet to be made is refused with the way to make it."""
        chosen = list(chosen)
        made = await self.instances() if any(member.provider for member in chosen) else {}
        return [_target(self.cluster, member, made) for member in chosen]

    async def instances(self) -> dict[str, tuple[str, Instance]]:
        """The members that their providers have made, by name."""
        at = {member.name: member.provider for member in self.members}
        found: dict[str, tuple[str, Instance]] = {}
        for name in self.provider_names():
            for instance in await self.providers(name).instances(self.cluster):
                if at.get(instance.name) == name:
                    found[instance.name] = (name, instance)
        return found

    async def holdings(self) -> Holdings:
        """Everything that any provider has for this cluster: what the file forgot still runs, and may cost money."""
        found: list[tuple[str, Instance]] = []
        findings: list[Finding] = []
        named = self.provider_names()
        for name in sorted({*named, *self.registry()}):
            try:
                found += [(name, instance) for instance in await self.providers(name).instances(self.cluster)]
            except ProviderError as error:
                if name in named:
                    raise
                what = f"cannot ask {name} whether it has hosts of cluster {self.cluster}"
                findings.append(Finding("warning", what, error.message, error.hint))
        return Holdings(tuple(found), tuple(findings))

    def provider_names(self) -> list[str]:
        """The providers that the file names."""
        return sorted({member.provider for member in self.members if member.provider})

    def choose(self, hosts: str | None, nodeset: str | None = None) -> list[Member]:
        """The members that a hostlist and a nodeset name; all of them when neither is given."""
        chosen = [member for member in self.members if nodeset in (None, member.nodeset)]
        if not chosen:
            sets = ", ".join(dict.fromkeys(member.nodeset for member in self.members))
            raise UsageError(f"there is no nodeset {nodeset!r} in cluster {self.cluster}", hint=f"use one of {sets}")
        if hosts is None:
            return chosen
        try:
            names = expand(hosts)
        except ValueError as error:
            problem = error.problem if isinstance(error, HostlistError) else error
            raise UsageError(
                f"{hosts!r} is not a hostlist: {problem}", hint="write gpu01,gpu02 or gpu[01-16]"
            ) from None
        by_name = {member.name: member for member in chosen}
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
        chosen = self.choose(host)
        if len(chosen) > 1:
            raise UsageError(f"{host} names {len(chosen)} hosts, and this takes one", hint=f"say {chosen[0].name}")
        return chosen[0]


def open_context(file: Path | None = None, cluster: str | None = None, progress: Progress | None = None) -> Context:
    """The cluster of a spec file; without a file, the sandbox."""
    progress = progress or Silence()
    file = _file(file, cluster)
    if file is None:
        return Context(_sandbox(cluster or NO_FILE), progress=progress)
    from shoal.spec.load import load_all

    spec, warnings = load_all(file)
    return Context(spec, file, tuple(warnings), progress)


def open_hosts(file: Path | None = None, cluster: str | None = None) -> Context:
    """The same for commands that need its hosts only: a file that was read before is not read again."""
    recalled = recalled_hosts(file, cluster)
    if recalled is not None:
        return recalled
    context = open_context(file, cluster)  # if anything is wrong, this says what
    name, text = _named(context.file, cluster)
    keep(state_directory(), name, text, Recalled(context.cluster, context.members, context.shares))
    return context


def recalled_hosts(file: Path | None = None, cluster: str | None = None) -> Context | None:
    """The same, but None where the file was not read before, or is wrong."""
    try:
        file = _file(file, cluster)
        known = recall(state_directory(), *_named(file, cluster))
    except (OSError, ValueError, UsageError):
        return None
    return Context(known, file) if known is not None else None


def _named(file: Path | None, cluster: str | None) -> tuple[str, str]:
    """What a spec is remembered by, and its text."""
    if file is None:
        return f"sandbox {cluster or NO_FILE}", ""
    return str(file.absolute()), file.read_text(encoding="utf-8")


def _file(file: Path | None, cluster: str | None) -> Path | None:
    if file is None and DEFAULT_FILE.exists():
        file = DEFAULT_FILE
    if file is None and cluster is None:
        _refuse_to_guess()
    if file is not None and cluster is not None:
        raise UsageError(
            f"the cluster's name is in {file}; --cluster {cluster} names one that has no file",
            hint="leave out --cluster and unset SHOAL_CLUSTER, or run this where there is no shoal.yaml",
        )
    return file


def _refuse_to_guess() -> None:
    """Who is in a folder below that of the file means the file, and would get a sandbox."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # a folder that was removed
        return
    above = next((place / DEFAULT_FILE for place in here.parents if (place / DEFAULT_FILE).is_file()), None)
    if above is not None:
        raise UsageError(
            f"there is no {DEFAULT_FILE} here, and one in {above.parent}",
            hint=f"use -f {os.path.relpath(above)}, or --cluster {NO_FILE} for the sandbox",
        )


def _sandbox(cluster: str) -> Spec:
    from shoal.spec.members import default_spec
    from shoal.spec.words import printable

    try:
        return default_spec(cluster)
    except ValueError:
        raise UsageError(
            f"{printable(cluster)!r} is not a cluster name", hint="use lower-case letters, digits and -, as in reef"
        ) from None


def computing(context: Context) -> list[str]:
    """The hosts that run jobs."""
    return [member.name for member in context.members if "compute" in member.roles]


def keeping(context: Context) -> list[str]:
    """The hosts that have the files of jobs: those that run them, and the controller for nodes that come and go."""
    return list(dict.fromkeys((*computing(context), context.controller.name)))


def state_directory(cluster: str = "") -> Path:
    """Where the operator's machine keeps what it knows of a cluster: host keys, and of all of them their hosts."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "shoal" / cluster


def requests(chosen: Iterable[Member], provider: str) -> list[Request]:
    """What a provider is asked for."""
    return [Request(member.name, member.shape) for member in chosen if member.provider == provider]


def _target(cluster: str, member: Member, made: dict[str, tuple[str, Instance]]) -> Target:
    if member.provider is None:
        return Target(member.name, member.address, member.port, member.user, member.identity)
    if member.name not in made:
        # What root made, only root sees.
        other = "" if os.geteuid() == 0 else "; if root made it, use sudo"
        mine = f"; for hosts of yours, go to where their {DEFAULT_FILE} is" if cluster == NO_FILE else ""
        raise ProviderError(
            f"cluster {cluster}: host {member.name} is not there yet", hint=f"run `shoal up`{other}{mine}"
        )
    return made[member.name][1].target


def cannot_make(provider: str, problems: Sequence[Finding]) -> ProviderError:
    """Why a provider cannot make hosts: the one problem with its fix, or all of them, a line each."""
    if len(problems) == 1:
        return ProviderError(str(replace(problems[0], fix="")), hint=problems[0].fix)
    told = "".join(f"\n  {problem}" for problem in problems)
    return ProviderError(f"{provider} hosts cannot be made here:{told}", hint="solve these, then run the command again")


def telling(phase: Phase) -> Callable[[str, float], None]:
    """A provider's progress, shown in a phase."""
    return lambda text, part: phase.at(part, text)
