"""Kernel settings and rules for device files."""

from __future__ import annotations

import os

from shoal.agent.program.disk import read_text, remove, write_atomic
from shoal.agent.program.failure import Failure
from shoal.agent.program.files import difference
from shoal.agent.program.running import must, which
from shoal.agent.program.wire import Item
from shoal.agent.program.world import Change, World, note_due, settle


def check_sysctl(item: Item, world: World) -> Change | None:
    path, text = sysctl_record(item)
    now = read_text(sysctl_file(item)).split()
    if now == item["value"].split() and read_text(path) == text:
        return None
    return Change(f"set {item['name']} to {item['value']} (was {' '.join(now) or 'not there'})")


def make_sysctl(item: Item, world: World) -> str:
    path, text = sysctl_record(item)
    try:
        if read_text(sysctl_file(item)).split() != item["value"].split():
            with open(sysctl_file(item), "w") as file:
                file.write(item["value"] + "\n")
    except OSError as error:
        raise Failure(f"the kernel does not take {item['name']} = {item['value']}: {error.strerror}") from None
    write_atomic(path, text.encode(), 0o644, 0, 0)
    return ""


def sysctl_record(item: Item) -> tuple[str, str]:
    name = item["name"].replace("/", ".")
    return f"/etc/sysctl.d/90-shoal-{name}.conf", f"{item['name']} = {item['value']}\n"


def sysctl_file(item: Item) -> str:
    name: str = item["name"]
    return "/proc/sys/" + (name if "/" in name else name.replace(".", "/"))


def check_device_rule(item: Item, world: World) -> Change | None:
    path = rule_file(item)
    before = read_text(path)
    if before == item["content"] and "udev" not in world.due:
        return None
    action = ("update" if item["content"] else "remove") if before else "create"
    return Change(f"{action} {path}", difference(path, before.encode(), item["content"].encode(), world))


def make_device_rule(item: Item, world: World) -> str:
    note_due(world, {"udev": item["key"]})
    if item["content"]:
        write_atomic(rule_file(item), item["content"].encode(), 0o644, 0, 0)
    else:
        remove(rule_file(item))
    running = which("udevadm") and os.path.exists("/run/udev/control")
    if running:
        must(["udevadm", "control", "--reload"], "could not reload the device rules")
        must(["udevadm", "trigger"], "could not apply the device rules")
    settle(world, "udev")
    return "" if running else "udev does not run here; the rule waits for a boot that has it"


def rule_file(item: Item) -> str:
    return f"/etc/udev/rules.d/{item['name']}.rules"
