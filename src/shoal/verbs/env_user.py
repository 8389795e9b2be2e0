"""`shoal env` of an ordinary user: the cluster's environments, and those that the user has built.

A user's environments are in the user's directory for jobs, which nobody else can enter. Everything is done as the user,
through the one host that they log in to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.environments import store
from shoal.environments.cuda import cuda_findings
from shoal.environments.requirements import read_requirements
from shoal.environments.store import BuiltEnvironment
from shoal.errors import CommandFailed, CommandTimeout, UsageError
from shoal.hosts.api import Host
from shoal.spec.cluster_record import ClusterRecord
from shoal.spec.environments import Environment
from shoal.spec.finding import Finding, nearest
from shoal.verbs import env
from shoal.verbs.context import Context
from shoal.verbs.env_build import BuildResult, bound_findings, describe_build, publish, run_builder
from shoal.verbs.run_user import make_user_directory
from shoal.verbs.slurmctld import current_jobs, gather_answers


@dataclass(frozen=True)
class UserEnvironments:
    """The environments that a user may use, by name."""

    user: str
    directory: str
    """Where the user's own are."""
    own: Mapping[str, BuiltEnvironment]
    cluster: Mapping[str, BuiltEnvironment]
    unsafe: Mapping[str, str]
    """By directory: why nothing in it is used."""


async def read_environments(host: Host, record: ClusterRecord) -> UserEnvironments:
    """Ask the host, which checks that nobody but root and the user can change what is in an environment."""
    directories = sorted(set(record.environments.values()))
    command = store.user_names_command(record.cluster, record.jobs, directories)
    try:
        result = await host.run(command, timeout=env.NAMES_TIMEOUT_S, root=False)
    except CommandTimeout:
        what = f"cannot read the environments within {env.NAMES_TIMEOUT_S:g} s"
        raise CommandTimeout(host.name, what, hint="ask the operator whether the server of the share is up") from None
    if result.status != 0:
        raise CommandFailed(host.name, f"cannot read the environments: {result.error_text.strip()}")
    answer = json.loads(result.text)

    def environments_in(directory: str) -> dict[str, BuiltEnvironment]:
        part = answer["directories"].get(directory, {"real": directory, "environments": []})
        built = [store.locate(BuiltEnvironment.of(data), part["real"]) for data in part["environments"]]
        return {environment.name: environment for environment in built}

    own = answer["own"]
    cluster = {
        name: environment
        for name, directory in record.environments.items()
        if (environment := environments_in(directory).get(name)) is not None
    }
    return UserEnvironments(answer["user"], own, environments_in(own), cluster, answer["unsafe"])


async def user_job_environment(host: Host, record: ClusterRecord, name: str) -> BuiltEnvironment:
    """The environment that a job of a user names. The user's own comes before one of the cluster."""
    environments = await read_environments(host, record)
    if name in environments.own:
        return environments.own[name]
    if name in environments.cluster:
        return environments.cluster[name]
    directory = record.environments.get(name, environments.directory)
    if directory in environments.unsafe:
        raise UsageError(
            f"environment {name} is not used: {environments.unsafe[directory]}",
            hint="ask the operator to repair it" if name in record.environments else "repair or remove it",
        )
    if name in record.environments:
        raise UsageError(f"environment {name} is not built yet", hint=f"ask the operator to `shoal env build {name}`")
    known = [*record.environments, *environments.own]
    build = f"`shoal env build {name} --requirements FILE` builds it"
    raise UsageError(f"there is no environment {name!r}", hint=f"{nearest(name, known)}; {build}" if known else build)


async def list_user_environments(context: Context) -> list[env.EnvironmentState]:
    """Those of the cluster, then the user's own."""
    record = _record(context)
    async with context.controller_host() as host:
        environments = await read_environments(host, record)
    states = []
    for name in record.environments:
        built = environments.cluster.get(name)
        state = env.built_state(built) if built else "not built"
        place, path = (built.place, built.link) if built else ("shared", "")
        states.append(env.EnvironmentState(name, state, place, built, path))
    for name, built in environments.own.items():
        state = env.built_state(built)
        states.append(env.EnvironmentState(name, state, built.place, built, built.link, environments.user))
    return states


