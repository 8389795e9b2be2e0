"""`shoal env build`: environments made on one host, brought to the nodes, compared with their drivers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from shoal.environments.cuda import cuda_findings
from shoal.environments.place import LOCAL, Look, Made, look_command, name_command, parse_look, unpack_command
from shoal.environments.source import Source, read_source
from shoal.errors import HostError, ShoalError
from shoal.hostlist import compress
from shoal.hosts.api import Host, Process
from shoal.plan.connections import Connections
from shoal.plan.progress import Phase
from shoal.spec.finding import Finding
from shoal.verbs.context import Context
from shoal.verbs.env import LONG_PATIENCE, PATIENCE, Placed, base, chosen, failed, must, text_digest

CHUNK = 8 * 1024 * 1024


@dataclass(frozen=True)
class BuildResult:
    """What `env build` came to."""

    cluster: str
    made: tuple[Made, ...] = ()
    """In force now."""
    fresh: tuple[str, ...] = ()
    """Those of them that were not there before."""
    copied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The nodes that got a copy of an environment."""
    findings: tuple[Finding, ...] = ()
    failures: Mapping[str, HostError] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return not self.failures and not any(finding.level == "error" for finding in self.findings)


async def build(context: Context, names: Sequence[str] = ()) -> BuildResult:
    """Make environments, all of the spec's when none is named. What is there already is left as it is."""
    wanted = chosen(context, names)
    sources = {name: read_source(one.entry, base(context)) for name, one in wanted.items()}
    nodes = [member.name for member in context.members if "compute" in member.roles]
    results: list[BuildResult] = []
    async with await context.connections() as fleet:
        for name, one in wanted.items():
            with context.progress.phase(f"environment {name}", 1) as phase:
                results.append(await _one(context, fleet, name, one, sources[name], nodes, phase))
        return BuildResult(
            context.cluster,
            tuple(made for result in results for made in result.made),
            tuple(name for result in results for name in result.fresh),
            {name: hosts for result in results for name, hosts in result.copied.items()},
            tuple(finding for result in results for finding in result.findings),
            dict(fleet.failures),
        )


async def _one(
    context: Context,
    fleet: Connections,
    name: str,
    placed: Placed,
    source: Source,
    nodes: Sequence[str],
    phase: Phase,
) -> BuildResult:
    entry, builder = placed.entry, await fleet.host(placed.builder)
    told = await _make(context, builder, name, placed, source, phase)
    made = Made.of({**told, "name": name, "text": text_digest(entry, source)})
    archive = f"{placed.directory}/archives/{made.id}.tar"
    looks = await _look(fleet, nodes, made.path, archive)
    copied: tuple[str, ...] = ()
    if entry.place == "local":
        lacking = [node for node, look in looks.items() if look.state == "missing"]
        if lacking:
            phase.at(0.9, f"copies to {compress(lacking)}")
            await _copy(fleet, builder, made, archive, lacking, looks)
            looks |= await _look(fleet, lacking, made.path, archive)
            copied = tuple(node for node in lacking if node in looks and looks[node].state != "missing")
    findings = (*_bound(made), *_misfits(made, placed.directory, looks), *_cuda(made, looks))
    if any(finding.level == "error" for finding in findings):
        return BuildResult(context.cluster, findings=findings)
    await must(builder, name_command(placed.directory, name), made.as_json().encode(), f"name environment {name}")
    phase.done(builder.name)
    return BuildResult(
        context.cluster, (made,), (name,) if told["made"] else (), {name: copied} if copied else {}, findings
    )


async def _make(
    context: Context, host: Host, name: str, placed: Placed, source: Source, phase: Phase
) -> dict[str, Any]:
    """Run the program that builds, and pass on where it is."""
    asked = {
        "requirements": source.requirements,
        "constraints": source.constraints,
        "locked": source.locked,
        "for_python": source.for_python,
        "python": placed.entry.python,
        "place": placed.entry.place,
        "directory": placed.directory,
        "local": LOCAL,
        "relocatable": _program("relocatable"),
        "proxy": context.spec.proxy.variables if context.spec.proxy else {},
    }
    process = await host.start(["python3", "-I", "-c", _program("builder")])
    try:
        async with asyncio.timeout(LONG_PATIENCE):
            await process.write(json.dumps(asked).encode() + b"\n")
            return await _told(process, host.name, name, phase)
    except TimeoutError:
        raise ShoalError(
            f"environment {name} was not ready within {LONG_PATIENCE / 60:.0f} minutes",
            hint="run the command again: it goes on from there",
        ) from None
    finally:
        await process.kill()


