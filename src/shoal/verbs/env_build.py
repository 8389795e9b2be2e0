"""`shoal env build`: build environments on one host, copy them to the nodes, and check the nodes' drivers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shoal.contract import VERSION
from shoal.environments import store
from shoal.environments.cuda import cuda_findings
from shoal.environments.requirements import RequirementSet, read_requirements
from shoal.environments.store import BuiltEnvironment, NodeEnvironment
from shoal.errors import HostError, ShoalError
from shoal.hostlist import compress
from shoal.hosts.api import Host, Process
from shoal.plan.connections import Connections
from shoal.plan.progress import Phase
from shoal.remote import program_text, python_command
from shoal.spec.finding import Finding
from shoal.verbs import env
from shoal.verbs.context import Context, compute_hosts

CHUNK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class BuildResult:
    """The outcome of `shoal env build`."""

    cluster: str
    made: tuple[BuiltEnvironment, ...] = ()
    """The environments that are current now."""
    fresh: tuple[str, ...] = ()
    """The names of those built in this run."""
    copied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The nodes that got a copy, by environment."""
    findings: tuple[Finding, ...] = ()
    failures: Mapping[str, HostError] = field(default_factory=dict)


async def build(context: Context, names: Sequence[str] = ()) -> BuildResult:
    """Build the named environments, or all of the spec. One that is current is left as it is."""
    places = env.choose_environments(context, names)
    requirement_sets = {
        name: read_requirements(place.entry, env.base_directory(context)) for name, place in places.items()
    }
    nodes = compute_hosts(context)
    result = BuildResult(context.cluster)
    async with await context.connections() as fleet:
        for name, place in places.items():
            with context.progress.phase(f"environment {name}", 1) as phase:
                result = await _build(context, result, fleet, name, place, requirement_sets[name], nodes, phase)
        return replace(result, failures=dict(fleet.failures))


async def _build(
    context: Context,
    result: BuildResult,
    fleet: Connections,
    name: str,
    place: env.EnvironmentPlace,
    requirements: RequirementSet,
    nodes: Sequence[str],
    phase: Phase,
) -> BuildResult:
    """The result with this environment as well."""
    entry, builder = place.entry, await fleet.host(place.builder)
    proxy = context.spec.proxy.variables if context.spec.proxy else {}
    event = await run_builder(builder, name, place, requirements, phase, proxy)
    environment = describe_build(event, name, place, requirements)
    archive = f"{place.directory}/archives/{environment.id}.tar"
    inspection = store.inspect_command(environment.path, archive)
    copies = await env.inspect_environment(fleet, nodes, inspection)
    copied_nodes: tuple[str, ...] = ()
    if entry.place == "local":
        missing_nodes = [node for node, copy in copies.items() if copy.state == "missing"]
        if missing_nodes:
            phase.set_fraction(0.9, f"copies to {compress(missing_nodes)}")
            await _copy(fleet, builder, environment, archive, missing_nodes, copies)
            copies |= await env.inspect_environment(fleet, missing_nodes, inspection)
            copied_nodes = tuple(node for node in missing_nodes if node in copies and copies[node].state != "missing")
    findings = (*bound_findings(environment), *_node_findings(environment, place.directory, copies))
    if environment.torch:
        drivers = {node: copy.driver for node, copy in copies.items() if copy.driver}
        findings += cuda_findings(environment.name, environment.torch, environment.cuda, drivers)
    result = replace(result, findings=(*result.findings, *findings))
    if any(finding.level == "error" for finding in findings):
        return result
    await publish(builder, environment, place.directory)
    if entry.place == "local":
        nodes_with_copy = [node for node, copy in copies.items() if copy.state != "missing"]
        await _link_copies(fleet, environment, nodes_with_copy)
    phase.done(builder.name)
    return replace(
        result,
        made=(*result.made, environment),
        fresh=(*result.fresh, *((name,) if event["made"] else ())),
        copied={**result.copied, **({name: copied_nodes} if copied_nodes else {})},
    )


def describe_build(
    event: Mapping[str, Any], name: str, place: env.EnvironmentPlace, requirements: RequirementSet
) -> BuiltEnvironment:
    """The environment that the build program reports."""
    text = env.text_digest(place.entry, requirements)
    return store.locate(BuiltEnvironment.of({**event, "name": name, "text": text}), place.directory)


async def publish(builder: Host, environment: BuiltEnvironment, directory: str) -> None:
    """Make the name stand for the environment: for `shoal run`, and as a path."""
    what = f"name environment {environment.name}"
    await env.run_checked(builder, store.write_link_command(environment), b"", what)
    content = environment.as_json().encode()
    await env.run_checked(builder, store.write_name_command(directory, environment.name), content, what)


async def _link_copies(fleet: Connections, environment: BuiltEnvironment, nodes: Sequence[str]) -> None:
    async def link(node: str) -> None:
        what = f"name environment {environment.name}"
        await env.run_checked(await fleet.host(node), store.write_link_command(environment), b"", what)

    await fleet.each(nodes, link)


