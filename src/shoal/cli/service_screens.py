"""The cluster's services in `shoal status`: clocks, networks, tracking, shares, accounting, rented machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from shoal.cli.screen import escape_text, print_wrapped
from shoal.hostlist import compress

if TYPE_CHECKING:
    from shoal.verbs.health import AccountingHealth, TailnetMember, TailnetView, WireGuardView
    from shoal.verbs.rentals import RentedNode, RentedView
    from shoal.verbs.shares import ShareState
    from shoal.verbs.status import ClusterStatus

RENTAL_STATES = {"intended": "being ordered", "made": "booting", "joined": "in use", "releasing": "being released"}
PATH_STYLES = {"direct": "green", "relayed": "yellow", "idle": "dim", "offline": "red", "unknown": "red"}
PATH_TEXTS = {"idle": "idle (no packets lately)", "unknown": "not in the tailnet"}
SHOWN_CLOCK_OFFSET_S = 0.5
"""A clock is named from this difference on."""


def _share(share: ShareState) -> str:
    about = f"share {share.where} on {share.server} ({share.kind})"
    if share.trouble:
        return f"{about}: [red]{escape(share.trouble)}[/]"
    style = "yellow" if share.free_mb < share.total_mb / 20 else "green"
    quotas = "".join(
        f"; {escape_text(name)} has {_size(used)} of {_size(allowed)}" for name, (used, allowed) in share.quotas.items()
    )
    return f"{about}: [{style}]{_size(share.free_mb)} free[/] of {_size(share.total_mb)}{quotas}"


def _size(megabytes: int) -> str:
    return f"{megabytes / 1024:.1f}G"


def show_services(console: Console, status: ClusterStatus) -> None:
    """A line for each service that the cluster has."""
    clocks, lines = status.clocks, []
    if clocks and clocks.ahead:
        off = {name: ahead for name, ahead in clocks.ahead.items() if abs(ahead) > SHOWN_CLOCK_OFFSET_S}
        listed = ", ".join(f"[yellow]{name} {ahead:+.1f} s[/]" for name, ahead in sorted(off.items()))
        near = [abs(ahead) for name, ahead in clocks.ahead.items() if name not in off]
        within = f"within {max(near):.2f} s of {status.controller}'s" if near else ""
        containers = (
            f"; {compress(clocks.containers)}: containers, on their machine's clock" if clocks.containers else ""
        )
        lines.append(f"clocks: {', '.join(filter(None, (within, listed)))}{containers}")
    if status.wireguard:
        lines.append(wireguard_line(status.wireguard))
    if status.tailnet:
        lines += tailnet_lines(status.tailnet)
    if status.tracking:
        state = "[green]responds[/]" if status.tracking.well else f"[red]{escape_text(status.tracking.said)}[/]"
        lines.append(f"{status.tracking.kind}: {' '.join(filter(None, (escape(status.tracking.uri), state)))}")
    lines += [_share(share) for share in status.shares]
    if status.accounting:
        lines.append(accounting_line(status.accounting))
    if status.rented:
        lines += rented_lines(status.rented)
    if lines:
        console.print()
    for line in lines:
        print_wrapped(console, line)


def wireguard_line(view: WireGuardView) -> str:
    """`wireguard: heard from 3 members recently`, or who was not heard from."""
    if view.problem:
        return f"wireguard: [red]{escape_text(view.problem)}[/]"
    heard = len(view.heard) - len(view.quiet)
    if not view.quiet:
        return f"wireguard: [green]heard from {heard} member{'s' if heard != 1 else ''} recently[/]"
    quiet = ", ".join(f"{name} ({_ago(view.heard[name])})" for name in view.quiet)
    rest = f"; {heard} other{'s were' if heard != 1 else ' was'} heard from recently" if heard else ""
    return f"wireguard: [yellow]not heard from {quiet}[/]{rest}"


def _ago(seconds: int | None) -> str:
    return "never" if seconds is None else f"{seconds // 60} min"


def accounting_line(accounting: AccountingHealth) -> str:
    """`accounting: on c1; newest backup 2026-11-15 03:12`, and what is wrong with it."""
    backup = accounting.newest_backup
    if accounting.backup_is_missing:
        backup = f"[yellow]{backup}[/]"
    if accounting.well:
        return f"accounting: [green]works[/], on {accounting.host}; {backup}"
    if accounting.error:
        return f"accounting: [red]{escape_text(accounting.error)}[/], on {accounting.host}"
    wrong = escape_text(accounting.down)
    return f"accounting: [red]{wrong}[/], on {accounting.host}; {backup}"


def rented_lines(view: RentedView) -> Iterator[str]:
    """The rented machines, equal ones on one line, with their price; then problems."""
    if view.nodes:
        yield f"rented: {len(view.nodes)} machines, [bold]${view.usd_hour:.2f} an hour[/]"
    elif not view.problem:
        yield "rented: none"
    groups: dict[tuple[str, str], list[RentedNode]] = {}
    for node in view.nodes:
        where = f"{node.type} at {node.account} {node.place}" + (" (spot)" if node.market == "spot" else "")
        groups.setdefault((where, RENTAL_STATES.get(node.state, node.state)), []).append(node)
    for (where, state), nodes in groups.items():
        usd_hour = nodes[0].usd_hour
        price = f", ${usd_hour:.2f} an hour each" if usd_hour is not None else ", price unknown"
        yield f"  {compress([node.name for node in nodes])}: {escape_text(where)}, {state}{price}"
    if view.problem:
        yield f"rented: [red]{escape_text(view.problem)}[/]"
    for account, problem in view.accounts.items():
        yield f"  [yellow]{account}[/]: {escape_text(problem)}"


def tailnet_lines(view: TailnetView) -> Iterator[str]:
    """The members by the path to them; then a line for each key that expires soon."""
    if view.problem or view.state != "Running":
        yield f"tailnet: [red]{escape_text(view.problem or view.state)}[/]; `shoal up` joins the controller again"
        return
    groups: dict[tuple[str, str], list[str]] = {}
    for member in view.members:
        groups.setdefault((member.way, _way(member)), []).append(member.name)
    paths = (f"{compress(names)} [{PATH_STYLES[way]}]{text}[/]" for (way, text), names in groups.items())
    yield "tailnet: " + "; ".join(paths)
    for member in view.members:
        if member.days is not None:
            fix = "run `shoal keys rotate tailscale`"
            yield f"[yellow]the key of {member.name} expires in {member.days} days[/]: {fix}"


def _way(member: TailnetMember) -> str:
    if member.way == "relayed":
        return f"relayed by {escape_text(member.relay)}, slowly"
    return PATH_TEXTS.get(member.way, member.way)
