"""`shoal env list` and `shoal env clean`, and the environment that a job uses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.contract import VERSION
from shoal.environments import store
from shoal.environments.requirements import RequirementSet, read_requirements
from shoal.environments.store import BuiltEnvironment, StoredEnvironment
from shoal.errors import CommandFailed, CommandTimeout, HostError, PartialFailure, UsageError
from shoal.hostlist import compress
from shoal.hosts.api import Host
from shoal.plan.connections import Connections
from shoal.roles.environments import builder_of, directory_of
from shoal.spec.environments import Environment
from shoal.spec.finding import nearest
from shoal.verbs.context import Context
from shoal.verbs.slurmctld import current_jobs, gather_answers

INSPECT_TIMEOUT_S = 60.0
"""To inspect environments on a share: one whose server is gone does not answer at all."""
NAMES_TIMEOUT_S = 15.0
"""To read the names of environments, a few small files."""
BUILD_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class EnvironmentPlace:
    """An environment of the spec, and where it is kept."""

    entry: Environment
    directory: str
    builder: str
    """The host that builds it."""


@dataclass(frozen=True)
class EnvironmentState:
    """One line of `env list`."""

    name: str
    state: str
    """`built`, `not built`, `changed` (its file has changed since), `outdated` (`shoal.train` in it is)."""
    place: str
    made: BuiltEnvironment | None = None
    path: str = ""
    """Where it is by name; empty while it is not built."""
    owner: str = ""
    """The user who built it; empty for one of the cluster."""


@dataclass(frozen=True)
class CleanResult:
    cluster: str
    removed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The ids removed, by host; those on a share under the host that builds them."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Old ones that are kept, each with the reason."""
    failures: Mapping[str, HostError] = field(default_factory=dict)


async def list_environments(context: Context) -> list[EnvironmentState]:
    """Every environment of the spec, with its state."""
    async with context.controller_host() as controller:
        return await environment_states(context, controller)


async def environment_states(context: Context, controller: Host) -> list[EnvironmentState]:
    places = choose_environments(context, ())
    environments = await current_environments(controller, places)
    states = []
    for name, place in places.items():
        environment = environments.get(name)
        if environment is None:
            states.append(EnvironmentState(name, "not built", place.entry.place))
            continue
        state = "changed" if is_stale(context, place.entry, environment) else built_state(environment)
        states.append(EnvironmentState(name, state, place.entry.place, environment, environment.link))
    return states


def built_state(environment: BuiltEnvironment) -> str:
    return "built" if environment.shoal == VERSION else "outdated"


async def clean(context: Context, *, dry_run: bool = False) -> CleanResult:
    """Remove environments that have no name any more and that no job uses, with their package caches and archives."""
    places = choose_environments(context, ())
    builders = {place.directory: place.builder for place in places.values()}
    async with await context.connections() as fleet:
        controller = await fleet.host(context.controller.name)
        [records] = await gather_answers(controller, current_jobs(controller))
        jobs = {note.environment: record.id for record in records if record.active and (note := record.note)}
        current_ids = {environment.id for environment in (await current_environments(controller, places)).values()}
        stored = await _list_stored(fleet, sorted(builders))
        reasons = explain_kept([entry for entries in stored.values() for entry in entries], current_ids, jobs)
        ids_to_remove = {
            (host, place): tuple(entry.id for entry in entries if entry.id not in {*current_ids, *reasons})
            for (host, place), entries in stored.items()
            if host == builders.get(place, host)  # a share is cleaned once, by its builder
        }
        if not dry_run:
            await _remove(fleet, ids_to_remove)
            remaining = (await current_environments(controller, places)).values()
            sources = {environment.source for environment in remaining}
            used_ids = {*reasons, *(environment.id for environment in remaining)}
            for directory, builder in builders.items():
                sweep = store.sweep_command(directory, sources, used_ids)
                await run_checked(await fleet.host(builder), sweep, b"", f"clear {directory}", BUILD_TIMEOUT_S)
        ids_by_host: dict[str, tuple[str, ...]] = {}
        for (name, _), ids in ids_to_remove.items():
            ids_by_host[name] = tuple(dict.fromkeys((*ids_by_host.get(name, ()), *ids)))
        removed = {name: ids for name, ids in ids_by_host.items() if ids and name not in fleet.failures}
        return CleanResult(context.cluster, removed, reasons, dict(fleet.failures))


async def _list_stored(
    fleet: Connections, directories: Sequence[str]
) -> dict[tuple[str, str], list[StoredEnvironment]]:
    """The environments on every host, by host and directory. Every host checks shares too, for its own processes."""

    async def list_host(name: str) -> list[tuple[str, list[StoredEnvironment]]]:
        host = await fleet.host(name)
        return [
            (place, store.parse_listing((await host.run(store.list_command(place), timeout=INSPECT_TIMEOUT_S)).text))
            for place in (*directories, store.LOCAL_DIRECTORY)
        ]

    answers = await fleet.each(fleet.targets, list_host)
    return {(host, place): entries for host, places in answers.items() for place, entries in places}


