"""Guarded commands: run when their guard says so, or when something they belong to has changed."""

from __future__ import annotations

import time

from shoal.agent.program.failure import Failure
from shoal.agent.program.running import last_lines, run
from shoal.agent.program.wire import Item
from shoal.agent.program.world import Change, World, settle


def check_command(item: Item, world: World) -> Change | None:
    reason = world.due.get(item["key"], "")
    if item["on_change"] and not reason:
        return None
    # In a dry run the guard would look at what is about to change.
    foreseen = world.dry and item["key"] in world.noted
    if not foreseen and is_so(item):
        return None
    return Change(f"run {item['name']}" + (f" ({reason})" if reason else ""))


def make_command(item: Item, world: World) -> str:
    world.tell(item["name"])  # some take minutes, and whoever watches would take what came before for stuck
    for attempt in range(item["retries"] + 1):
        if attempt:
            world.tell(f"{item['name']} failed; trying again ({attempt} of {item['retries']})")
            time.sleep(2.0)
            if is_so(item):  # the guard could not tell before: the service that it asks has just started
                break
        status, text = run(item["argv"], stdin=item["stdin"].encode(), timeout=item["timeout"])
        if status == 0:
            break
    else:
        why = f"took longer than {item['timeout']:g} s" if status == 124 else f"ended with status {status}"
        raise Failure(f"{item['name']} {why}\n{last_lines(text)}".strip())
    settle(world, item["key"])
    return ""


def is_so(item: Item) -> bool:
    """Whether the command's guard says that there is nothing to do."""
    return bool(item["unless"]) and run(item["unless"], timeout=30.0)[0] == 0
