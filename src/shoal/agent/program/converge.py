"""Going through a document: compare each item, change what differs, then do what is still due."""

from __future__ import annotations

from shoal.agent.program.accounts import check_group, check_user, make_group, make_user
from shoal.agent.program.commands import check_command, make_command
from shoal.agent.program.failure import Failure, explain
from shoal.agent.program.files import (
    check_block,
    check_directory,
    check_file,
    check_link,
    make_block,
    make_directory,
    make_file,
    make_link,
)
from shoal.agent.program.kernel import check_device_rule, check_sysctl, make_device_rule, make_sysctl
from shoal.agent.program.mounts import check_mount, make_mount
from shoal.agent.program.packages import check_packages, make_packages
from shoal.agent.program.running import run
from shoal.agent.program.secrets import check_secret, make_secret
from shoal.agent.program.services import check_service, due_reason, is_up, make_service, or_old_files, start_again
from shoal.agent.program.systemd import has_systemd
from shoal.agent.program.wire import GONE, Item
from shoal.agent.program.world import World, note_due, settle

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Callable, Iterator

KINDS = {
    "packages": (check_packages, make_packages),
    "file": (check_file, make_file),
    "secret": (check_secret, make_secret),
    "link": (check_link, make_link),
    "directory": (check_directory, make_directory),
    "group": (check_group, make_group),
    "user": (check_user, make_user),
    "service": (check_service, make_service),
    "block": (check_block, make_block),
    "mount": (check_mount, make_mount),
    "sysctl": (check_sysctl, make_sysctl),
    "device_rule": (check_device_rule, make_device_rule),
    "command": (check_command, make_command),
}


def converge(world: World) -> None:
    """Go through the items in order, then through what is still due. After a failed item the rest is skipped."""
    counts = {"change": 0, "changed": 0, "failed": 0}
    stop = ""

    def report(index: int, item: Item, result: Item) -> None:
        status = result["status"]
        if status in counts:
            counts[status] += 1
        world.wire.send({"event": "item", "index": index, "key": item["key"], "action": "", "diff": "", **result})

    for index, item in enumerate(world.items):
        if not stop and not world.dry and not world.wire.still_there():
            stop = GONE
        if stop:
            report(index, item, {"status": "skipped", "detail": stop})
            continue
        result = one_item(item, world)
        report(index, item, result)
        if result["status"] == "failed" and not world.dry:
            stop = f"after the failure of {item['key']}"
    if not stop:
        for item, step in leftovers(world):
            report(-1, item, step(item, world))
        if world.reload_units and has_systemd():
            run(["systemctl", "daemon-reload"])
    changed = counts["change"] + counts["changed"]
    world.wire.send({"event": "done", "changed": changed, "failed": counts["failed"]})


def one_item(item: Item, world: World) -> Item:
    world.key = item["key"]
    return guarded(lambda: _one_item(item, world), item)


def _one_item(item: Item, world: World) -> Item:
    if item["kind"] not in KINDS:
        raise Failure(f"this agent knows no items of kind {item['kind']}")
    check, make = KINDS[item["kind"]]
    change = check(item, world)
    if change is None:
        if item["kind"] == "command":
            settle(world, item["key"])
        return {"status": "ok"}
    reason = f"{item['key']} changes"
    keys = ["service " + name for name in item.get("restarts", ())] + list(item.get("reloads", ()))
    note_due(world, {key: reason for key in keys})
    done = {"action": change.action, "diff": change.diff}
    if not world.dry:
        return {"status": "changed", "detail": make(item, world), **done}
    if item["kind"] in ("service", "command"):
        settle(world, item["key"])
    return {"status": "change", **done}


def guarded(step: Callable[[], Item], item: Item) -> Item:
    """A step's result; whatever goes wrong in it becomes a failed item that says what was found."""
    try:
        return step()
    except Failure as failure:
        return {"status": "failed", "detail": str(failure), "fix": failure.fix or item.get("fix", "")}
    except OSError as error:
        return {"status": "failed", "detail": explain(error, item.get("path", "/"), item["key"])}
    except Exception as error:
        # The message is left out: it could quote a secret.
        return {"status": "failed", "detail": f"the agent met {type(error).__name__} at {_place_of(error)}"}


def _place_of(error: Exception) -> str:
    """File and line of the program where something went wrong."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "an unknown place"


def leftovers(world: World) -> Iterator[tuple[Item, Callable[[Item, World], Item]]]:
    """What is due and was not reached in the document's order: an item to report, and the step that does it.

    What an earlier run left due and this document does not name stays due: it belongs to another document.
    """
    named = {item["key"]: item for item in world.items}
    for key in list(world.due):
        kind, _, name = key.partition(" ")
        if kind == "command" and key in named:
            yield named[key], one_item
        elif kind == "start" or (kind == "service" and not world.defer and (key in named or key in world.noted)):
            if is_up(name, world) or kind == "start":
                yield named.get("service " + name) or {"key": "service " + name, "name": name}, restart
            else:
                settle(world, key)


def restart(item: Item, world: World) -> Item:
    """Restart a service, whatever the document says about it otherwise."""
    world.key, name = item["key"], item["name"]
    done = {"action": f"restart {name} ({due_reason(name, world)})"}
    if world.dry:
        return {"status": "change", **done}

    def step() -> Item:
        return {"status": "changed", "detail": or_old_files(start_again, item, world), **done}

    return guarded(step, item)