async def build_own(context: Context, name: str, entry: Environment) -> BuildResult:
    """Build an environment in the user's own directory. `entry` names the file on this machine with its packages."""
    record = _record(context)
    if name in record.environments:
        raise UsageError(
            f"cluster {record.cluster} has an environment {name} already", hint="choose another name for yours"
        )
    requirements = read_requirements(entry, Path.cwd())
    async with context.controller_host() as host:
        home = await make_user_directory(host, record, "ask the operator to repair it")
        directory = f"{home['root']}/environments"
        place = env.EnvironmentPlace(entry, directory, host.name)
        git_fix = f"ask the operator to install git on {host.name}, or choose a package from an index"
        with context.progress.phase(f"environment {name}", 1) as phase:
            event = await run_builder(host, name, place, requirements, phase, record.proxy, directory, git_fix)
            environment = describe_build(event, name, place, requirements)
            await publish(host, environment, directory)
            phase.done(host.name)
        inspection = await host.run(store.inspect_command(environment.path), timeout=env.INSPECT_TIMEOUT_S, root=False)
    findings = [*bound_findings(environment), *_share_findings(record, environment)]
    driver = store.parse_inspection(inspection.text).driver
    if environment.torch and driver:
        findings += cuda_findings(name, environment.torch, environment.cuda, {record.controller: driver})
    fresh = (name,) if event["made"] else ()
    return BuildResult(context.cluster, (environment,), fresh, findings=tuple(findings))


async def remove_own(context: Context, name: str) -> env.CleanResult:
    """Forget one of the user's own environments, and remove it unless a job uses it."""
    record = _record(context)
    async with context.controller_host() as host:
        environments = await read_environments(host, record)
        if name in record.environments and name not in environments.own:
            raise UsageError(f"environment {name} belongs to the cluster", hint="only the operator removes it")
        if name not in environments.own:
            fix = nearest(name, list(environments.own)) if environments.own else "`shoal env list` lists them"
            raise UsageError(f"you have no environment {name!r}", hint=fix)
        forget = store.remove_name_command(environments.directory, name)
        await env.run_checked(host, forget, b"", f"remove environment {name}")
        return await _clean(host, record, environments.own[name].id, dry_run=False)


async def clean_own(context: Context, *, dry_run: bool = False) -> env.CleanResult:
    """Remove the user's own environments that have no name any more and that no job uses."""
    async with context.controller_host() as host:
        return await _clean(host, _record(context), "", dry_run=dry_run)


async def _clean(host: Host, record: ClusterRecord, dropped: str, *, dry_run: bool) -> env.CleanResult:
    """`dropped` is the id of the environment that the user has just given up: its last use does not matter."""
    environments = await read_environments(host, record)
    directory = environments.directory
    [records] = await gather_answers(host, current_jobs(host))
    active = [job for job in records if job.active and job.user == environments.user]
    jobs = {job.note.environment: job.id for job in active if job.note}
    listing = await host.run(store.list_command(directory), timeout=env.INSPECT_TIMEOUT_S, root=False)
    stored = [
        replace(entry, age=store.RECENT_USE_S) if entry.id == dropped else entry
        for entry in store.parse_listing(listing.text)
    ]
    current_ids = {environment.id for environment in environments.own.values()}
    # A job that `shoal run` has not made may use any of them, on a node that is not seen from here.
    others = [job.id for job in active if job.note is None]
    jobs |= {entry.id: others[0] for entry in stored if others and entry.id not in jobs}
    reasons = env.explain_kept(stored, current_ids, jobs)
    ids = tuple(entry.id for entry in stored if entry.id not in {*current_ids, *reasons})
    if not dry_run:
        if ids:
            what = f"remove environments from {directory}"
            await env.run_checked(host, store.remove_command(directory, ids), b"", what, env.BUILD_TIMEOUT_S)
        sources = {environment.source for environment in environments.own.values()}
        sweep = store.sweep_command(directory, sources, {*current_ids, *reasons})
        await env.run_checked(host, sweep, b"", f"clear {directory}", env.BUILD_TIMEOUT_S)
    return env.CleanResult(record.cluster, {record.controller: ids} if ids else {}, reasons)


def _share_findings(record: ClusterRecord, environment: BuiltEnvironment) -> list[Finding]:
    """A user reaches one host only: the others have the environment if it is on a share."""
    if any(environment.path.startswith(f"{path}/") for path in record.shares):
        return []
    what = f"environment {environment.name}: {environment.path} is not on a share"
    return [Finding("warning", what, fix=f"run its jobs with --nodelist {record.controller}", host=record.controller)]


def _record(context: Context) -> ClusterRecord:
    assert context.joined is not None
    return context.joined.record
