"""The screens of plan, up, down and status, with a line for each service. Colours only where the console has them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from shoal.cli.screen import (
    Columns,
    count,
    escape_text,
    format_time_limit,
    group_by,
    print_wrapped,
    show_failures,
    show_findings,
)
from shoal.cloud.rental import format_known_cost, micros
from shoal.health.diagnosis import hint, job_hint
from shoal.hostlist import compress
from shoal.plan.model import Change, Cost, Plan
from shoal.slurm.state import NodeState
from shoal.spec.finding import Finding

if TYPE_CHECKING:
    from shoal.verbs.down import DownResult, RentedCost
    from shoal.verbs.health import AccountingHealth, TailnetMember, TailnetView, WireGuardView
    from shoal.verbs.rentals import RentedNode, RentedView
    from shoal.verbs.shares import ShareState
    from shoal.verbs.status import ClusterStatus
    from shoal.verbs.up import UpResult

COST_STYLE = {Cost.NOTHING: "green", Cost.RESTART: "yellow", Cost.DRAIN: "magenta", Cost.JOBS: "red bold"}
_GPUS = re.compile(r"gpu:(?:([^:,(]+):)?(\d+)")
STATE_STYLE = {"IDLE": "green", "ALLOCATED": "cyan", "MIXED": "cyan", "DOWN": "red", "UNKNOWN": "red", "ERROR": "red"}
RENTAL_STATES = {"intended": "being ordered", "made": "booting", "joined": "in use", "releasing": "being released"}
PATH_STYLES = {"direct": "green", "relayed": "yellow", "idle": "dim", "offline": "red", "unknown": "red"}
PATH_TEXTS = {"idle": "idle (no packets lately)", "unknown": "not in the tailnet"}
ONLY_ERRORS = "nothing to apply; fix the errors above"
"""Instead of "no changes", which reads as if everything were well."""
SHOWN_CLOCK_OFFSET_S = 0.5
"""A clock is named from this difference on."""


def show_plan(console: Console, plan: Plan, diff: bool) -> None:
    """The changes; hosts with equal changes share a line."""
    show_findings(console, plan.findings)
    show_failures(console, plan.unreached)
    if plan.empty:
        scope_text = f" on the hosts that answered; {_unreached_text(plan)}" if plan.unreached else ""
        console.print(f"{plan.cluster}: {_no_changes_text(plan.findings)}{scope_text}")
        return
    table = Columns("hosts", "change", "costs", wraps=("hosts", "change"))
    for (text, cost), changes in group_by(plan.changes, lambda change: (_change_text(change), change.cost)).items():
        hosts = compress(change.host for change in changes)
        table.add_row(hosts, escape_text(text), Text(cost.label, style=COST_STYLE[cost]))
    console.print(table)
    if diff:
        for change in plan.changes:
            if change.diff:
                console.print(f"\n[bold]{change.host}[/] {escape_text(change.what)}")
                console.print(_color_diff(change.diff))
    hosts_to_change = {change.host for change in plan.changes}
    number = f"{count(len(plan.changes), 'change')} on {count(len(hosts_to_change), 'host')}"
    unreached_note = f"; {_unreached_text(plan)}" if plan.unreached else ""
    console.print(f"\n{number}; costs at most: {plan.cost.label}{unreached_note}")
    if plan.lost_jobs:
        console.print(f"[red]These jobs would end:[/] {', '.join(plan.lost_jobs)}")
    if plan.create:
        console.print("The changes that new hosts need, on them and on others, are planned once they answer.")


def _unreached_text(plan: Plan) -> str:
    return f"{compress(plan.unreached)} {'was' if len(plan.unreached) == 1 else 'were'} not inspected"


def _no_changes_text(findings: Iterable[Finding]) -> str:
    return ONLY_ERRORS if any(finding.level == "error" for finding in findings) else "no changes"


def show_up(console: Console, result: UpResult) -> None:
    # A finding that the host's failure repeats is shown once. The others may be the next failure.
    causes = {name: error.cause for name, error in result.failures.items()}
    show_findings(
        console,
        (
            finding
            for finding in result.findings
            if not (finding.found and finding.found in causes.get(finding.host, ""))
        ),
    )
    for name, reason in result.unready:
        console.print(f"[red]✗[/] {name}: Slurm cannot use it yet: {escape_text(reason)}")
    for name in result.staying:
        console.print(f"[magenta]…[/] {name}: drained, still has jobs; run `{result.again}` again when they have ended")
    show_failures(console, result.failures)
    changed_names = [name for name in result.changed if name not in result.created]
    groups = (("created", result.created), ("changed", changed_names), ("removed", result.removed))
    summary = ", ".join(f"{verb} {compress(names)}" for verb, names in groups if names)
    summary = summary or _no_changes_text(result.findings)
    if not result.whole:
        console.print(f"[yellow]![/] {result.cluster}: {summary}; not complete")
        console.print(f"  fix the problems above, then run `{result.again}` again")
        return
    mark = "[yellow]![/]" if summary == ONLY_ERRORS else "[green]✓[/]"
    console.print(f"{mark} {result.cluster}: {summary}")
    if (result.created or result.changed) and not result.removed:
        console.print("  `shoal status` shows it, `shoal run train.py` trains on it")


def show_down(console: Console, result: DownResult) -> None:
    show_findings(console, result.findings)
    show_failures(console, result.failures)
    if result.given_back:
        console.print(f"released {', '.join(result.given_back)}: no provider lists a machine of the cluster any more")
    if result.cost is not None:
        console.print(_format_final_cost(result.cost))
    if result.deleted:
        console.print(f"removed {compress(result.deleted)}")
    if result.released:
        console.print(
            f"released {compress(result.released)}: Slurm is stopped, Shoal's files are removed, packages stay"
        )
    if not (result.deleted or result.released or result.given_back or result.failures):
        console.print(f"{result.cluster}: nothing to remove")


def _format_final_cost(cost: RentedCost) -> str:
    """`what was rented cost $1.37: hosts $1.02, nodes $0.35`."""
    known = micros(cost.hosts) + micros(cost.nodes)
    parts = {"hosts": micros(cost.hosts), "nodes": micros(cost.nodes)}
    divided = ", ".join(f"{name} {format_known_cost(part, 0)}" for name, part in parts.items() if part)
    unpriced = f"{compress(cost.unpriced)}: price unknown" if cost.unpriced else ""
    if cost.unpriced and not known:
        return f"what was rented: {unpriced}"
    total = format_known_cost(known, len(cost.unpriced))
    return f"what was rented cost {total}" + (f": {divided}" if divided else "") + (f"; {unpriced}" if unpriced else "")


def show_status(console: Console, status: ClusterStatus) -> None:
    """Nodes by state, partitions, services, queue. Figures beside a group of nodes are those of each node."""
    counts = Counter(_format_state(node) for node in status.nodes)
    summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    console.print(
        f"[bold]{status.cluster}[/]: Slurm {status.version} on {status.controller}; nodes: {summary or 'none'}\n"
    )
    node_titles = ("nodes", "state", "cpus each", "memory each", "gpus each", "slurm", "reason")
    table = Columns(*node_titles, wraps=("nodes", "state", "reason"))
    for row, nodes in group_by(status.nodes, _node_cells).items():
        state = nodes[0].state
        base_state = next((state_name for state_name in STATE_STYLE if state_name in state), "")
        style = "magenta" if "DRAIN" in state else STATE_STYLE.get(base_state, "")
        table.add_row(compress([node.name for node in nodes]), Text(row[0], style=style), *row[1:])
    console.print(table)
    for text, nodes in group_by(status.nodes, hint).items():
        if text:
            names = compress(node.name for node in nodes)
            print_wrapped(console, f"[yellow]{names}[/]: {text}; see `shoal doctor --node {names}`")
    if status.absent:
        console.print(f"[red]{compress(status.absent)}[/]: in the file and not in Slurm; `shoal up` adds it")
    if status.extra:
        console.print(f"[yellow]{compress(status.extra)}[/]: in Slurm and not in the file; `shoal up` removes it")
    console.print()
    partitions = Columns("partition", "state", "nodes", "time limit", wraps=("nodes",))
    for partition in status.partitions:
        name = f"{partition.name}*" if partition.default else partition.name
        partitions.add_row(name, partition.state.lower(), partition.nodes or "none", partition.max_time.lower())
    console.print(partitions)
    show_services(console, status)
    console.print()
    if not status.jobs:
        console.print("no jobs")
        return
    job_titles = ("job", "name", "user", "state", "time", "limit", "nodes", "where or why")
    jobs = Columns(*job_titles, wraps=("job", "name", "user", "where or why"))
    for job in status.jobs:
        wait_reason = status.rented.waiting.get(job.id, "") if status.rented else ""
        location = job.nodes or wait_reason or f"({job.reason})"
        if job.state == "PENDING" and (text := job_hint(job.reason)):
            location = f"{text}: `shoal doctor --job {job.id}`"
        jobs.add_row(
            job.id,
            escape_text(job.name),
            job.user,
            job.state.lower(),
            job.time_used,
            format_time_limit(job.time_limit),
            str(job.node_count),
            escape_text(location),
        )
    console.print(jobs)


def _change_text(change: Change) -> str:
    """`create /etc/slurm/slurm.conf` says what it is about; `drain, then remove` does not."""
    return change.action if change.what.split()[-1] in change.action.split() else f"{change.what}: {change.action}"


def _node_cells(node: NodeState) -> tuple[str, ...]:
    """The cells of a row, beside the names of the nodes that share it."""
    return (
        _format_state(node),
        f"{node.cpus_alloc}/{node.cpus}",
        f"{node.memory_mb / 1024:.1f}G",
        _format_gpus(node.gres, node.gres_used) or "-",
        node.version or "-",
        escape_text(node.reason),
    )


def _format_gpus(gres: str, used: str) -> str:
    """`gpu:h100:8(S:0-1)` of which `gpu:h100:2(IDX:0-1)` are in use, as `2/8 h100`."""
    used_counts: dict[str, str] = dict(_GPUS.findall(used))
    counts = _GPUS.findall(gres)
    texts = [f"{used_counts.get(kind, '0')}/{count} {kind}".rstrip() for kind, count in counts]
    return ", ".join(texts) or escape_text(gres)


def _format_state(node: NodeState) -> str:
    return "+".join(node.state).lower()


def _color_diff(diff: str) -> Text:
    text = Text()
    for line in diff.splitlines():
        style = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
        text.append(line + "\n", style=style)
    return text


def show_services(console: Console, status: ClusterStatus) -> None:
    """A line for each service that the cluster has."""
    clocks, lines = status.clocks, []
    if clocks and clocks.ahead:
        far_clocks = {name: offset for name, offset in clocks.ahead.items() if abs(offset) > SHOWN_CLOCK_OFFSET_S}
        far_text = ", ".join(f"[yellow]{name} {offset:+.1f} s[/]" for name, offset in sorted(far_clocks.items()))
        near_offsets = [abs(offset) for name, offset in clocks.ahead.items() if name not in far_clocks]
        near_text = f"within {max(near_offsets):.2f} s of {status.controller}'s" if near_offsets else ""
        containers = (
            f"; {compress(clocks.containers)}: containers, on their machine's clock" if clocks.containers else ""
        )
        lines.append(f"clocks: {', '.join(filter(None, (near_text, far_text)))}{containers}")
    if status.wireguard:
        lines.append(wireguard_line(status.wireguard))
    if status.tailnet:
        lines += tailnet_lines(status.tailnet)
    if status.tracking:
        state = "[green]responds[/]" if status.tracking.well else f"[red]{escape_text(status.tracking.said)}[/]"
        lines.append(f"{status.tracking.kind}: {' '.join(filter(None, (escape(status.tracking.uri), state)))}")
    lines += [_format_share(share) for share in status.shares]
    if status.accounting:
        lines.append(accounting_line(status.accounting))
    if status.rented:
        lines += rented_lines(status.rented)
    if lines:
        console.print()
    for line in lines:
        print_wrapped(console, line)


def _format_share(share: ShareState) -> str:
    title = f"share {share.where} on {share.server} ({share.kind})"
    if share.trouble:
        return f"{title}: [red]{escape(share.trouble)}[/]"
    style = "yellow" if share.free_mb < share.total_mb / 20 else "green"
    quotas = "".join(
        f"; {escape_text(name)} has {_format_size(used_mb)} of {_format_size(limit_mb)}"
        for name, (used_mb, limit_mb) in share.quotas.items()
    )
    return f"{title}: [{style}]{_format_size(share.free_mb)} free[/] of {_format_size(share.total_mb)}{quotas}"


def _format_size(megabytes: int) -> str:
    return f"{megabytes / 1024:.1f}G"


def wireguard_line(view: WireGuardView) -> str:
    """`wireguard: heard from 3 members recently`, or who was not heard from."""
    if view.problem:
        return f"wireguard: [red]{escape_text(view.problem)}[/]"
    recent_count = len(view.heard) - len(view.quiet)
    if not view.quiet:
        return f"wireguard: [green]heard from {recent_count} member{'s' if recent_count != 1 else ''} recently[/]"
    ages = {name: "never" if seconds is None else f"{seconds // 60} min" for name, seconds in view.heard.items()}
    quiet_text = ", ".join(f"{name} ({ages[name]})" for name in view.quiet)
    others_text = (
        f"; {recent_count} other{'s were' if recent_count != 1 else ' was'} heard from recently" if recent_count else ""
    )
    return f"wireguard: [yellow]not heard from {quiet_text}[/]{others_text}"


def accounting_line(accounting: AccountingHealth) -> str:
    """`accounting: on c1; newest backup 2026-11-15 03:12`, and what is wrong with it."""
    backup = accounting.newest_backup
    if accounting.backup_is_missing:
        backup = f"[yellow]{backup}[/]"
    if accounting.well:
        return f"accounting: [green]works[/], on {accounting.host}; {backup}"
    if accounting.error:
        return f"accounting: [red]{escape_text(accounting.error)}[/], on {accounting.host}"
    problem = escape_text(accounting.down)
    return f"accounting: [red]{problem}[/], on {accounting.host}; {backup}"


def rented_lines(view: RentedView) -> Iterator[str]:
    """The rented machines, equal ones on one line, with their price; then problems."""
    machines = (*view.hosts, *view.nodes)
    if machines:
        price = format_known_cost(micros(view.usd_hour), sum(machine.usd_hour is None for machine in machines))
        yield f"rented: {count(len(machines), 'machine')}, [bold]{price} an hour[/]"
    elif not view.problem:
        yield "rented: none"

    def where_and_state(node: RentedNode) -> tuple[str, str]:
        spot = " (spot)" if node.market == "spot" else ""
        return f"{node.type} at {node.account} {node.place}{spot}", RENTAL_STATES.get(node.state, node.state)

    for (location, state), nodes in group_by(machines, where_and_state).items():
        usd_hour = nodes[0].usd_hour
        each = f", ${usd_hour:.2f} an hour each" if usd_hour is not None else ", price unknown"
        yield f"  {compress([node.name for node in nodes])}: {escape_text(location)}, {state}{each}"
        for node in nodes:
            if node.problem:
                yield f"    [yellow]{node.name} has not joined yet[/]: {escape_text(node.problem)}"
    if view.problem:
        yield f"rented: [red]{escape_text(view.problem)}[/]"
    for account, problem in view.accounts.items():
        yield f"  [yellow]{account}[/]: {escape_text(problem)}"


def tailnet_lines(view: TailnetView) -> Iterator[str]:
    """The members by the path to them; then a line for each key that expires soon."""
    if view.problem or view.state != "Running":
        yield f"tailnet: [red]{escape_text(view.problem or view.state)}[/]; `shoal up` joins the controller again"
        return
    groups = group_by(view.members, lambda member: (member.way, _describe_path(member)))
    paths = (
        f"{compress(member.name for member in members)} [{PATH_STYLES[path_kind]}]{text}[/]"
        for (path_kind, text), members in groups.items()
    )
    yield "tailnet: " + "; ".join(paths)
    for member in view.members:
        if member.days is not None:
            fix = "run `shoal keys rotate tailscale`"
            yield f"[yellow]the key of {member.name} expires in {member.days} days[/]: {fix}"


def _describe_path(member: TailnetMember) -> str:
    if member.way == "relayed":
        return f"relayed by {escape_text(member.relay)}, slowly"
    return PATH_TEXTS.get(member.way, member.way)
