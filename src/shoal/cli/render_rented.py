"""Rented machines as `shoal status` shows them."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.cli.say import free
from shoal.hostlist import compress
from shoal.verbs.rented import RentedNode, RentedView

WORDS = {"intended": "being ordered", "made": "booting", "joined": "in use", "releasing": "being given back"}


def rented_lines(view: RentedView) -> Iterator[str]:
    """The machines, alike ones on a line, with what they cost; then what is wrong."""
    if view.nodes:
        yield f"rented: {len(view.nodes)} machines, [bold]${view.usd_hour:.2f} an hour[/]"
    elif not view.problem:
        yield "rented: nothing now"
    groups: dict[tuple[str, str], list[RentedNode]] = {}
    for node in view.nodes:
        where = f"{node.type} at {node.account} {node.place}" + (" (spot)" if node.market == "spot" else "")
        groups.setdefault((where, WORDS.get(node.state, node.state)), []).append(node)
    for (where, state), nodes in groups.items():
        known = nodes[0].usd_hour
        price = f", ${known:.2f} an hour each" if known is not None else ", price unknown"
        yield f"  {compress([node.name for node in nodes])}: {free(where)}, {state}{price}"
    if view.problem:
        yield f"rented: [red]{free(view.problem)}[/]"
    for account, problem in view.accounts.items():
        yield f"  [yellow]{account}[/]: {free(problem)}"
