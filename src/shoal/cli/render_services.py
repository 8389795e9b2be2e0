"""How the cluster's services look in `shoal status`: a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from shoal.cli.render_rented import rented_lines
from shoal.cli.render_tailnet import tailnet_lines
from shoal.cli.say import say
from shoal.hostlist import compress
from shoal.spec.words import printable
from shoal.verbs.accounting_health import AccountingHealth
from shoal.verbs.status import Status

if TYPE_CHECKING:
    from shoal.verbs.shares import ShareState
    from shoal.verbs.wireguard import WireGuardView

NOTABLE = 0.5
"""Seconds by which a clock must be off to be named."""


def _share(share: ShareState) -> str:
    about = f"share {share.where} on {share.server} ({share.kind})"
    if share.trouble:
        return f"{about}: [red]{escape(share.trouble)}[/]"
    style = "yellow" if share.free_mb < share.total_mb / 20 else "green"
    quotas = "".join(
        f"; {escape(printable(name))} has {_size(used)} of {_size(allowed)}"
        for name, (used, allowed) in share.quotas.items()
    )
    return f"{about}: [{style}]{_size(share.free_mb)} free[/] of {_size(share.total_mb)}{quotas}"


def _size(megabytes: int) -> str:
    return f"{megabytes / 1024:.1f}G"


def show_services(console: Console, status: Status) -> None:
    """The clocks, and of what else the cluster has, how it does."""
    clocks, lines = status.clocks, []
    if clocks and clocks.ahead:
        off = {name: ahead for name, ahead in clocks.ahead.items() if abs(ahead) > NOTABLE}
        told = ", ".join(f"[yellow]{name} {ahead:+.1f} s[/]" for name, ahead in sorted(off.items()))
        near = [abs(ahead) for name, ahead in clocks.ahead.items() if name not in off]
        within = f"within {max(near):.2f} s of {status.controller}'s" if near else ""
        containers = (
            f"; {compress(clocks.containers)}: containers, on their machine's clock" if clocks.containers else ""
        )
        lines.append(f"clocks: {', '.join(filter(None, (within, told)))}{containers}")
    if status.wireguard:
        lines.append(wireguard_line(status.wireguard))
    if status.tailnet:
        lines += tailnet_lines(status.tailnet)
    if status.tracking:
        state = "[green]answers[/]" if status.tracking.well else f"[red]{escape(printable(status.tracking.said))}[/]"
        lines.append(f"{status.tracking.kind}: {' '.join(filter(None, (escape(status.tracking.uri), state)))}")
    lines += [_share(share) for share in status.shares]
    if status.accounting:
        lines.append(accounting_line(status.accounting))
    if status.rented:
        lines += rented_lines(status.rented)
    if lines:
        console.print()
    for line in lines:
        say(console, line)


def wireguard_line(view: WireGuardView) -> str:
    """`wireguard: heard from 3 members recently`, or who was not heard from."""
    if view.problem:
        return f"wireguard: [red]{escape(printable(view.problem))}[/]"
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
        return f"accounting: [red]{escape(printable(accounting.error))}[/], on {accounting.host}"
    wrong = escape(printable(accounting.down))
    return f"accounting: [red]{wrong}[/], on {accounting.host}; {backup}"
