"""`shoal check`: everything that stands in the way of a working cluster, found without changing anything."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal.errors import HostError, SlurmError, TimedOut, VersionWindow
from shoal.hostlist import compress
from shoal.plan.apply import ending
from shoal.plan.diff import make_plan, network_addresses
from shoal.plan.fleet import Fleet
from shoal.plan.nodes import unready
from shoal.plan.observe import Observed, observe
from shoal.plan.reachability import reached_addresses, unconnected
from shoal.providers.api import Instance
from shoal.roles.in_force import SLURM_CONF
from shoal.slurm.preemption import breaches, partition_findings
from shoal.slurm.read import is_ours
from shoal.slurm.state import CONFIG_COMMAND, PARTITIONS_COMMAND, parse_config, parse_partitions
from shoal.spec.finding import Finding
from shoal.verbs.accounting_health import accounting_findings
from shoal.verbs.context import Context, requests
from shoal.verbs.env import environment_states
from shoal.verbs.health import tracking_health
from shoal.verbs.shares import share_probes, share_ways, unservable
from shoal.verbs.status import ask, look_at_slurmctld
from shoal.verbs.up import survey

LEAST_FREE_MB = 1024


async def check(context: Context) -> list[Finding]:
    """All findings, worst first. Without an `error`, `shoal up` can do its work, and what it made already works."""
    findings = list(context.warnings)
    for name in context.provider_names():
        findings += context.providers(name).check(requests(context.members, name))
    stock = await survey(context)
    findings += stock.findings
    made = await context.instances()
    absent = [m.name for m in context.members if m.provider and m.name not in made]
    if absent:
        findings.append(Finding("info", f"not made yet: {compress(absent)}", fix="run `shoal up`"))
    present = [m for m in context.members if m.name not in absent]
    if present:
        async with await context.fleet(present) as fleet:
            findings += await _look(context, fleet, stock.orphans)
    return sorted(findings, key=lambda finding: ("error", "warning", "info").index(finding.level))


async def _look(context: Context, fleet: Fleet, orphans: Sequence[tuple[str, Instance]]) -> list[Finding]:
    controller = context.controller.name
    with context.progress.phase("connect and look", len(fleet.targets)) as phase:
        observed = await observe(fleet, context.spec, ending(phase))
    findings = [_unreached(name, error) for name, error in fleet.failures.items()] + _disks(observed)
    if controller not in observed.facts:
        return findings
    try:
        plan = await make_plan(context.spec, observed, fleet, reached_addresses(fleet), orphans)
    except VersionWindow as window:
        return [*findings, *(finding for finding in window.findings if isinstance(finding, Finding))]
    except SlurmError as error:
        return [*findings, Finding("error", error.message, fix=error.hint)]
    findings += [*plan.findings, *_slurmctld(controller, observed)]
    if context.spec.storage:
        findings += share_ways(context.spec, observed.facts)
        findings += await share_probes(context.spec, observed.facts, fleet)
        findings += await unservable(context.spec, observed.facts, fleet)
    findings += await accounting_findings(fleet, context.spec, observed.facts)
    if plan.changes:
        hosts = compress({change.host for change in plan.changes})
        findings.append(
            Finding("info", f"changes are due on {hosts}", fix="`shoal plan` shows them, `shoal up` makes them")
        )
    if observed.slurm.running or context.spec.network.kind == "lan":  # another network is there after `shoal up` only
        addresses = network_addresses(context.spec, observed, reached_addresses(fleet))
        findings += await unconnected(context.spec, addresses, fleet, observed.facts)
    if observed.slurm.running:
        findings += await _nodes(context, fleet, observed)
        findings += await _contract(context, fleet, plan.findings)
        findings += await _services(context, fleet)
    return findings


def _unreached(name: str, error: HostError) -> Finding:
    return Finding("error", error.cause, fix=error.hint, host=name)


def _disks(observed: Observed) -> list[Finding]:
    return [
        Finding("error", f"little space on {disk.mount}", f"{disk.free_mb} MB", "free at least 1 GB", host=name)
        for name, fact in observed.facts.items()
        for disk in fact.disks
        if disk.mount in ("/", "/var") and disk.free_mb < LEAST_FREE_MB
    ]


def _slurmctld(controller: str, observed: Observed) -> list[Finding]:
    """A controller with our configuration has a slurmctld that answers."""
    fact = observed.facts[controller]
    conf = fact.files.get(SLURM_CONF)
    if observed.slurm.running or not is_ours((conf and conf.text) or ""):
        return []
    state = fact.services.get("slurmctld", "unknown")
    what = "slurmctld does not answer" if state == "active" else f"slurmctld does not run ({state})"
    return [Finding("error", what, fix=look_at_slurmctld(controller), host=controller)]


async def _nodes(context: Context, fleet: Fleet, observed: Observed) -> list[Finding]:
    # A node that Slurm does not know yet is a change that is due, and nothing is wrong with it.
    names = [member.name for member in context.members if member.name in observed.slurm.nodes]
    try:
        missing = await unready(await fleet.host(context.controller.name), names)
    except SlurmError as error:
        return [Finding("error", error.message, fix=error.hint, host=context.controller.name)]
    except TimedOut as error:
        return [Finding("error", error.cause, fix=look_at_slurmctld(error.host), host=error.host)]
    return [
        Finding(
            "error", "Slurm cannot use the node", reason, "run `shoal up`; `shoal status` shows the state", host=name
        )
        for name, reason in missing.items()
    ]


async def _contract(context: Context, fleet: Fleet, told: Sequence[Finding]) -> list[Finding]:
    """What the running Slurm does to a job that must stop, against what the training library counts on."""
    host = await fleet.host(context.controller.name)
    try:
        config, partitions = await asyncio.gather(ask(host, CONFIG_COMMAND), ask(host, PARTITIONS_COMMAND))
    except SlurmError as error:
        return [Finding("error", error.message, fix=error.hint, host=host.name)]
    options = context.spec.slurm.options
    findings = [breach.finding(options, host.name) for breach in breaches(parse_config(config))]
    findings += partition_findings(parse_partitions(partitions))
    said = {_subject(finding) for finding in (*told, *context.warnings)}  # of the file, before it is in force
    return [finding for finding in findings if _subject(finding) not in said]


async def _services(context: Context, fleet: Fleet) -> list[Finding]:
    """What jobs count on beside Slurm: the tracking server, and the environments of the file."""
    controller = await fleet.host(context.controller.name)
    try:
        health = await tracking_health(controller, context.spec)
        environments = await environment_states(context, controller) if context.spec.environments else []
    except TimedOut as error:
        return [Finding("error", error.cause, fix=error.hint, host=error.host)]
    findings = []
    if health and health.uri and not health.well:
        mend = (
            "run `shoal up`" if not context.spec.tracking or not context.spec.tracking.url else "start it, or see why"
        )
        what = "the tracking server does not answer: jobs keep what they report in their own files"
        findings.append(Finding("error", what, f"{health.uri}: {health.said}", mend, path="tracking"))
    for one in environments:
        if one.state != "built":
            what = "not built yet" if one.made is None else "the file has changed since it was built"
            findings.append(
                Finding("info", what, fix=f"run `shoal env build {one.name}`", path=f"environments.{one.name}")
            )
    return findings


def _subject(finding: Finding) -> tuple[str, str]:
    """What it is about: the rule, and the partition where it is a rule for each."""
    section, _, rest = finding.path.partition(".")
    return finding.what, rest.partition(".")[0] if section == "partitions" else ""
