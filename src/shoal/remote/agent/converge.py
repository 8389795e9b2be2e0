"""Going through a document: compare each item, change what differs, then do what is still due."""

from __future__ import annotations

import time
from _collections_abc import Callable, Iterator

from shoal.remote.agent.context import (
    OPERATOR_LEFT,
    ConvergeContext,
    Item,
    ItemChange,
    clear_due,
    has_systemd,
    record_due,
)
from shoal.remote.agent.file_io import sha256
from shoal.remote.agent.files import FILE_KINDS, decode_content, is_secret, record_written
from shoal.remote.agent.mounts import check_mount, make_mount
from shoal.remote.agent.packages import check_packages, make_packages
from shoal.remote.agent.running import Failure, explain, last_lines, run
from shoal.remote.agent.services import (
    check_service,
    due_reason,
    is_active,
    make_service,
    reload_units,
    restore_files_on_failure,
    start_again,
)
from shoal.remote.agent.unix_accounts import ACCOUNT_KINDS


def check_command(item: Item, context: ConvergeContext) -> ItemChange | None:
    reason = context.due.get(item["key"], "")
    if item["on_change"] and not reason:
        return None
    # In a dry run the guard would look at what is about to change.
    foreseen = context.dry and item["key"] in context.noted
    if not foreseen and guard_passes(item):
        return None
    return ItemChange(f"run {item['name']}" + (f" ({reason})" if reason else ""))


def make_command(item: Item, context: ConvergeContext) -> str:
    context.report(item["name"])  # some take minutes
    data = command_input(item)
    for attempt in range(item["retries"] + 1):
        if attempt:
            context.report(f"{item['name']} failed; trying again ({attempt} of {item['retries']})")
            time.sleep(2.0)
            if guard_passes(item):  # the service that the guard asks may just have started
                break
        status, text = run(item["argv"], stdin=data, timeout=item["timeout"])
        context.known_units = {}  # some start services
        if status == 0:
            break
    else:
        why = f"took longer than {item['timeout']:g} s" if status == 124 else f"ended with status {status}"
        text, _, fix = text.strip().partition("\nfix: ")  # a program of ours knows it
        raise Failure(f"{item['name']} {why}\n{last_lines(text)}".strip(), fix)
    clear_due(context, item["key"])
    return ""


def command_input(item: Item) -> bytes:
    """What a command reads. An archive that is not the expected one is rejected."""
    if not is_secret(item):
        return str(item["stdin"]).encode()
    data = decode_content(item)
    if data is None:
        raise Failure(f"what {item['name']} reads was not given")
    if sha256(data) != item["sha256"]:
        raise Failure(f"what {item['name']} reads has arrived with another digest than {item['sha256']}")
    return data


def guard_passes(item: Item) -> bool:
    """Whether the command's guard reports that there is nothing to do."""
    return bool(item["unless"]) and run(item["unless"], timeout=30.0)[0] == 0


KINDS = {
    **ACCOUNT_KINDS,
    **FILE_KINDS,
    "packages": (check_packages, make_packages),
    "service": (check_service, make_service),
    "mount": (check_mount, make_mount),
    "command": (check_command, make_command),
}
"""The functions that compare and change each kind of item."""


def converge(context: ConvergeContext) -> None:
    """Go through the items in order, then through what is still due. After a failed item the rest is skipped."""
    counts = {"change": 0, "changed": 0, "failed": 0}
    if not context.dry:
        record_written(context)
    stop = ""

    def report(index: int, item: Item, result: Item) -> None:
        status = result["status"]
        if status in counts:
            counts[status] += 1
        event = {"event": "item", "index": index, "key": item["key"], "action": "", "diff": ""}
        context.connection.send({**event, **result})

    for index, item in enumerate(context.items):
        if not stop and not context.dry and not context.connection.is_open():
            stop = OPERATOR_LEFT
        if stop:
            report(index, item, {"status": "skipped", "detail": stop})
            continue
        result = converge_item(item, context)
        report(index, item, result)
        if result["status"] == "failed" and not context.dry:
            stop = f"after the failure of {item['key']}"
    if not stop:
        for item, step in leftovers(context):
            report(-1, item, step(item, context))
        if context.changed_units and has_systemd():
            reload_units(context)
    changed = counts["change"] + counts["changed"]
    context.connection.send({"event": "done", "changed": changed, "failed": counts["failed"]})


def converge_item(item: Item, context: ConvergeContext) -> Item:
    context.key = item["key"]
    return as_result(lambda: _converge_item(item, context), item)


def _converge_item(item: Item, context: ConvergeContext) -> Item:
    if item["kind"] not in KINDS:
        raise Failure(f"this agent knows no items of kind {item['kind']}")
    check, make = KINDS[item["kind"]]
    change = check(item, context)
    if change is None:
        if item["kind"] == "command":
            clear_due(context, item["key"])
        return {"status": "ok"}
    reason = f"{item['key']} changes"
    keys = ["service " + name for name in item.get("restarts", ())] + list(item.get("reloads", ()))
    record_due(context, {key: reason for key in keys})
    report = {"action": change.action, "diff": change.diff, "edited": change.edited}
    if not context.dry:
        return {"status": "changed", "detail": make(item, context), **report}
    if item["kind"] in ("service", "command"):
        clear_due(context, item["key"])
    return {"status": "change", **report}


def as_result(step: Callable[[], Item], item: Item) -> Item:
    """A step's result. Any exception in it becomes a failed item with what was found."""
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


def leftovers(context: ConvergeContext) -> Iterator[tuple[Item, Callable[[Item, ConvergeContext], Item]]]:
    """What is due and was not reached in the document's order: an item to report, and the step that does it.

    What an earlier run left due and this document does not name stays due: it belongs to another document.
    """
    items_by_key = {item["key"]: item for item in context.items}
    for key in list(context.due):
        kind, _, name = key.partition(" ")
        if kind == "command" and key in items_by_key:
            yield items_by_key[key], converge_item
        elif kind == "start" or (
            kind == "service" and not context.defer and (key in items_by_key or key in context.noted)
        ):
            if is_active(name, context) or kind == "start":
                yield items_by_key.get("service " + name) or {"key": "service " + name, "name": name}, restart
            else:
                clear_due(context, key)


def restart(item: Item, context: ConvergeContext) -> Item:
    """Restart a service, regardless of the rest of the document."""
    context.key, name = item["key"], item["name"]
    report = {"action": f"restart {name} ({due_reason(name, context)})"}
    if context.dry:
        return {"status": "change", **report}

    def step() -> Item:
        return {"status": "changed", "detail": restore_files_on_failure(start_again, item, context), **report}

    return as_result(step, item)
