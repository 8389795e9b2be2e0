"""`shoal env list` and `shoal env clean`: which environments are in force, and the old ones cleared away."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.environments.place import (
    LOCAL,
    USED_LATELY,
    Kept,
    Made,
    kept_command,
    names_command,
    parse_kept,
    parse_names,
    remove_command,
    sweep_command,
)
from shoal.environments.source import Source, read_source
from shoal.errors import CommandFailed, HostError, TimedOut, UsageError
from shoal.hosts.api import Host
from shoal.jobs.record import parse_records, show_command
from shoal.plan.connections import Connections
from shoal.roles.environments import builder_of, directory_of
from shoal.spec.environments import Environment
from shoal.spec.model import Spec
from shoal.spec.problem import nearest
from shoal.verbs.context import Context
from shoal.verbs.slurmctld import while_it_runs
from shoal.verbs.status import ask

PATIENCE = 60.0
"""Seconds for a look at a share: one whose server has gone does not answer at all."""
NAMES_PATIENCE = 15.0
"""The same for a few small files."""
LONG_PATIENCE = 3600.0


@dataclass(frozen=True)
class Placed:
    """An environment of the spec, and where it is."""

    entry: Environment
    directory: str
    builder: str
    """The host that builds it."""


@dataclass(frozen=True)
class Listed:
    """One line of `env list`."""

    name: str
    state: str
    """`built`, `not built`, or `changed`: the file is not the one it was made from."""
    place: str
    made: Made | None = None


@dataclass(frozen=True)
class CleanResult:
    cluster: str
    removed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The ids that went, by host; those that all hosts share under the one that builds them."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Old ones that stay, each with the reason."""
    failures: Mapping[str, HostError] = field(default_factory=dict)


async def list_environments(context: Context) -> list[Listed]:
    """Every environment of the spec, and how it stands."""
    async with await context.connections([context.controller]) as fleet:
        return await environment_states(context, await fleet.host(context.controller.name))


async def environment_states(context: Context, controller: Host) -> list[Listed]:
    wanted = chosen(context, ())
    found = await in_force(controller, wanted.values())
    listed = []
    for name, one in wanted.items():
        made = found.get((one.directory, name))
        state = "not built" if made is None else "changed" if is_stale(context, one.entry, made) else "built"
        listed.append(Listed(name, state, one.entry.place, made))
    return listed


async def clean(context: Context, *, dry_run: bool = False) -> CleanResult:
    """Take away environments that have no name any more and that no job uses, their wheels and archives with them."""
    wanted = chosen(context, ())
    builders = {one.directory: one.builder for one in wanted.values()}
    async with await context.connections() as fleet:
        controller = await fleet.host(context.controller.name)
        [records] = await while_it_runs(controller, ask(controller, show_command()))
        jobs = {
            note.environment: record.id for record in parse_records(records) if record.active and (note := record.note)
        }
        current = {made.id: made.name for made in await _current(controller, wanted)}
        kept = await _kept(fleet, sorted(builders))
        reasons = _reasons([one for found in kept.values() for one in found], current, jobs)
        old = {
            (host, place): tuple(one.id for one in found if one.id not in current and one.id not in reasons)
            for (host, place), found in kept.items()
            if host == builders.get(place, host)  # what all hosts share goes once
        }
        if not dry_run:
            await _remove(fleet, old)
            now = await _current(controller, wanted)
            sources, used = {made.source for made in now}, {*reasons, *(made.id for made in now)}
            for directory, builder in builders.items():
                host = await fleet.host(builder)
                await must(host, sweep_command(directory, sources, used), b"", f"clear {directory}", LONG_PATIENCE)
        gone: dict[str, tuple[str, ...]] = {}
        for (name, _), ids in old.items():
            gone[name] = tuple(dict.fromkeys((*gone.get(name, ()), *ids)))
        removed = {name: ids for name, ids in gone.items() if ids and name not in fleet.failures}
        return CleanResult(context.cluster, removed, reasons, dict(fleet.failures))


