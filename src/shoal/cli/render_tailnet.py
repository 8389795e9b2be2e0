"""The tailnet as `shoal status` shows it."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.cli.say import free
from shoal.hostlist import compress
from shoal.verbs.tailnet import TailnetMember, TailnetView

STYLE = {"direct": "green", "relayed": "yellow", "idle": "dim", "offline": "red", "unknown": "red"}
WORDS = {"idle": "idle (no packets lately)", "unknown": "not in the tailnet"}


def tailnet_lines(view: TailnetView) -> Iterator[str]:
    """The members by the way to them; then a line for each key that ends soon."""
    if view.problem or view.state != "Running":
        yield f"tailnet: [red]{free(view.problem or view.state)}[/]; `shoal up` lets the controller join again"
        return
    groups: dict[tuple[str, str], list[str]] = {}
    for member in view.members:
        groups.setdefault((member.way, _way(member)), []).append(member.name)
    yield "tailnet: " + "; ".join(f"{compress(names)} [{STYLE[way]}]{text}[/]" for (way, text), names in groups.items())
    for member in view.members:
        if member.days is not None:
            yield f"[yellow]the key of {member.name} ends in {member.days} days[/]: run `shoal keys rotate tailscale`"


def _way(member: TailnetMember) -> str:
    return f"relayed by {free(member.relay)}, slowly" if member.way == "relayed" else WORDS.get(member.way, member.way)