def explain_kept(
    environments: Iterable[StoredEnvironment], current_ids: set[str], jobs: Mapping[str, str]
) -> dict[str, str]:
    """Why environments without a name are kept."""
    reasons: dict[str, str] = {}
    for entry in environments:
        if entry.id in current_ids:
            continue
        if entry.id in jobs:
            reasons[entry.id] = f"job {jobs[entry.id]} uses it"
        elif entry.busy:
            reasons[entry.id] = "a process uses it"
        elif entry.age < store.RECENT_USE_S:
            reasons[entry.id] = f"built or used less than {store.RECENT_USE_S // 60} minutes ago"
    return reasons


async def _remove(fleet: Connections, ids_to_remove: Mapping[tuple[str, str], tuple[str, ...]]) -> None:
    async def remove(name: str) -> None:
        host = await fleet.host(name)
        for (owner, place), ids in ids_to_remove.items():
            if owner == name and ids:
                what = f"remove environments from {place}"
                await run_checked(host, store.remove_command(place, ids), b"", what, BUILD_TIMEOUT_S)

    await fleet.each({host for host, _ in ids_to_remove}, remove)


def choose_environments(context: Context, names: Sequence[str]) -> dict[str, EnvironmentPlace]:
    """The environments of the spec with these names; all of them without names."""
    environments = context.spec.environments
    if not environments:
        raise UsageError(
            "the spec has no environments", hint="add `environments: {torch: {requirements: requirements.txt}}`"
        )
    for name in names:
        if name not in environments:
            raise UsageError(f"the spec has no environment {name!r}", hint=nearest(name, list(environments)))
    return {
        name: EnvironmentPlace(entry, directory_of(context.spec, entry), builder_of(context.spec, entry))
        for name, entry in environments.items()
        if not names or name in names
    }


async def current_environments(controller: Host, places: Mapping[str, EnvironmentPlace]) -> dict[str, BuiltEnvironment]:
    """The environments that these names refer to on the controller."""
    environments: dict[str, BuiltEnvironment] = {}
    for directory in sorted({place.directory for place in places.values()}):
        try:
            result = await controller.run(store.read_names_command(directory), timeout=NAMES_TIMEOUT_S)
        except CommandTimeout:
            what = f"cannot read {directory} within {NAMES_TIMEOUT_S:g} s"
            raise CommandTimeout(
                controller.name, what, hint="check that the server of the share it is on is up"
            ) from None
        if result.status != 0:
            hint = "remove it, or set another `directory` for the environment"
            raise UsageError(f"cannot use environments on {controller.name}: {result.error_text.strip()}", hint=hint)
        stored = store.parse_names(result.text, directory)
        environments |= {
            name: environment
            for name, environment in stored.items()
            if name in places and places[name].directory == directory
        }
    return environments


def base_directory(context: Context) -> Path:
    """The directory that paths of the spec are relative to."""
    return context.file.parent if context.file else Path.cwd()


def text_digest(entry: Environment, source: RequirementSet) -> str:
    text = "\0".join((source.requirements, source.constraints, str(source.locked), entry.python, entry.place))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_stale(context: Context, entry: Environment, made: BuiltEnvironment) -> bool:
    """Whether the file has changed since the environment was built. A file that is not here counts as unchanged."""
    try:
        return text_digest(entry, read_requirements(entry, base_directory(context))) != made.text
    except UsageError:
        return False


async def run_checked(host: Host, argv: list[str], stdin: bytes, what: str, timeout: float = INSPECT_TIMEOUT_S) -> None:
    result = await host.run(argv, stdin=stdin, timeout=timeout)
    if result.status != 0:
        raise command_failed(host.name, what, result.error_text)


def command_failed(host: str, what: str, error_text: str) -> CommandFailed:
    return CommandFailed(host, f"cannot {what}: {error_text.strip()}", hint="check that its disk is not full")


async def inspect_environment(
    fleet: Connections, nodes: Iterable[str], command: list[str]
) -> dict[str, store.NodeEnvironment]:
    """What nodes have of an environment. `command` is store.inspect_command's."""

    async def inspect(node: str) -> store.NodeEnvironment:
        result = await (await fleet.host(node)).run(command, timeout=INSPECT_TIMEOUT_S)
        return store.parse_inspection(result.text)

    return await fleet.each(nodes, inspect)


async def job_environment(context: Context, fleet: Connections, name: str) -> BuiltEnvironment:
    """The environment that a job names. Raises UsageError for one that is not built."""
    places = choose_environments(context, [name])
    environment = (await current_environments(await fleet.host(context.controller.name), places)).get(name)
    fix = f"run `shoal env build {name}`"
    if environment is None:
        raise UsageError(f"environment {name} is not built yet", hint=fix)
    if is_stale(context, places[name].entry, environment):
        raise UsageError(f"environment {name} was built from another version of its file", hint=fix)
    return environment


async def require_environment(fleet: Connections, made: BuiltEnvironment, nodes: Sequence[str]) -> None:
    """Raise PartialFailure where some nodes of the job cannot use its environment. Marks the environment as used."""
    copies = await inspect_environment(fleet, nodes, store.inspect_command(made.path, use=True))
    unusable_nodes = [node for node in nodes if node not in copies or copies[node].state != made.python]
    if unusable_nodes:
        raise PartialFailure(
            f"{compress(unusable_nodes)} cannot use environment {made.name}, so nothing was queued",
            hint=f"run `shoal env build {made.name}`, or name other nodes with --nodelist or --partition",
        )
