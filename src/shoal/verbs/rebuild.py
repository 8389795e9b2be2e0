"""What a cluster keeps from `shoal up` to `shoal down`: its controller, and where its Slurm comes from.

Jobs and rented machines know only their controller, and two rental services would release each other's machines. Jobs
end with the Slurm that they began with. A file that changes one of these is rejected before anything is made, with the
commands that build the cluster again. docs/rebuild.md brings its records along.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.agent.client import FactsRequest
from shoal.agent.facts import Facts
from shoal.hostlist import compress
from shoal.hosts.api import Target
from shoal.local_files import state_directory
from shoal.plan.connections import Fleet
from shoal.plan.observe import Observation
from shoal.plan.ownership import running_jobs_text
from shoal.remote.rental_ledger import SERVICE
from shoal.roles.current_conf import read_current_conf
from shoal.roles.documents import fact_files, fact_services
from shoal.roles.elastic import has_service
from shoal.roles.host_record import HOST_RECORD, foreign_records, host_id, is_controller, read_host_record
from shoal.roles.orphaned_rentals import reported_rentals
from shoal.roles.registry import cluster_services
from shoal.roles.slurm_source import installed_slurm
from shoal.roles.slurm_tree import uses_tree
from shoal.spec.finding import Finding
from shoal.spec.members import all_members, members, rented_sets
from shoal.spec.model import Spec
from shoal.verbs.context import Context

if TYPE_CHECKING:
    from shoal.verbs.up import Survey

RECORD = "rents.json"
"""The host of shoal-elastic, how to reach it and its id, kept beside the cluster's host keys."""


def record_controller(context: Context, fleet: Fleet, facts: Facts) -> None:
    """Record which host runs shoal-elastic, in case it leaves the file."""
    place = state_directory(context.cluster) / RECORD
    with contextlib.suppress(OSError):
        if not rented_sets(context.spec):
            return place.unlink(missing_ok=True)
        target = fleet.targets[context.controller.name]
        values = {**asdict(target), "identity": str(target.identity) if target.identity else None}
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.write_text(json.dumps({"target": values, "id": host_id(facts)}), encoding="utf-8")
    return None


async def rebuild_findings(
    context: Context, stock: Survey, fleet: Fleet, observed: Observation, *, leave: bool = False
) -> tuple[Finding, ...]:
    """Errors where the file changes what the cluster keeps.

    A former controller may be a member, an instance that the file no longer names, or recorded on this machine. A
    recorded one that does not answer is an error, too; with `leave` a warning.
    """
    spec, controller, facts = context.spec, context.controller.name, observed.facts
    if controller not in facts and controller not in stock.new:
        return ()  # it may have the cluster itself
    for name, fact in facts.items():
        if name != controller and controls(spec, fact):
            return (_former_controller(spec, name, fact, facts, await running_jobs_text(await fleet.host(name))),)
    ids = {host_id(fact) for fact in facts.values()}
    recorded = _recorded_target(context.cluster, ids)
    targets = {recorded.name: recorded} if recorded else {}
    targets |= {instance.name: instance.target for _, instance in stock.orphans if instance.state == "running"}
    request = FactsRequest(files=fact_files(spec), services=fact_services())
    async with Fleet(targets, context.connect()) as left:

        async def read(name: str) -> Facts:
            return await (await left.agent(name)).facts(request)

        for name, fact in (await left.each(targets, read)).items():
            if host_id(fact) not in ids and controls(spec, fact):
                return (_former_controller(spec, name, fact, facts, await running_jobs_text(await left.host(name))),)
        if recorded and recorded.name in left.failures:
            return (_unreachable(context.cluster, recorded.name, left.failures[recorded.name].cause, leave),)
    sources = [name for name, fact in facts.items() if has_other_slurm(spec, fact)]
    if controller in sources:
        return (_slurm(spec, facts, await running_jobs_text(await fleet.host(controller))),)
    return tuple(_left_slurm(spec, name) for name in sources if name not in foreign_records(spec, facts))


def controls(spec: Spec, facts: Facts) -> bool:
    """Whether a host is the controller of a cluster of the spec's name.

    Of its hostname, its host key, from which the cluster's id was made, and its slurmctld, two must say so: hosts may
    have equal hostnames or keys, both may change, and slurmctld may be stopped.
    """
    record = read_host_record(facts)
    if record is None or record.cluster != spec.cluster:
        return False
    signs = (is_controller(facts), record.id == host_id(facts), facts.is_active("slurmctld"))
    return has_service(facts) or sum(signs) >= 2


def has_other_slurm(spec: Spec, facts: Facts) -> bool:
    """Whether a host of the cluster has its Slurm from elsewhere than the spec says. Without systemd nothing tells."""
    record, installed = read_host_record(facts), installed_slurm(facts)
    if record is None or record.cluster != spec.cluster or facts.init != "systemd":
        return False
    return not installed.ours and any(map(facts.is_active, installed.daemons)) if uses_tree(spec) else installed.ours