async def _told(process: Process, host: str, name: str, phase: Phase) -> dict[str, Any]:
    while line := await process.readline():
        event: dict[str, Any] = json.loads(line) if line.startswith(b"{") else {"event": ""}
        if event["event"] == "progress":
            phase.say(host, event["text"])
        elif event["event"] == "failed":
            raise ShoalError(f"environment {name} could not be made on {host}: {event['what']}", hint=event["fix"])
        elif event["event"] == "done":
            return event
    said = (await process.wait()).error_text.strip().splitlines()
    raise ShoalError(
        f"environment {name}: the builder on {host} ended before it was done" + (f": {said[-1]}" if said else ""),
        hint="run the command again: it goes on from there",
    )


def _program(name: str) -> str:
    """The text of a program that runs on a host."""
    return resources.files("shoal.environments").joinpath(f"{name}.py").read_text("utf-8")


async def _look(fleet: Connections, nodes: Iterable[str], path: str, archive: str) -> dict[str, Look]:
    async def one(node: str) -> Look:
        host = await fleet.host(node)
        return parse_look((await host.run(look_command(path, archive), timeout=PATIENCE)).text)

    return await fleet.each(nodes, one)


async def _copy(
    fleet: Connections, builder: Host, made: Made, archive: str, lacking: Sequence[str], looks: Mapping[str, Look]
) -> None:
    """A copy for each node: unpacked from the archive where the node sees it, else sent through this machine."""
    near = [node for node in lacking if looks[node].archive]
    far = [node for node in lacking if not looks[node].archive]

    async def unpack(node: str) -> None:
        host = await fleet.host(node)
        await must(host, unpack_command(made.path, archive), b"", f"unpack {archive}", LONG_PATIENCE)

    async def send(node: str) -> None:
        host = await fleet.host(node)
        process = await host.start(unpack_command(made.path))
        offset = 0
        while data := await _part(builder, archive, offset):
            await process.write(data)
            offset += 1
        result = await process.wait()
        if result.status != 0:
            raise failed(node, f"unpack environment {made.name}", result.error_text)

    await fleet.each(near, unpack)
    await fleet.each(far, send)


async def _part(builder: Host, archive: str, offset: int) -> bytes:
    line = ["dd", f"if={archive}", f"bs={CHUNK}", f"skip={offset}", "count=1", "status=none"]
    result = await builder.run(line, timeout=PATIENCE)
    if result.status != 0:
        raise failed(builder.name, f"read {archive}", result.error_text)
    return result.stdout


def _bound(made: Made) -> list[Finding]:
    """What its packages brought that works in one place only."""
    fix = "choose another version of the package that brings it"
    return [
        Finding("warning", f"environment {made.name}: {file} works only where {place} is", "", fix)
        for file, place in made.bound
    ]


def _misfits(made: Made, directory: str, looks: Mapping[str, Look]) -> list[Finding]:
    """Nodes that cannot use the environment, each kind with the reason."""
    missing = [node for node, look in looks.items() if look.state == "missing"]
    other = [node for node, look in looks.items() if look.state not in ("missing", made.python)]
    findings = []
    if missing:
        findings.append(
            Finding(
                "error" if len(missing) == len(looks) else "warning",
                f"environment {made.name}: the nodes do not see {directory}",
                fix="name a directory that all hosts share, or say `place: local`",
                host=compress(missing),
            )
        )
    fix = f"install Python {made.python} there, or name nodes that have it with --partition or --nodelist"
    for state in sorted({looks[node].state for node in other}):
        nodes = [node for node in other if looks[node].state == state]
        what = "its Python does not start" if state == "broken" else f"the nodes have no Python {made.python} to run it"
        found = looks[nodes[0]].why if state == "broken" else f"Python {state}"
        level: Literal["error", "warning"] = "error" if len(other) == len(looks) else "warning"
        findings.append(Finding(level, f"environment {made.name}: {what}", found, fix, host=compress(nodes)))
    return findings


def _cuda(made: Made, looks: Mapping[str, Look]) -> tuple[Finding, ...]:
    drivers = {node: look.driver for node, look in looks.items() if look.driver}
    return cuda_findings(made.name, made.torch, made.cuda, drivers) if made.torch else ()
