"""A controller that moves to another host takes along what rents: the old service ends, its ledger goes on.

Two services for one cluster would give back what the other one rented, and each would have budgets of its own. Which
host rented before is seen on the members themselves, and kept on the operator's machine for one that left the file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from shoal.agent.client import Ask
from shoal.agent.facts import Facts
from shoal.elastic.ledger import LEDGER
from shoal.errors import HostError, ProviderError, ShoalError
from shoal.hostlist import compress
from shoal.hosts.api import Host, Target
from shoal.plan.fleet import Fleet
from shoal.plan.observe import Observed
from shoal.roles.elastic import SINCE, SPEC, SUCCEEDED, UNIT, has_service, without_service
from shoal.roles.forgotten import Forgotten
from shoal.spec.finding import Finding
from shoal.spec.rented import rented_sets
from shoal.verbs import elastic_service
from shoal.verbs.context import Context, state_directory
from shoal.verbs.held_machines import PROGRAM, held_on

RECORD = "rents.json"
"""The host that rents, as it is reached: kept beside the cluster's host keys."""
PATIENCE = 300.0


@dataclass(frozen=True)
class Predecessor:
    """A host on which a service of this cluster's rents, and which is not to be the controller any more."""

    target: Target
    end_jobs: bool
    """What it has rented may go, with the jobs on it."""


def note(context: Context, fleet: Fleet) -> None:
    """Keep which host rents, for the day when it leaves the file."""
    place = state_directory(context.cluster) / RECORD
    with contextlib.suppress(OSError):
        if not rented_sets(context.spec):
            return place.unlink(missing_ok=True)
        target = fleet.targets[context.controller.name]
        kept = {**asdict(target), "identity": str(target.identity) if target.identity else None}
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.write_text(json.dumps(kept), encoding="utf-8")
    return None


async def predecessor(
    context: Context, fleet: Fleet, observed: Observed, *, end_jobs: bool, leave: bool
) -> tuple[Predecessor | None, tuple[Finding, ...]]:
    """The host that rented before, where that is another one. Refused before any host is changed.

    While it has machines the jobs on them would end (`end_jobs` lets them); where it does not answer its service may
    run on (`leave` says that it does not matter).
    """
    target = _elsewhere(context, fleet, observed)
    if target is None:
        return None, ()
    try:
        async with _reaching(context, fleet, target) as old:
            facts = await (await old.agent(target.name)).facts(Ask(files={UNIT: "there", SPEC: "text"}))
            if not has_service(facts) or _cluster_of(facts) != context.cluster:
                return None, ()
            if not end_jobs:
                await _refuse_rented(await old.host(target.name), context.controller.name)
    except HostError as error:
        what = f"{target.name} rented for this cluster, and does not answer: its service may run on"
        if not leave:
            raise ShoalError(
                f"{what}; no host was changed: {error.message}",
                hint="bring it back and run `shoal up` again; or switch it off for good, and use --leave-rented",
            ) from error
        fix = f"switch it off, or on it, as root: systemctl disable --now {Path(UNIT).stem}"
        return None, (Finding("warning", what, error.cause, fix, host=target.name),)
    return Predecessor(target, end_jobs), ()


async def succeed(context: Context, fleet: Fleet, former: Predecessor) -> None:
    """End the service there, and have the new controller's go on with its ledger. Killed, it is done again."""
    name, here = former.target.name, await fleet.host(context.controller.name)
    with context.progress.phase(f"what rents moves from {name}", 1) as phase:
        async with _reaching(context, fleet, former.target) as old:
            there = await old.host(name)
            if wrong := await elastic_service.stop(there):
                raise ShoalError(f"{name}: the service that rents cannot be stopped: {wrong}", hint="solve that first")
            try:
                if not former.end_jobs:
                    await _refuse_rented(there, here.name)  # it went on until a moment ago
                await elastic_service.stop(here)  # of an earlier time as the controller
                told = await _carry(there, "give")
                await _carry(here, "take", told)
            except BaseException:
                await elastic_service.to_its_end(elastic_service.start(there))
                raise
            await old.converge(name, without_service(), {}, phase)


@asynccontextmanager
async def _reaching(context: Context, fleet: Fleet, target: Target) -> AsyncIterator[Fleet]:
    """The way to a host that may have left the file."""
    if fleet.targets.get(target.name) == target:
        yield fleet
        return
    async with Fleet({target.name: target}, context.connect()) as alone:
        yield alone


def _elsewhere(context: Context, fleet: Fleet, observed: Observed) -> Target | None:
    """Another host that rents for us, as far as can be seen."""
    controller = context.controller.name
    there = [name for name, facts in observed.facts.items() if name != controller and has_service(facts)]
    if there:
        return fleet.targets[there[0]]
    known, here = _noted(context.cluster), fleet.targets[controller]
    if known is None or (known.name in observed.facts and known.name != controller):
        return None  # it was looked at, and has none
    same = known.name == here.name or (known.address and (known.address, known.port) == (here.address, here.port))
    return None if same and has_service(observed.facts[controller]) else known


def _noted(cluster: str) -> Target | None:
    try:
        kept = json.loads((state_directory(cluster) / RECORD).read_text(encoding="utf-8"))
        return Target(**{**kept, "identity": Path(kept["identity"]) if kept["identity"] else None})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _cluster_of(facts: Facts) -> object:
    """The cluster that its service rents for: the host may be another one's by now."""
    try:
        return json.loads(facts.files[SPEC].text or "{}").get("cluster")
    except (ValueError, AttributeError):
        return None


async def _refuse_rented(host: Host, controller: str) -> None:
    """Nodes that are rented know only their own controller, and their jobs are in its queue."""
    machines = [
        Forgotten(one.token, one.node, one.account, one.id, one.state) for one in await held_on(host) or () if one.live
    ]
    if machines:
        raise ProviderError(
            f"the controller moves from {host.name} to {controller}, and jobs on machines that {host.name} rented "
            f"would end: {', '.join(map(str, machines))}; no host was changed",
            hint=f"on {host.name}, as root: scontrol update nodename={_nodes(machines)} state=power_down_asap; they go "
            "when their jobs have ended; then run `shoal up` again. Or use --allow-job-loss, and they go at once",
        )


def _nodes(machines: Sequence[Forgotten]) -> str:
    return compress(dict.fromkeys(one.node for one in machines))


async def _carry(host: Host, verb: str, told: bytes = b"") -> bytes:
    program = files("shoal").joinpath("elastic/move_ledger_program.py").read_text(encoding="utf-8")
    place = (str(LEDGER), SINCE, *((SUCCEEDED,) if verb == "take" else ()))
    result = await host.run((*PROGRAM, program, verb, *place), stdin=told, timeout=PATIENCE)
    if result.status != 0:
        said = result.error_text.strip().splitlines() or [f"status {result.status}"]
        raise ShoalError(f"{host.name}: the ledger {LEDGER} cannot be carried over: {said[-1]}", hint="solve that")
    return result.stdout
