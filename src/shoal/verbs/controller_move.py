"""Move shoal-elastic with its ledger when the controller moves to another host.

Two services for one cluster would release each other's rentals, and each would have its own budget. The former host is
found on the members themselves; for a host that left the file, the operator's machine keeps a record.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.agent.client import FactsRequest
from shoal.agent.facts import Facts
from shoal.cloud.service.ledger import LEDGER
from shoal.errors import HostError, ProviderError, ShoalError
from shoal.hostlist import compress
from shoal.hosts.api import Host, Target
from shoal.local_files import state_directory
from shoal.plan.connections import Fleet
from shoal.plan.observe import Observation
from shoal.remote import python_command
from shoal.roles.elastic import LEADER_SINCE, SPEC, SUPERSEDED, UNIT, has_service, service_removal
from shoal.spec.finding import Finding
from shoal.spec.members import rented_sets
from shoal.verbs.context import Context
from shoal.verbs.rentals import control_service, read_ledger, run_to_completion

RECORD = "rents.json"
"""The host of shoal-elastic and how to reach it, kept beside the cluster's host keys."""
LEDGER_MOVE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Predecessor:
    """A host that runs shoal-elastic for this cluster, and is no longer the controller."""

    target: Target
    end_jobs: bool
    """Its rented machines may be released, with the jobs on them."""


def record_controller(context: Context, fleet: Fleet) -> None:
    """Record which host runs shoal-elastic, in case it leaves the file."""
    place = state_directory(context.cluster) / RECORD
    with contextlib.suppress(OSError):
        if not rented_sets(context.spec):
            return place.unlink(missing_ok=True)
        target = fleet.targets[context.controller.name]
        values = {**asdict(target), "identity": str(target.identity) if target.identity else None}
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.write_text(json.dumps(values), encoding="utf-8")
    return None


async def predecessor(
    context: Context, fleet: Fleet, observed: Observation, *, end_jobs: bool, leave: bool
) -> tuple[Predecessor | None, tuple[Finding, ...]]:
    """The other host that runs shoal-elastic, if any. Raises before any host is changed.

    It raises while that host has rented machines, whose jobs would end (`end_jobs` allows it), and where that host
    does not answer, as its service may still run (`leave` allows it).
    """
    target = _former_host(context, fleet, observed)
    if target is None:
        return None, ()
    try:
        async with _connection(context, fleet, target) as former_fleet:
            facts = await (await former_fleet.agent(target.name)).facts(
                FactsRequest(files={UNIT: "there", SPEC: "text"})
            )
            if not has_service(facts) or _cluster_of(facts) != context.cluster:
                return None, ()
            if not end_jobs:
                await _reject_rented(await former_fleet.host(target.name), context.controller.name)
    except HostError as error:
        what = f"cannot reach {target.name}, which rents machines for this cluster: its service may still run"
        if not leave:
            raise ShoalError(
                f"{what}; no host was changed: {error.message}",
                hint="start it and run `shoal up` again; or switch it off for good, and use --leave-rented",
            ) from error
        fix = f"switch it off, or run on it, as root: systemctl disable --now {Path(UNIT).stem}"
        return None, (Finding("warning", what, error.cause, fix, host=target.name),)
    return Predecessor(target, end_jobs), ()


async def move_service(context: Context, fleet: Fleet, former: Predecessor) -> None:
    """Stop the service there and carry its ledger to the new controller. A run that is killed is repeated."""
    name, new_host = former.target.name, await fleet.host(context.controller.name)
    with context.progress.phase(f"shoal-elastic moves from {name}", 1) as phase:
        async with _connection(context, fleet, former.target) as former_fleet:
            old_host = await former_fleet.host(name)
            if error := await control_service(old_host, "stop"):
                raise ShoalError(f"{name}: cannot stop shoal-elastic: {error}", hint="solve that first")
            try:
                if not former.end_jobs:
                    await _reject_rented(old_host, new_host.name)  # it may have rented until it was stopped
                await control_service(new_host, "stop")  # this host may have been the controller before
                ledger = await _run_move_program(old_host, "give")
                await _run_move_program(new_host, "take", ledger)
            except BaseException:
                await run_to_completion(control_service(old_host, "start"))
                raise
            await former_fleet.converge(name, service_removal(), {}, phase)


@asynccontextmanager
async def _connection(context: Context, fleet: Fleet, target: Target) -> AsyncIterator[Fleet]:
    """Connections to a host that may have left the file."""
    if fleet.targets.get(target.name) == target:
        yield fleet
        return
    async with Fleet({target.name: target}, context.connect()) as single_fleet:
        yield single_fleet


def _former_host(context: Context, fleet: Fleet, observed: Observation) -> Target | None:
    """Another host that has shoal-elastic, as far as members and the record show."""
    controller = context.controller.name
    names = [name for name, facts in observed.facts.items() if name != controller and has_service(facts)]
    if names:
        return fleet.targets[names[0]]
    recorded_target, current_target = _read_recorded_target(context.cluster), fleet.targets[controller]
    if recorded_target is None or (recorded_target.name in observed.facts and recorded_target.name != controller):
        return None  # it is a member, and has no service
    is_same_host = recorded_target.name == current_target.name or (
        recorded_target.address
        and (recorded_target.address, recorded_target.port) == (current_target.address, current_target.port)
    )
    return None if is_same_host and has_service(observed.facts[controller]) else recorded_target


def _read_recorded_target(cluster: str) -> Target | None:
    try:
        values = json.loads((state_directory(cluster) / RECORD).read_text(encoding="utf-8"))
        return Target(**{**values, "identity": Path(values["identity"]) if values["identity"] else None})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _cluster_of(facts: Facts) -> object:
    """The cluster that its service rents for: the host may belong to another one by now."""
    try:
        return json.loads(facts.text(SPEC) or "{}").get("cluster")
    except (ValueError, AttributeError):
        return None


async def _reject_rented(host: Host, controller: str) -> None:
    """Rented nodes know only their own controller, and their jobs are in its queue."""
    rentals = [rental for rental in await read_ledger(host) or () if rental.live]
    if rentals:
        nodes = compress(dict.fromkeys(rental.node for rental in rentals))
        raise ProviderError(
            f"moving the controller from {host.name} to {controller} would end the jobs on machines that {host.name} "
            f"rented: {', '.join(map(str, rentals))}; no host was changed",
            hint=f"run on {host.name}, as root: scontrol update nodename={nodes} state=power_down_asap; wait "
            "until their jobs have ended, then run `shoal up` again. Or use --allow-job-loss to release them at once",
        )


async def _run_move_program(host: Host, verb: str, ledger: bytes = b"") -> bytes:
    place = (str(LEDGER), LEADER_SINCE, *((SUPERSEDED,) if verb == "take" else ()))
    command = python_command("rental_ledger_move", verb, *place)
    result = await host.run(command, stdin=ledger, timeout=LEDGER_MOVE_TIMEOUT_S)
    if result.status != 0:
        output = result.error_text.strip().splitlines() or [f"status {result.status}"]
        raise ShoalError(
            f"{host.name}: cannot move the ledger {LEDGER}: {output[-1]}", hint="solve that, then try again"
        )
    return result.stdout
