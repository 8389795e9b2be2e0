"""Services: enabled and running as asked, restarted when what they read has changed."""

from __future__ import annotations

import time

from shoal.agent.program.complaints import advice, log_size, taken_port, telling_line, text_from
from shoal.agent.program.failure import Failure
from shoal.agent.program.files import put_back
from shoal.agent.program.ports import listens
from shoal.agent.program.running import has_settled, last_lines, must, run
from shoal.agent.program.supervise import SERVICE_LOGS
from shoal.agent.program.supervised import check_supervised, make_supervised, supervised
from shoal.agent.program.systemd import has_systemd, show_units
from shoal.agent.program.wire import Item
from shoal.agent.program.world import Change, World, settle

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Callable


def check_service(item: Item, world: World) -> Change | None:
    if not has_systemd():
        return check_supervised(item, world)
    name, unit = item["name"], world.unit(item["name"])
    if unit.get("LoadState") == "not-found":
        if not item["running"] and not item["enabled"]:
            return None
        if not world.dry and not world.reload_units:
            raise Failure(f"there is no service {name} on this host; install the package that brings it")
        return Change(f"enable and start {name}")
    if unit.get("UnitFileState") == "masked" and (item["enabled"] or item["running"]):
        raise Failure(f"{name} is masked on this host; run `systemctl unmask {name}` and try again")
    steps = service_steps(item, world)
    reason = f" ({due_reason(name, world)})" if "restart" in steps else ""
    return Change(f"{' and '.join(steps)} {name}{reason}") if steps else None


def service_steps(item: Item, world: World) -> list[str]:
    """The systemctl verbs that bring the service to what the item says."""
    unit = world.unit(item["name"])
    state, active = unit.get("UnitFileState", ""), unit.get("ActiveState", "")
    steps = []
    if item["enabled"] and state in ("disabled", "linked", ""):
        steps.append("enable")
    elif not item["enabled"] and state.startswith("enabled"):
        steps.append("disable")
    if item["running"] and active not in ("active", "reloading"):
        steps.append("start")
    elif not item["running"] and active in ("active", "reloading", "activating"):
        steps.append("stop")
    elif item["running"] and due_reason(item["name"], world) and not world.defer:
        steps.append("restart")
    return steps


def due_reason(name: str, world: World) -> str:
    return world.due.get("service " + name) or world.due.get("start " + name) or ""


def make_service(item: Item, world: World) -> str:
    return or_old_files(bring_up, item, world)


def or_old_files(step: Callable[[Item, World], str], item: Item, world: World) -> str:
    """A step that starts a service. One that ran, and does not with the files of this run, gets its old ones back."""
    name = item["name"]
    ran, logged = is_up(name, world), log_size(service_log(name))
    try:
        return step(item, world)
    except Failure as failure:
        new = [entry for entry in world.replaced if name in entry[0]["restarts"]]
        items = [entry[0] for entry in new]
        text = f"{failure}\n{text_from(service_log(name), logged)}"
        fix, told = advice(items, text), telling_line(text, items)
        if not ran or not new:
            raise Failure(f"{failure}\n{told}" if fix else str(failure), fix) from None
        paths = ", ".join(one["path"] for one in items)
        world.tell(f"{name} does not start with the new {paths}; putting the old back")
        for one, data, found in reversed(new):
            put_back(one["path"], data, found, world)
        world.replaced = [entry for entry in world.replaced if entry not in new]
        try:
            start_again(item, world)
        except Failure as again:
            raise Failure(f"{failure}\nNor does it start with the old {paths}: {again}", fix) from None
        for key in {key for one in items for key in one["reloads"]}:
            settle(world, key)
        raise Failure(
            f"{name} did not start with the new {paths}: {told or failure}\n"
            f"The old {'file is' if len(new) == 1 else 'files are'} back in force, and {name} runs",
            fix,
        ) from None


def is_up(name: str, world: World) -> bool:
    return world.unit(name).get("ActiveState") == "active" if has_systemd() else bool(supervised(name))


def service_log(name: str) -> str:
    """Where Slurm's daemons write what they have to say; others say it to systemd or to our supervisor."""
    return f"/var/log/slurm/{name}.log" if has_systemd() else f"{SERVICE_LOGS}/{name}.log"