def _former_controller(spec: Spec, host: str, former: Facts, facts: Mapping[str, Facts], jobs: str) -> Finding:
    controller = members(spec)[0].name
    other = (
        f"if {host} has another cluster of this name, take it out of this file\n" if facts.get(host) is former else ""
    )
    if controller in facts and controls(spec, facts[controller]):
        what = f"is the controller of a cluster {spec.cluster} too, beside {controller}"
        services = f"{SERVICE} slurmctld" if has_service(former) else "slurmctld"
        stop = f"systemctl disable --now {services} && rm {HOST_RECORD}"
        fix = f"{other}if it was the controller before {controller}, run there, as root: `{stop}`; then `shoal up`"
        return Finding("error", what, _remains(jobs, {host: former}), fix, host=host)
    new = controller if controller != host else f"another host called {host}"
    what = f"is the controller of cluster {spec.cluster}, the file says {new}"
    fix = other + _commands(spec, f"{host} as `controller`", host, former, ends_queue=True)
    return Finding("error", what, _remains(jobs, {**facts, host: former}), fix, host=host)


def _slurm(spec: Spec, facts: Mapping[str, Facts], jobs: str) -> Finding:
    controller = members(spec)[0]
    old, what = _sources(spec)
    ends_queue = controller.provider is not None  # `shoal down` deletes it
    fix = _commands(spec, f"`slurm: {{from: {old}}}`", controller.name, facts[controller.name], ends_queue=ends_queue)
    return Finding("error", what, _remains(jobs, facts), fix, host=controller.name, path="slurm.from")


def _left_slurm(spec: Spec, host: str) -> Finding:
    fix = f"run `shoal node remove {host}`, write {host} into the file again, and run `shoal up`"
    return Finding("error", _sources(spec)[1], "the controller has not", fix, host=host, path="slurm.from")


def _sources(spec: Spec) -> tuple[str, str]:
    """Where the Slurm comes from that the spec does not name, and a sentence about it."""
    old, new = ("packages", "shoal") if uses_tree(spec) else ("shoal", "packages")
    return old, f"has Slurm from {old}, the file says `slurm: {{from: {new}}}`"


def _unreachable(cluster: str, host: str, cause: str, leave: bool) -> Finding:
    what = f"cannot be asked whether it still rents machines for {cluster}"
    if leave:
        fix = f"switch it off, or run on it, as root: systemctl disable --now {SERVICE}"
        return Finding("warning", what, cause, fix, host=host)
    fix = "start it and run `shoal up` again; or switch it off for good, and use `shoal up --leave-rented`"
    return Finding("error", what, cause, fix, host=host)


def _remains(jobs: str, facts: Mapping[str, Facts]) -> str:
    """What hosts have: jobs, rented machines, records and files."""
    rentals = [str(rental) for fact in facts.values() for rental in reported_rentals(fact)]
    services = {name: ", ".join(cluster_services(fact)) for name, fact in facts.items()}
    rented = [f"rented: {', '.join(rentals)}"] if rentals else []
    return "; ".join((jobs, *rented, *(f"{name} has {has}" for name, has in services.items() if has)))


def _commands(spec: Spec, line: str, host: str, controller: Facts, *, ends_queue: bool) -> str:
    """The fix: the line that the file had, or the commands that end the cluster and build the spec's."""
    nodes = list(read_current_conf(controller).nodes)
    computing = {member.name for member in all_members(spec) if "compute" in member.roles}
    loses = ends_queue or any(member.provider for member in members(spec))
    lines = (
        f"write {line} again: a cluster keeps that until `shoal down`",
        f"to build the cluster anew, run with {line}:",
        f"  shoal node drain {compress(nodes)}",
        "  shoal jobs   # wait until none runs",
        f"  shoal exec -w {host} -- scancel --state=PENDING   # waiting jobs do not come along" if ends_queue else "",
        "  # save what must come along: records of jobs, costs, files of shares (docs/rebuild.md)" if loses else "",
        "  shoal down",
        "then, with the new file:",
        "  shoal up",
        f"  shoal node resume {compress(name for name in nodes if name in computing)}",
    )
    return "\n".join(filter(None, lines))


def _recorded_target(cluster: str, known: Collection[str]) -> Target | None:
    """The recorded host, unless its id is known: then it is a member, which shows itself."""
    try:
        record = json.loads((state_directory(cluster) / RECORD).read_text(encoding="utf-8"))
        values = record["target"]
        target = Target(**{**values, "identity": Path(values["identity"]) if values["identity"] else None})
        return None if record["id"] in known else target
    except (OSError, ValueError, TypeError, KeyError):
        return None
