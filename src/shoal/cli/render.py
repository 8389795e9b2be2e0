"""What a person sees: plans, status, findings and summaries. Colours only where the console has them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from shoal.cli.columns import Columns
from shoal.cli.render_services import show_services
from shoal.cli.say import free, show_failures, show_findings, time_limit
from shoal.hostlist import compress
from shoal.plan.model import Change, Cost, Plan
from shoal.slurm.state import NodeState
from shoal.verbs.down import DownResult
from shoal.verbs.remote import ExecResult
from shoal.verbs.status import Status
from shoal.verbs.up import UpResult

COST_STYLE = {Cost.NOTHING: "green", Cost.RESTART: "yellow", Cost.DRAIN: "magenta", Cost.JOBS: "red bold"}
_GPUS = re.compile(r"gpu:(?:([^:,(]+):)?(\d+)")
STATE_STYLE = {"IDLE": "green", "ALLOCATED": "cyan", "MIXED": "cyan", "DOWN": "red", "UNKNOWN": "red", "ERROR": "red"}


def show_plan(console: Console, plan: Plan, diff: bool) -> None:
    """Changes grouped: hosts to which the very same happens share a line."""
    show_findings(console, plan.findings)
    show_failures(console, plan.unreached)
    if plan.empty:
        where = f" on the hosts that answered; {_not_looked_at(plan)}" if plan.unreached else ""
        console.print(f"{plan.cluster}: no changes{where}", highlight=False)
        return
    table = Columns("hosts", "change", "costs", wraps=("hosts", "change"))
    for (told, cost), hosts in _grouped(plan.changes).items():
        table.add_row(compress(hosts), free(told), Text(cost.words, style=COST_STYLE[cost]))
    console.print(table)
    if diff:
        for change in plan.changes:
            if change.diff:
                console.print(f"\n[bold]{change.host}[/] {free(change.what)}")
                console.print(_coloured(change.diff))
    touched = {change.host for change in plan.changes}
    changes, hosts_touched = _count(len(plan.changes), "change"), _count(len(touched), "host")
    rest = f"; {_not_looked_at(plan)}" if plan.unreached else ""
    console.print(f"\n{changes} on {hosts_touched}; costs at most: {plan.cost.words}{rest}", highlight=False)
    if plan.loses:
        console.print(f"[red]These jobs would end:[/] {', '.join(plan.loses)}", highlight=False)
    if plan.create:
        console.print("What the new hosts need, and what they change on the others, is worked out once they answer.")


def _not_looked_at(plan: Plan) -> str:
    return f"{compress(plan.unreached)} {'was' if len(plan.unreached) == 1 else 'were'} not looked at"


def show_up(console: Console, result: UpResult) -> None:
    # What the plan foresaw of a host, and that then happened, is said once. What else was foreseen may be next.
    happened = {name: error.cause for name, error in result.failures.items()}
    show_findings(
        console, (one for one in result.findings if not (one.found and one.found in happened.get(one.host, "")))
    )
    for name, reason in result.unready:
        console.print(f"[red]✗[/] {name}: Slurm cannot use it yet: {free(reason)}")
    for name in result.staying:
        console.print(f"[magenta]…[/] {name}: drained, still has jobs; run `{result.again}` again when they have ended")
    show_failures(console, {name: error for name, error in result.failures.items()})
    changed = [name for name in result.changed if name not in result.created]
    told = (("created", result.created), ("changed", changed), ("removed", result.removed))
    done = ", ".join(f"{word} {compress(names)}" for word, names in told if names) or "no changes"
    if not result.whole:
        console.print(f"[yellow]![/] {result.cluster}: {done}; not complete")
        console.print(f"  solve what is named above, then run `{result.again}` again", highlight=False)
        return
    console.print(f"[green]✓[/] {result.cluster}: {done}")
    if (result.created or result.changed) and not result.removed:
        console.print("  `shoal status` shows it, `shoal run train.py` trains on it", highlight=False)


def show_down(console: Console, result: DownResult) -> None:
    show_findings(console, result.findings)
    show_failures(console, {name: error for name, error in result.failures.items()})
    if result.given_back:
        console.print(f"given back: {', '.join(result.given_back)}; no provider lists any more machines of the cluster")
    if result.deleted:
        console.print(f"removed {compress(result.deleted)}")
    if result.released:
        console.print(f"released {compress(result.released)}: Slurm stopped, our files gone, packages left in place")
    if not (result.deleted or result.released or result.given_back or result.failures):
        console.print(f"{result.cluster}: nothing to take down")


def show_status(console: Console, status: Status) -> None:
    """Nodes by state, partitions, queue. What stands beside a group of nodes is what each of them has."""
    counts = Counter(_headline(node) for node in status.nodes)
    summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    console.print(
        f"[bold]{status.cluster}[/]: Slurm {status.version} on {status.controller}; nodes: {summary or 'none'}\n",
        highlight=False,
    )
    of_nodes = ("nodes", "state", "cpus each", "memory each", "gpus each", "slurm", "reason")
    table = Columns(*of_nodes, wraps=("nodes", "state", "reason"))
    for row, nodes in _alike(status.nodes).items():
        state = nodes[0].state
        base = next((word for word in STATE_STYLE if word in state), "")
        style = "magenta" if "DRAIN" in state else STATE_STYLE.get(base, "")
        table.add_row(compress([node.name for node in nodes]), Text(row[0], style=style), *row[1:])
    console.print(table)
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
    of_jobs = ("job", "name", "user", "state", "time", "limit", "nodes", "where or why")
    jobs = Columns(*of_jobs, wraps=("job", "name", "user", "where or why"))
    for job in status.jobs:
        why = status.rented.waiting.get(job.id, "") if status.rented else ""
        where = job.nodes or why or f"({job.reason})"
        jobs.add_row(
            job.id,
            free(job.name),
            job.user,
            job.state.lower(),
            job.time_used,
            time_limit(job.time_limit),
            str(job.node_count),
            free(where),
        )
    console.print(jobs)


def show_exec(console: Console, result: ExecResult) -> None:
    """Hosts with equal output share one heading, as clush -b does."""
    for names, outcome in result.groups:
        status = f" (exit {outcome.status})" if outcome.status else ""
        console.print(f"[bold]{compress(names)}[/] ({len(names)}){status}", highlight=False, soft_wrap=True)
        _as_it_came(console, outcome.text)
        _as_it_came(console, outcome.error_text, style="red")
    if result.hint:
        console.print(f"  fix: {free(result.hint)}", highlight=False, soft_wrap=True)
    show_failures(console, {name: error for name, error in result.failures.items()})


def _as_it_came(console: Console, text: str, style: str = "") -> None:
    """What a program printed: no line is broken, and no tab is made of blanks."""
    if not text:
        return
    if style and console.is_terminal:
        console.out(text.rstrip("\n"), style=style, highlight=False)
    else:
        console.file.write(text if text.endswith("\n") else f"{text}\n")


def _grouped(changes: Iterable[Change]) -> dict[tuple[str, Cost], list[str]]:
    groups: dict[tuple[str, Cost], list[str]] = {}
    for change in changes:
        groups.setdefault((_told(change), change.cost), []).append(change.host)
    return groups


def _told(change: Change) -> str:
    """`create /etc/slurm/slurm.conf` says what it is about; `drain, then remove` does not."""
    return change.action if change.what.split()[-1] in change.action.split() else f"{change.what}: {change.action}"


def _alike(nodes: Iterable[NodeState]) -> dict[tuple[str, ...], list[NodeState]]:
    """What is said of a node, and the nodes of which the very same is said."""
    groups: dict[tuple[str, ...], list[NodeState]] = {}
    for node in nodes:
        row = (
            _headline(node),
            f"{node.cpus_alloc}/{node.cpus}",
            f"{node.memory_mb / 1024:.1f}G",
            _gpus(node.gres, node.gres_used) or "-",
            node.version or "-",
            free(node.reason),
        )
        groups.setdefault(row, []).append(node)
    return groups


def _gpus(gres: str, used: str) -> str:
    """`gpu:h100:8(S:0-1)` of which `gpu:h100:2(IDX:0-1)` are in use, as `2/8 h100`."""
    busy: dict[str, str] = dict(_GPUS.findall(used))
    found = _GPUS.findall(gres)
    return ", ".join(f"{busy.get(kind, '0')}/{count} {kind}".rstrip() for kind, count in found) or free(gres)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _headline(node: NodeState) -> str:
    return "+".join(node.state).lower()


def _coloured(diff: str) -> Text:
    text = Text()
    for line in diff.splitlines():
        style = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
        text.append(line + "\n", style=style)
    return text