def start_again(item: Item, world: World) -> str:
    """Start or restart a service, whatever else the document says about it."""
    name = item["name"]
    if not has_systemd():
        return make_supervised({"running": True, "enabled": False, "command": [], **item}, world)
    world.forget_units()
    reload_units(world, name)
    start_unit(name, world)
    settle_service(name, world)
    return ""


def bring_up(item: Item, world: World) -> str:
    if not has_systemd():
        return make_supervised(item, world)
    name = item["name"]
    reload_units(world, name)
    steps = service_steps(item, world)
    for step in steps:
        if step in ("start", "restart"):
            start_unit(name, world)
        else:
            # Told nothing else, these two have systemd read all its units again, which matters at the next boot only.
            reload = ["--no-reload"] if step in ("enable", "disable") else []
            must(["systemctl", step, *reload, "--", name], f"could not {step} {name}")
    world.forget_units()
    if not world.defer or "start" in steps or "stop" in steps:
        settle_service(name, world)
    return ""


def reload_units(world: World, name: str) -> None:
    """Have systemd read its units again, where one has changed."""
    if world.reload_units or world.unit(name).get("NeedDaemonReload") == "yes":
        must(["systemctl", "daemon-reload"], "could not reload systemd's units")
        world.reload_units = False
        world.forget_units()


def settle_service(name: str, world: World) -> None:
    world.forget_units()
    settle(world, "service " + name)
    settle(world, "start " + name)


def start_unit(name: str, world: World) -> None:
    """Start or restart, then look for a moment whether it stays up."""
    before = world.unit(name).get("ActiveState")
    if before == "failed":
        run(["systemctl", "reset-failed", "--", name])
    world.tell(f"{'restarting' if before == 'active' else 'starting'} {name}")
    status, text = run(["systemctl", "restart", "--", name], timeout=300.0)
    if status and show_units([name])[name].get("Result") == "start-limit-hit":
        # Our own restarts, one after another, are not the crash loop that systemd's limit is meant for.
        run(["systemctl", "reset-failed", "--", name])
        status, text = run(["systemctl", "restart", "--", name], timeout=300.0)
    if status:
        raise Failure(f"{name} did not start\n{unit_log(name, text)}")
    see_it_stay_up(name)


SAYS_WHEN_READY = ("notify", "notify-reload", "forking", "oneshot", "dbus")
"""Types of units that systemd counts as started when they are ready. The others count from their first breath."""


def see_it_stay_up(name: str) -> None:
    """Raises when a service is down again. One that cannot say that it is ready is watched until it listens."""
    begun, settled = time.monotonic(), False
    while True:
        unit = show_units([name])[name]
        finished = unit.get("Type") == "oneshot" and unit.get("Result") == "success"
        if unit.get("ConditionResult") == "no":
            raise Failure(f"{name} was not started: a condition in its unit is not met\n{unit_log(name)}")
        if unit.get("ActiveState") not in ("active", "reloading") and not finished:
            raise Failure(f"{name} started and did not stay up\n{unit_log(name)}")
        pid = unit.get("MainPID", "")
        if settled or unit.get("Type") in SAYS_WHEN_READY or listens(pid):
            return
        time.sleep(0.03)
        settled = has_settled(pid, time.monotonic() - begun)


def unit_log(name: str, said: str = "") -> str:
    run(["journalctl", "--sync"], timeout=20.0)  # its last words may still be on their way there
    status, text = run(["journalctl", "--no-pager", "-q", "-o", "short-iso", "-n", "20", "-u", name], timeout=20.0)
    if status or not text.strip():
        _, text = run(["systemctl", "status", "--no-pager", "-l", "-n", "20", "--", name], timeout=20.0)
    return (last_lines(text) or last_lines(said)) + taken_port(name)


def service_facts(names: list[str], world: World) -> dict[str, str]:
    if not has_systemd():
        return {name: "active" if supervised(name) else "missing" for name in names}
    units = world.units(names)
    return {
        name: "missing" if unit.get("LoadState") == "not-found" else unit.get("ActiveState", "missing")
        for name, unit in units.items()
    }
