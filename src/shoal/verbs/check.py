"""`shoal check`: find everything that prevents a working cluster, without changing anything."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Mapping, Sequence

from shoal.errors import CommandTimeout, ProviderError, SlurmError, VersionMismatch
from shoal.hostlist import compress
from shoal.network.addresses import strangers
from shoal.plan.cluster_findings import drained_findings, space_findings
from shoal.plan.connections import Fleet
from shoal.plan.diff import make_plan, network_addresses
from shoal.plan.nodes import AWAITED, unready_nodes
from shoal.plan.observe import Observation, observe
from shoal.plan.ownership import foreign_hosts, unusable_host_findings, without_other_clusters
from shoal.plan.reachability import connection_addresses, unreachable_findings
from shoal.roles.current_conf import SLURM_CONF
from shoal.slurm.parsed_conf import is_written_by_shoal
from shoal.slurm.preemption import contract_violations, partition_findings
from shoal.slurm.state import CONFIG_COMMAND, PARTITIONS_COMMAND, parse_config, parse_partitions
from shoal.spec.finding import Finding
from shoal.verbs.context import Context, requests
from shoal.verbs.env import environment_states
from shoal.verbs.health import accounting_findings, tracking_health
from shoal.verbs.provider_accounts import account_findings
from shoal.verbs.rebuild import rebuild_findings
from shoal.verbs.shares import share_probes, share_ways, unservable_share_findings
from shoal.verbs.slurmctld import slurm_output, slurmctld_fix
from shoal.verbs.up import Survey, creation_version_findings, survey

MAX_STRANGERS = 4
"""So many machines that are no members are named."""


async def check(context: Context) -> list[Finding]:
    """All findings, worst first. Without an `error`, `shoal up` can run, and what it made works."""
    findings = list(context.warnings)
    for name in context.provider_names():
        findings += context.provider(name).check(requests(context.members, name))
    account_problems = await account_findings(context.spec)
    findings += account_problems
    try:
        stock = await survey(context)
    except ProviderError:
        if any(finding.level == "error" for finding in account_problems):
            return _worst_first(findings)  # an account that rejects our key has no hosts to tell of
        raise
    findings += stock.findings
    instances = await context.instances()
    missing = [m.name for m in context.members if m.provider and m.name not in instances]
    if missing:
        findings.append(Finding("info", f"not made yet: {compress(missing)}", fix="run `shoal up`"))
    async with await context.fleet(m for m in context.members if m.name not in missing) as fleet:
        findings += await _check_hosts(context, fleet, stock)
    return _worst_first(findings)


def _worst_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: ("error", "warning", "info").index(finding.level))


async def _check_hosts(context: Context, fleet: Fleet, stock: Survey) -> list[Finding]:
    controller = context.controller.name
    with context.progress.phase("connect and read facts", len(fleet.targets)) as phase:
        observed = await observe(fleet, context.spec, phase)
    failures = fleet.failures.items()
    findings = [Finding("error", error.cause, fix=error.hint, host=name) for name, error in failures]
    findings += space_findings(observed.facts)
    mismatches = creation_version_findings(context, stock, observed.facts) if stock.missing else []
    findings += mismatches
    if kept := await rebuild_findings(context, stock, fleet, observed):
        return [*findings, *kept]
    if controller not in observed.facts:
        return findings
    others = await foreign_hosts(context.spec, observed, fleet)
    findings += [host.finding() for host in others]
    if any(host.name == controller for host in others):
        return findings  # the rest would be about another cluster
    observed = without_other_clusters(observed, others)
    if unusable := await unusable_host_findings(context.spec, observed, fleet):
        return [*findings, *unusable]
    if mismatches:
        return findings
    try:
        plan = await make_plan(context.spec, observed, fleet, connection_addresses(fleet), stock.orphans)
    except VersionMismatch as mismatch:
        return [*findings, *(finding for finding in mismatch.findings if isinstance(finding, Finding))]
    except SlurmError as error:
        return [*findings, Finding("error", error.message, fix=error.hint)]
    findings += [*plan.findings, *_slurmctld(controller, observed)]
    if context.spec.storage:
        findings += share_ways(context.spec, observed.facts)
        findings += await share_probes(context.spec, observed.facts, fleet)
        findings += await unservable_share_findings(context.spec, observed.facts, fleet)
    findings += await accounting_findings(fleet, context.spec, observed.facts)
    if plan.changes:
        hosts = compress({change.host for change in plan.changes})
        findings.append(
            Finding("info", f"changes are due on {hosts}", fix="`shoal plan` shows them, `shoal up` makes them")
        )
    if observed.slurm.running or context.spec.network.kind == "lan":  # other networks exist only after `shoal up`
        addresses = network_addresses(context.spec, observed, connection_addresses(fleet))
        findings += await unreachable_findings(context.spec, addresses, fleet, observed.facts)
        findings += _strangers(context, observed, addresses)
    if observed.slurm.running:
        findings += await _nodes(context, fleet, observed)
        findings += drained_findings(observed.slurm.nodes.values())
        findings += await _contract(context, fleet, plan.findings)
        findings += await _services(context, fleet)
    return findings


def _strangers(context: Context, observed: Observation, addresses: Mapping[str, str]) -> list[Finding]:
    """In a LAN the firewall admits members by their addresses, which a neighbour can take over."""
    beside = strangers(observed.facts, addresses) if context.spec.network.kind == "lan" else {}
    if not beside:
        return []
    others = sorted({other for neighbours in beside.values() for other in neighbours}, key=ipaddress.ip_address)
    shown = ", ".join(others[:MAX_STRANGERS]) + (", ..." if len(others) > MAX_STRANGERS else "")
    what = (
        "other machines are on the members' network segment: one that takes over a member's address reaches NFS, Slurm "
        "and MLflow in its place"
    )
    fix = "set `network: wireguard`, which also works on one LAN; or give the members a segment of their own"
    return [Finding("warning", what, f"{shown} beside {compress(beside)}", fix, path="network")]


def _slurmctld(controller: str, observed: Observation) -> list[Finding]:
    """A controller with our configuration must have a slurmctld that answers."""
    fact = observed.facts[controller]
    if observed.slurm.running or not is_written_by_shoal(fact.text(SLURM_CONF)):
        return []
    state = fact.services.get("slurmctld", "unknown")
    what = "slurmctld does not answer" if state == "active" else f"slurmctld does not run ({state})"
    return [Finding("error", what, fix=slurmctld_fix(controller), host=controller)]


async def _nodes(context: Context, fleet: Fleet, observed: Observation) -> list[Finding]:
    # A node that Slurm does not know yet is a pending change, not an error.
    names = [member.name for member in context.members if member.name in observed.slurm.nodes]
    try:
        missing = await unready_nodes(await fleet.host(context.controller.name), names)
    except SlurmError as error:
        return [Finding("error", error.message, fix=error.hint, host=context.controller.name)]
    except CommandTimeout as error:
        return [Finding("error", error.cause, fix=slurmctld_fix(error.host), host=error.host)]
    return [_unready(name, reason) for name, reason in missing.items()]


def _unready(node: str, reason: str) -> Finding:
    if reason == AWAITED:
        what = "has just been resumed, and Slurm waits for its answer"
        return Finding("warning", what, reason, f"if it stays so, run `shoal doctor --node {node}`", host=node)
    what, fix = "Slurm cannot use the node", "run `shoal up`; `shoal status` shows the state"
    return Finding("error", what, reason, fix, host=node)


async def _contract(context: Context, fleet: Fleet, plan_findings: Sequence[Finding]) -> list[Finding]:
    """Check how the running Slurm stops jobs against what the training library expects."""
    host = await fleet.host(context.controller.name)
    try:
        config, partitions = await asyncio.gather(
            slurm_output(host, CONFIG_COMMAND), slurm_output(host, PARTITIONS_COMMAND)
        )
    except SlurmError as error:
        return [Finding("error", error.message, fix=error.hint, host=host.name)]
    options = context.spec.slurm.options
    findings = [violation.finding(options, host.name) for violation in contract_violations(parse_config(config))]
    findings += partition_findings(parse_partitions(partitions))
    file_subjects = {_subject(finding) for finding in (*plan_findings, *context.warnings)}  # before it is applied
    return [finding for finding in findings if _subject(finding) not in file_subjects]


async def _services(context: Context, fleet: Fleet) -> list[Finding]:
    """Check the tracking server and the environments of the file."""
    controller = await fleet.host(context.controller.name)
    try:
        health = await tracking_health(controller, context.spec)
        environments = await environment_states(context, controller) if context.spec.environments else []
    except CommandTimeout as error:
        return [Finding("error", error.cause, fix=error.hint, host=error.host)]
    findings = []
    if health and health.uri and not health.well:
        is_own_server = not context.spec.tracking or not context.spec.tracking.url
        fix = "run `shoal up`" if is_own_server else "start it, or correct `tracking.url`"
        what = "the tracking server does not answer: jobs keep their metrics in files until it does"
        findings.append(Finding("error", what, f"{health.uri}: {health.said}", fix, path="tracking"))
    for environment in environments:
        if environment.state != "built":
            name = environment.name
            what = "not built yet" if environment.made is None else "the file has changed since it was built"
            findings.append(Finding("info", what, fix=f"run `shoal env build {name}`", path=f"environments.{name}"))
    return findings


def _subject(finding: Finding) -> tuple[str, str]:
    """The rule that a finding is about, with the partition for rules on partitions."""
    section, _, rest = finding.path.partition(".")
    return finding.what, rest.partition(".")[0] if section == "partitions" else ""