async def _current(controller: Host, wanted: Mapping[str, Placed]) -> list[Made]:
    """What the names of the spec stand for now."""
    found = await in_force(controller, wanted.values())
    return [found[place] for name, one in wanted.items() if (place := (one.directory, name)) in found]


async def _kept(fleet: Connections, directories: Sequence[str]) -> dict[tuple[str, str], list[Kept]]:
    """What every host has, by host and directory. Shared directories are asked of every host: its processes count."""

    async def one(name: str) -> list[tuple[str, list[Kept]]]:
        host = await fleet.host(name)
        return [
            (place, parse_kept((await host.run(kept_command(place), timeout=PATIENCE)).text))
            for place in (*directories, LOCAL)
        ]

    answers = await fleet.each(fleet.targets, one)
    return {(host, place): found for host, places in answers.items() for place, found in places}


def _reasons(kept: Iterable[Kept], current: Mapping[str, str], jobs: Mapping[str, str]) -> dict[str, str]:
    """Why those that are not in force stay all the same."""
    found: dict[str, str] = {}
    for one in kept:
        if one.id in current:
            continue
        if one.id in jobs:
            found[one.id] = f"job {jobs[one.id]} uses it"
        elif one.busy:
            found[one.id] = "a process uses it"
        elif one.age < USED_LATELY:
            found[one.id] = f"made or used less than {USED_LATELY // 60} minutes ago"
    return found


async def _remove(fleet: Connections, old: Mapping[tuple[str, str], tuple[str, ...]]) -> None:
    async def one(name: str) -> None:
        host = await fleet.host(name)
        for (owner, place), ids in old.items():
            if owner == name and ids:
                await must(host, remove_command(place, ids), b"", f"remove environments from {place}", LONG_PATIENCE)

    await fleet.each({host for host, _ in old}, one)


def chosen(context: Context, names: Sequence[str]) -> dict[str, Placed]:
    """The environments of the spec that are named; all of them when none is."""
    known = context.spec.environments
    if not known:
        raise UsageError(
            "the spec has no environments", hint="add `environments: {torch: {requirements: requirements.txt}}`"
        )
    for name in names:
        if name not in known:
            raise UsageError(f"the spec has no environment {name!r}", hint=nearest(name, list(known)))
    return {name: placed(context.spec, entry) for name, entry in known.items() if not names or name in names}


def placed(spec: Spec, entry: Environment) -> Placed:
    return Placed(entry, directory_of(spec, entry), builder_of(spec, entry))


async def in_force(controller: Host, entries: Iterable[Placed]) -> dict[tuple[str, str], Made]:
    """What names stand for on the controller, by directory and name."""
    found: dict[tuple[str, str], Made] = {}
    for directory in sorted({entry.directory for entry in entries}):
        try:
            result = await controller.run(names_command(directory), timeout=NAMES_PATIENCE)
        except TimedOut:
            what = f"{directory}, where environments are, does not answer within {NAMES_PATIENCE:g} s"
            raise TimedOut(controller.name, what, hint="is the host up that keeps the share it is in?") from None
        found |= {(directory, name): made for name, made in parse_names(result.text, directory).items()}
    return found


def base(context: Context) -> Path:
    """The directory that paths of the spec are relative to."""
    return context.file.parent if context.file else Path.cwd()


def text_digest(entry: Environment, source: Source) -> str:
    text = "\0".join((source.requirements, source.constraints, str(source.locked), entry.python, entry.place))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_stale(context: Context, entry: Environment, made: Made) -> bool:
    """Whether the file is not the one that the environment was made from. One that is not here says nothing."""
    try:
        return text_digest(entry, read_source(entry, base(context))) != made.text
    except UsageError:
        return False


async def must(host: Host, argv: list[str], stdin: bytes, what: str, patience: float = PATIENCE) -> None:
    result = await host.run(argv, stdin=stdin, timeout=patience)
    if result.status != 0:
        raise failed(host.name, what, result.error_text)


def failed(host: str, what: str, said: str) -> CommandFailed:
    return CommandFailed(host, f"cannot {what}: {said.strip()}", hint="is its disk full?")
