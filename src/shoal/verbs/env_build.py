"""`shoal env build`: build environments on one host, copy them to the nodes, and check the nodes' drivers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.environments.cuda import cuda_findings
from shoal.environments.requirements import RequirementSet, read_requirements
from shoal.environments.store import (
    LOCAL_DIRECTORY,
    BuiltEnvironment,
    NodeEnvironment,
    inspect_command,
    parse_inspection,
    unpack_command,
    write_name_command,
)
from shoal.errors import HostError, ShoalError
from shoal.hostlist import compress
from shoal.hosts.api import Host, Process
from shoal.plan.fleet import Connections
from shoal.plan.progress import Phase
from shoal.remote import program_text
from shoal.spec.finding import Finding
from shoal.verbs.context import Context
from shoal.verbs.env import (
    BUILD_TIMEOUT_S,
    INSPECT_TIMEOUT_S,
    EnvironmentPlace,
    base_directory,
    choose_environments,
    command_failed,
    run_checked,
    text_digest,
)

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

    @property
    def whole(self) -> bool:
        return not self.failures and not any(finding.level == "error" for finding in self.findings)


async def build(context: Context, names: Sequence[str] = ()) -> BuildResult:
    """Build the named environments, or all of the spec. One that is current is left as it is."""
    places = choose_environments(context, names)
    sources = {name: read_requirements(place.entry, base_directory(context)) for name, place in places.items()}
    nodes = [member.name for member in context.members if "compute" in member.roles]
    results: list[BuildResult] = []
    async with await context.connections() as fleet:
        for name, place in places.items():
            with context.progress.phase(f"environment {name}", 1) as phase:
                results.append(await _build(context, fleet, name, place, sources[name], nodes, phase))
        return BuildResult(
            context.cluster,
            tuple(made for result in results for made in result.made),
            tuple(name for result in results for name in result.fresh),
            {name: hosts for result in results for name, hosts in result.copied.items()},
            tuple(finding for result in results for finding in result.findings),
            dict(fleet.failures),
        )


async def _build(
    context: Context,
    fleet: Connections,
    name: str,
    place: EnvironmentPlace,
    source: RequirementSet,
    nodes: Sequence[str],
    phase: Phase,
) -> BuildResult:
    entry, builder = place.entry, await fleet.host(place.builder)
    event = await _run_builder(context, builder, name, place, source, phase)
    made = BuiltEnvironment.of({**event, "name": name, "text": text_digest(entry, source)})
    archive = f"{place.directory}/archives/{made.id}.tar"
    copies = await _inspect(fleet, nodes, made.path, archive)
    copied: tuple[str, ...] = ()
    if entry.place == "local":
        lacking = [node for node, copy in copies.items() if copy.state == "missing"]
        if lacking:
            phase.set_fraction(0.9, f"copies to {compress(lacking)}")
            await _copy(fleet, builder, made, archive, lacking, copies)
            copies |= await _inspect(fleet, lacking, made.path, archive)
            copied = tuple(node for node in lacking if node in copies and copies[node].state != "missing")
    findings = (*_bound_findings(made), *_node_findings(made, place.directory, copies), *_cuda_findings(made, copies))
    if any(finding.level == "error" for finding in findings):
        return BuildResult(context.cluster, findings=findings)
    await run_checked(
        builder, write_name_command(place.directory, name), made.as_json().encode(), f"name environment {name}"
    )
    phase.done(builder.name)
    return BuildResult(
        context.cluster, (made,), (name,) if event["made"] else (), {name: copied} if copied else {}, findings
    )


async def _run_builder(
    context: Context, host: Host, name: str, place: EnvironmentPlace, source: RequirementSet, phase: Phase
) -> dict[str, Any]:
    """Run the build program, and show its progress."""
    request = {
        "requirements": source.requirements,
        "constraints": source.constraints,
        "locked": source.locked,
        "for_python": source.for_python,
        "python": place.entry.python,
        "place": place.entry.place,
        "directory": place.directory,
        "local": LOCAL_DIRECTORY,
        "proxy": context.spec.proxy.variables if context.spec.proxy else {},
    }
    process = await host.start(["python3", "-I", "-c", program_text("environment_builder")])
    try:
        async with asyncio.timeout(BUILD_TIMEOUT_S):
            await process.write(json.dumps(request).encode() + b"\n")
            return await _read_events(process, host.name, name, phase)
    except TimeoutError:
        raise ShoalError(
            f"cannot build environment {name} within {BUILD_TIMEOUT_S / 60:.0f} minutes",
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


async def _inspect(fleet: Connections, nodes: Iterable[str], path: str, archive: str) -> dict[str, NodeEnvironment]:
    async def inspect(node: str) -> NodeEnvironment:
        host = await fleet.host(node)
        return parse_inspection((await host.run(inspect_command(path, archive), timeout=INSPECT_TIMEOUT_S)).text)

    return await fleet.each(nodes, inspect)


async def _copy(
    fleet: Connections,
    builder: Host,
    made: BuiltEnvironment,
    archive: str,
    lacking: Sequence[str],
    copies: Mapping[str, NodeEnvironment],
) -> None:
    """Copy to each node: unpack the archive where the node sees it, else send it through this machine."""
    near = [node for node in lacking if copies[node].archive]
    far = [node for node in lacking if not copies[node].archive]

    async def unpack(node: str) -> None:
        host = await fleet.host(node)
        await run_checked(host, unpack_command(made.path, archive), b"", f"unpack {archive}", BUILD_TIMEOUT_S)

    async def send(node: str) -> None:
        host = await fleet.host(node)
        process = await host.start(unpack_command(made.path))
        offset = 0
        while data := await _read_chunk(builder, archive, offset):
            await process.write(data)
            offset += 1
        result = await process.wait()
        if result.status != 0:
            raise command_failed(node, f"unpack environment {made.name}", result.error_text)

    await fleet.each(near, unpack)
    await fleet.each(far, send)


async def _read_chunk(builder: Host, archive: str, offset: int) -> bytes:
    line = ["dd", f"if={archive}", f"bs={CHUNK_BYTES}", f"skip={offset}", "count=1", "status=none"]
    result = await builder.run(line, timeout=INSPECT_TIMEOUT_S)
    if result.status != 0:
        raise command_failed(builder.name, f"read {archive}", result.error_text)
    return result.stdout


def _bound_findings(made: BuiltEnvironment) -> list[Finding]:
    """Files of its packages that work in one place only."""
    fix = "choose another version of the package that contains it"
    return [
        Finding("warning", f"environment {made.name}: {file} works only where {place} is", "", fix)
        for file, place in made.bound
    ]


def _node_findings(made: BuiltEnvironment, directory: str, copies: Mapping[str, NodeEnvironment]) -> list[Finding]:
    """Nodes that cannot use the environment, grouped by reason."""
    missing = [node for node, copy in copies.items() if copy.state == "missing"]
    other = [node for node, copy in copies.items() if copy.state not in ("missing", made.python)]
    findings = []
    if missing:
        findings.append(
            Finding(
                "error" if len(missing) == len(copies) else "warning",
                f"environment {made.name}: the nodes do not see {directory}",
                fix="set a directory that all hosts share, or set `place: local`",
                host=compress(missing),
            )
        )
    fix = f"install Python {made.python} there, or name nodes that have it with --partition or --nodelist"
    for state in sorted({copies[node].state for node in other}):
        nodes = [node for node in other if copies[node].state == state]
        what = "its Python does not start" if state == "broken" else f"the nodes have no Python {made.python} to run it"
        reason = copies[nodes[0]].why if state == "broken" else f"Python {state}"
        level: Literal["error", "warning"] = "error" if len(other) == len(copies) else "warning"
        findings.append(Finding(level, f"environment {made.name}: {what}", reason, fix, host=compress(nodes)))
    return findings


def _cuda_findings(made: BuiltEnvironment, copies: Mapping[str, NodeEnvironment]) -> tuple[Finding, ...]:
    drivers = {node: copy.driver for node, copy in copies.items() if copy.driver}
    return cuda_findings(made.name, made.torch, made.cuda, drivers) if made.torch else ()
