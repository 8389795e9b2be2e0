"""The controller that this machine knows from the last `shoal up`, where the file names another.

Two rental services for one cluster would release each other's machines, and each would have its own budget. A former
controller that the file still names shows itself; for one that left the file, this machine keeps a record.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from shoal.agent.client import FactsRequest
from shoal.cloud.status_file import STATUS
from shoal.errors import HostError
from shoal.hosts.api import Target
from shoal.local_files import state_directory
from shoal.plan.connections import Fleet
from shoal.plan.observe import Observation
from shoal.plan.ownership import standing_cluster_finding
from shoal.plan.rebuild import controls, former_controller
from shoal.remote.rental_ledger import SERVICE
from shoal.roles.host_record import RECORD_FILES
from shoal.spec.finding import Finding
from shoal.spec.members import rented_sets
from shoal.verbs.context import Context

RECORD = "rents.json"
"""The host of shoal-elastic and how to reach it, kept beside the cluster's host keys."""


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


async def recorded_controller_findings(
    context: Context, fleet: Fleet, observed: Observation, *, leave: bool = False
) -> tuple[Finding, ...]:
    """An error where the recorded host has this cluster and left the file, or does not answer: its service may still
    run. With `leave` that is a warning."""
    target = _recorded_target(context.cluster)
    if target is None or target.name in observed.facts or _is_same_host(target, fleet.targets[context.controller.name]):
        return ()  # a member shows itself
    files = {**RECORD_FILES, str(STATUS): "text"}
    try:
        async with Fleet({target.name: target}, context.connect()) as single_fleet:
            facts = await (await single_fleet.agent(target.name)).facts(FactsRequest(files=files))
            if not controls(context.spec, facts):
                return ()
            standing = former_controller(context.spec, target.name)
            return (await standing_cluster_finding(context.spec, standing, facts, single_fleet),)
    except HostError as error:
        what = f"does not answer; it rents machines for {context.cluster}, and its service may still run"
        if leave:
            fix = f"switch it off, or run on it, as root: systemctl disable --now {SERVICE}"
            return (Finding("warning", what, error.cause, fix, host=target.name),)
        fix = "start it and run `shoal up` again; or switch it off for good, and use `shoal up --leave-rented`"
        return (Finding("error", what, error.cause, fix, host=target.name),)


def _recorded_target(cluster: str) -> Target | None:
    try:
        values = json.loads((state_directory(cluster) / RECORD).read_text(encoding="utf-8"))
        return Target(**{**values, "identity": Path(values["identity"]) if values["identity"] else None})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _is_same_host(one: Target, other: Target) -> bool:
    """Whether both are one host, which may have another name by now."""
    same_place = one.address and (one.address, one.port) == (other.address, other.port)
    return one.name == other.name or bool(same_place)