async def run_builder(
    host: Host,
    name: str,
    place: env.EnvironmentPlace,
    requirements: RequirementSet,
    phase: Phase,
    proxy: Mapping[str, str],
    local: str = store.LOCAL_DIRECTORY,
    git_fix: str = "run `shoal up`, which installs it",
) -> dict[str, Any]:
    """Run the build program, and show its progress. `local` is where it keeps uv."""
    request = {
        "requirements": requirements.requirements,
        "constraints": requirements.constraints,
        "locked": requirements.locked,
        "for_python": requirements.for_python,
        "python": place.entry.python,
        "place": place.entry.place,
        "directory": place.directory,
        "local": local,
        "proxy": dict(proxy),
        "shoal": VERSION,
        "files": store.added_files(),
        "finish": program_text("environment_files"),
        "git_fix": git_fix,
    }
    process = await host.start(python_command("environment_builder"))
    try:
        async with asyncio.timeout(env.BUILD_TIMEOUT_S):
            await process.write(json.dumps(request).encode() + b"\n")
            return await _read_events(process, host.name, name, phase)
    except TimeoutError:
        raise ShoalError(
            f"cannot build environment {name} within {env.BUILD_TIMEOUT_S / 60:.0f} minutes",
            hint="run the command again: it continues from there",
        ) from None
    finally:
        await process.kill()


async def _read_events(process: Process, host: str, name: str, phase: Phase) -> dict[str, Any]:
    while line := await process.readline():
        event: dict[str, Any] = json.loads(line) if line.startswith(b"{") else {"event": ""}
        if event["event"] == "progress":
            phase.update(host, event["text"])
        elif event["event"] == "failed":
            raise ShoalError(f"cannot build environment {name} on {host}: {event['what']}", hint=event["fix"])
        elif event["event"] == "done":
            return event
    output = (await process.wait()).error_text.strip().splitlines()
    raise ShoalError(
        f"environment {name}: the builder on {host} ended early" + (f": {output[-1]}" if output else ""),
        hint="run the command again: it continues from there",
    )


async def _copy(
    fleet: Connections,
    builder: Host,
    environment: BuiltEnvironment,
    archive: str,
    nodes: Sequence[str],
    copies: Mapping[str, NodeEnvironment],
) -> None:
    """Copy to each node: unpack the archive where the node sees it, else send it through this machine."""
    nodes_with_archive = [node for node in nodes if copies[node].archive]
    nodes_without_archive = [node for node in nodes if not copies[node].archive]

    async def unpack(node: str) -> None:
        host = await fleet.host(node)
        await env.run_checked(
            host, store.unpack_command(environment.path, archive), b"", f"unpack {archive}", env.BUILD_TIMEOUT_S
        )

    async def send(node: str) -> None:
        host = await fleet.host(node)
        process = await host.start(store.unpack_command(environment.path))
        offset = 0
        while data := await _read_chunk(builder, archive, offset):
            await process.write(data)
            offset += 1
        result = await process.wait()
        if result.status != 0:
            raise env.command_failed(node, f"unpack environment {environment.name}", result.error_text)

    await fleet.each(nodes_with_archive, unpack)
    await fleet.each(nodes_without_archive, send)


async def _read_chunk(builder: Host, archive: str, offset: int) -> bytes:
    line = ["dd", f"if={archive}", f"bs={CHUNK_BYTES}", f"skip={offset}", "count=1", "status=none"]
    result = await builder.run(line, timeout=env.INSPECT_TIMEOUT_S)
    if result.status != 0:
        raise env.command_failed(builder.name, f"read {archive}", result.error_text)
    return result.stdout


def bound_findings(environment: BuiltEnvironment) -> list[Finding]:
    """Files of its packages that work in one place only."""
    fix = "choose another version of the package that contains it"
    return [
        Finding("warning", f"environment {environment.name}: {file} works only where {place} is", "", fix)
        for file, place in environment.bound
    ]


def _node_findings(
    environment: BuiltEnvironment, directory: str, copies: Mapping[str, NodeEnvironment]
) -> list[Finding]:
    """Nodes that cannot use the environment, grouped by reason."""
    missing_nodes = [node for node, copy in copies.items() if copy.state == "missing"]
    unusable_nodes = [node for node, copy in copies.items() if copy.state not in ("missing", environment.python)]
    findings = []
    if missing_nodes:
        findings.append(
            Finding(
                "error" if len(missing_nodes) == len(copies) else "warning",
                f"environment {environment.name}: the nodes do not see {directory}",
                fix="set a directory that all hosts share, or set `place: local`",
                host=compress(missing_nodes),
            )
        )
    fix = f"install Python {environment.python} there, or name nodes that have it with --partition or --nodelist"
    for state in sorted({copies[node].state for node in unusable_nodes}):
        nodes = [node for node in unusable_nodes if copies[node].state == state]
        what = (
            "its Python does not start"
            if state == "broken"
            else f"the nodes have no Python {environment.python} to run it"
        )
        reason = copies[nodes[0]].why if state == "broken" else f"Python {state}"
        level: Literal["error", "warning"] = "error" if len(unusable_nodes) == len(copies) else "warning"
        findings.append(Finding(level, f"environment {environment.name}: {what}", reason, fix, host=compress(nodes)))
    return findings
