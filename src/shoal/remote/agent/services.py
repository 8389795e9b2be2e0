"""Services: enabled and running as asked, restarted when what they read has changed."""

from __future__ import annotations

import os
import sys
import time
from _collections_abc import Callable

from shoal.remote.agent.context import ConvergeContext, Item, ItemChange, clear_due, has_systemd, show_units
from shoal.remote.agent.fast_stdlib import loads, signal
from shoal.remote.agent.file_io import read_text, remove, write_atomic
from shoal.remote.agent.files import put_back
from shoal.remote.agent.network import listens, port_holder
from shoal.remote.agent.running import (
    ENVIRONMENT,
    Failure,
    advice,
    has_settled,
    last_lines,
    most_relevant_line,
    run,
    run_checked,
)
from shoal.remote.agent.supervise import SERVICE_LOGS, SUPERVISED, process_start


def check_service(item: Item, context: ConvergeContext) -> ItemChange | None:
    if not has_systemd():
        return check_supervised(item, context)
    name, unit = item["name"], context.unit(item["name"])
    if unit.get("LoadState") == "not-found":
        if not item["running"] and not item["enabled"]:
            return None
        if not context.dry and not context.changed_units:
            raise Failure(f"there is no service {name} on this host; install the package that brings it")
        return ItemChange(f"enable and start {name}")
    if unit.get("UnitFileState") == "masked" and (item["enabled"] or item["running"]):
        raise Failure(f"{name} is masked on this host; run `systemctl unmask {name}` and try again")
    steps = service_steps(item, context)
    reason = f" ({due_reason(name, context)})" if "restart" in steps else ""
    return ItemChange(f"{' and '.join(steps)} {name}{reason}") if steps else None


def service_steps(item: Item, context: ConvergeContext) -> list[str]:
    """The systemctl verbs that bring the service to the item's state."""
    unit = context.unit(item["name"])
    state, active = unit.get("UnitFileState", ""), unit.get("ActiveState", "")
    steps = []
    starts = item["running"] and active not in ("active", "reloading")
    # Where it is started in any case, to enable it once more does no harm, and to ask costs as much.
    is_disabled = state == "disabled" and starts
    if item["enabled"] and state in ("disabled", "linked", "") and (is_disabled or not is_enabled(item["name"])):
        steps.append("enable")
    elif not item["enabled"] and state.startswith("enabled") and is_enabled(item["name"]):
        steps.append("disable")
    if starts:
        steps.append("start")
    elif not item["running"] and active in ("active", "reloading", "activating"):
        steps.append("stop")
    elif item["running"] and due_reason(item["name"], context) and not context.defer:
        steps.append("restart")
    return steps


def is_enabled(name: str) -> bool:
    """As the files say: of a unit that it has loaded, systemd reports what was so when it read its units."""
    return run(["systemctl", "is-enabled", "--quiet", "--", name])[0] == 0


def due_reason(name: str, context: ConvergeContext) -> str:
    return context.due.get("service " + name) or context.due.get("start " + name) or ""


def make_service(item: Item, context: ConvergeContext) -> str:
    return restore_files_on_failure(bring_up, item, context)


def restore_files_on_failure(step: Callable[[Item, ConvergeContext], str], item: Item, context: ConvergeContext) -> str:
    """A step that starts a service. One that ran, and does not with the files of this run, gets its old ones back."""
    name = item["name"]
    log = service_log(name)
    ran, logged = is_active(name, context), os.path.getsize(log) if os.path.exists(log) else 0
    try:
        return step(item, context)
    except Failure as failure:
        new = [entry for entry in context.replaced if name in entry[0]["restarts"]]
        items = [entry[0] for entry in new]
        text = f"{failure}\n{text_from(log, logged)}"
        fix, cause = advice(items, text), most_relevant_line(text, items)
        if not ran or not new:
            raise Failure(f"{failure}\n{cause}" if fix else str(failure), fix) from None
        paths = ", ".join(file_item["path"] for file_item in items)
        context.report(f"{name} does not start with the new {paths}; putting the old back")
        for file_item, data, status in reversed(new):
            put_back(file_item["path"], data, status, context)
        context.replaced = [entry for entry in context.replaced if entry not in new]
        try:
            start_again(item, context)
        except Failure as second_failure:
            raise Failure(f"{failure}\nNor does it start with the old {paths}: {second_failure}", fix) from None
        for key in {key for file_item in items for key in file_item["reloads"]}:
            clear_due(context, key)
        raise Failure(
            f"{name} did not start with the new {paths}: {cause or failure}\n"
            f"The old {'file is' if len(new) == 1 else 'files are'} back in force, and {name} runs",
            fix,
        ) from None


def is_active(name: str, context: ConvergeContext) -> bool:
    return context.unit(name).get("ActiveState") == "active" if has_systemd() else bool(find_supervisor(name))


def service_log(name: str) -> str:
    """Where Slurm's daemons write what they have to say; others say it to systemd or to our supervisor."""
    return f"/var/log/slurm/{name}.log" if has_systemd() else f"{SERVICE_LOGS}/{name}.log"


def start_again(item: Item, context: ConvergeContext) -> str:
    """Start or restart a service, regardless of the rest of the document."""
    name = item["name"]
    if not has_systemd():
        return make_supervised({"running": True, "enabled": False, "command": [], **item}, context)
    context.known_units = {}
    reload_units(context, name)
    start_unit(name, context)
    clear_due_service(name, context)
    return ""


def bring_up(item: Item, context: ConvergeContext) -> str:
    if not has_systemd():
        return make_supervised(item, context)
    name = item["name"]
    reload_units(context, name)
    steps = service_steps(item, context)
    for step in steps:
        if step in ("start", "restart"):
            start_unit(name, context)
        else:
            # Told nothing else, these two have systemd read all its units again, which matters at the next boot only.
            reload = ["--no-reload"] if step in ("enable", "disable") else []
            run_checked(["systemctl", step, *reload, "--", name], f"could not {step} {name}")
            context.known_units = {}
    if not context.defer or "start" in steps or "stop" in steps:
        clear_due_service(name, context)
    return ""


def reload_units(context: ConvergeContext, *names: str) -> None:
    """Have systemd read its units again, where it has an older or a removed one. It finds new ones by itself.

    It does not find a drop-in in a new directory, or a file that takes the place of another directory's; nor that of a
    unit which ran on without its file (`error`).
    """
    changed = context.changed_units
    units = context.units([*map(os.path.basename, changed), *names])
    is_elsewhere = any(units[os.path.basename(path)].get("FragmentPath") != path for path in changed)
    if is_elsewhere or any(
        unit.get("LoadState") in ("not-found", "error") or unit.get("NeedDaemonReload") == "yes"
        for unit in units.values()
    ):
        reload_systemd(context)
    changed.clear()


def reload_systemd(context: ConvergeContext) -> None:
    run_checked(["systemctl", "daemon-reload"], "could not reload systemd's units")
    context.changed_units.clear()
    context.known_units = {}


def clear_due_service(name: str, context: ConvergeContext) -> None:
    clear_due(context, "service " + name)
    clear_due(context, "start " + name)


def start_unit(name: str, context: ConvergeContext) -> None:
    """Start or restart, then look for a moment whether it stays up."""
    before = context.unit(name).get("ActiveState")
    if before == "failed":
        run(["systemctl", "reset-failed", "--", name])
    context.report(f"{'restarting' if before == 'active' else 'starting'} {name}")
    status, text = run(["systemctl", "restart", "--", name], timeout=300.0)
    if status and show_units([name])[name].get("Result") == "start-limit-hit":
        # Our own restarts, one after another, are not the crash loop that systemd's limit is meant for.
        run(["systemctl", "reset-failed", "--", name])
        status, text = run(["systemctl", "restart", "--", name], timeout=300.0)
    if status:
        raise Failure(f"{name} did not start\n{unit_log(name, text)}")
    wait_until_stable(name, context)


SAYS_WHEN_READY = ("notify", "notify-reload", "forking", "oneshot", "dbus")
"""Types of units that systemd counts as started when they are ready. The others count from their first breath."""


def wait_until_stable(name: str, context: ConvergeContext) -> None:
    """Raises when a service is down again. One that cannot say that it is ready is watched until it listens."""
    start, settled = time.monotonic(), False
    context.known_units = {}  # it may have started others
    while True:
        unit = context.unit(name)
        finished = unit.get("Type") == "oneshot" and unit.get("Result") == "success"
        if unit.get("ConditionResult") == "no":
            raise Failure(f"{name} was not started: a condition in its unit is not met\n{unit_log(name)}")
        if unit.get("ActiveState") not in ("active", "reloading") and not finished:
            raise Failure(f"{name} started and did not stay up\n{unit_log(name)}")
        pid = unit.get("MainPID", "")  # a timer has none
        if settled or not pid or unit.get("Type") in SAYS_WHEN_READY or listens(pid):
            return
        time.sleep(0.03)
        settled = has_settled(pid, time.monotonic() - start)
        context.known_units.update(show_units([name]))


def unit_log(name: str, output: str = "") -> str:
    run(["journalctl", "--sync"], timeout=20.0)  # its last words may still be on their way there
    status, text = run(["journalctl", "--no-pager", "-q", "-o", "short-iso", "-n", "20", "-u", name], timeout=20.0)
    if status or not text.strip():
        _, text = run(["systemctl", "status", "--no-pager", "-l", "-n", "20", "--", name], timeout=20.0)
    return (last_lines(text) or last_lines(output)) + describe_port_conflict(name)


def service_facts(names: list[str], context: ConvergeContext) -> dict[str, str]:
    if not has_systemd():
        return {name: "active" if find_supervisor(name) else "missing" for name in names}
    units = context.units(names)
    return {
        name: "missing" if unit.get("LoadState") == "not-found" else unit.get("ActiveState", "missing")
        for name, unit in units.items()
    }


SUPERVISOR = "shoal.remote.agent.supervise"


def check_supervised(item: Item, context: ConvergeContext) -> ItemChange | None:
    name, supervisor = item["name"], find_supervisor(item["name"])
    if item["running"] and not item["command"] and not supervisor:
        raise Failure(f"this host has no systemd, and no command is known for {name}; use a host with systemd")
    if not item["running"]:
        return ItemChange(f"stop {name}") if supervisor else None
    if not supervisor:
        return ItemChange(f"start {name} under a supervisor")
    restart_due = "service " + name in context.due and not context.defer
    other = item["command"] and supervisor["command"] != item["command"]
    return ItemChange(f"restart {name}") if restart_due or other else None


def make_supervised(item: Item, context: ConvergeContext) -> str:
    name, supervisor = item["name"], find_supervisor(item["name"])
    command = item["command"] or (supervisor or {}).get("command", [])
    if supervisor:
        stop_supervisor(supervisor)
    cron = "/etc/cron.d/shoal-" + "".join(c if c.isalnum() else "-" for c in name)
    if not item["running"]:
        remove(cron)
        clear_due(context, "service " + name)
        return ""
    program = context.state + "/supervise.py"
    write_atomic(program, context.source(SUPERVISOR).encode(), 0o700, os.geteuid(), os.getegid())
    argv = [sys.executable or "python3", "-I", "-B", program, name, *command]
    status, text = run(argv, timeout=30.0)
    if status or not stays_running(name):
        log = last_lines(read_text(f"{SERVICE_LOGS}/{name}.log") or text)
        raise Failure(f"{name} started under the supervisor and did not stay up\n{log}")
    clear_due(context, "service " + name)
    if not item["enabled"] or not os.path.isdir("/etc/cron.d"):
        return "this host has no cron: after a reboot it starts with the next `shoal up`" if item["enabled"] else ""
    import shlex

    line = ["env", "PATH=" + ENVIRONMENT["PATH"], *argv]  # cron's own PATH leaves out where daemons are
    text = "@reboot root {}\n".format(" ".join(shlex.quote(part) for part in line).replace("%", "\\%"))
    write_atomic(cron, text.encode(), 0o644, os.geteuid(), os.getegid())
    return ""


def stays_running(name: str) -> bool:
    """Whether a supervisor that was just started keeps its daemon up, seen for a moment, longer on a busy host."""
    start, first = time.monotonic(), 0
    while True:
        time.sleep(0.03)
        supervisor, seconds = find_supervisor(name), time.monotonic() - start
        if not supervisor:  # it writes its record once the daemon has begun
            if seconds > 10:
                return False
            continue
        first = first or supervisor["child"]
        settled = has_settled(str(first), seconds)
        if supervisor["child"] != first or not process_start(first):
            return False
        if settled:
            return True


def stop_supervisor(supervisor: Item) -> None:
    os.kill(supervisor["pid"], signal.SIGTERM)
    for _ in range(150):
        if process_start(supervisor["pid"]) != supervisor["start"]:
            return
        time.sleep(0.1)
    raise Failure(f"the supervisor (pid {supervisor['pid']}) does not end; kill it and run again")


def find_supervisor(name: str) -> Item | None:
    """The running supervisor of a service; None when there is none."""
    try:
        record: Item = loads(read_text(f"{SUPERVISED}/{name}.json") or "{}")
    except ValueError:
        return None
    return record if record and process_start(record["pid"]) == record["start"] else None


def text_from(path: str, start: int) -> str:
    """What was added to a log since it had this size."""
    if not os.path.exists(path):
        return ""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(1 << 20).decode("utf-8", "replace")


def describe_port_conflict(name: str) -> str:
    """Who sits on the port that a daemon could not have; "" when that is not what its log complains of."""
    import re

    log = read_text(f"/var/log/slurm/{name}.log")[-4096:] + run(["journalctl", "-q", "-n", "20", "-u", name])[1]
    if "ddress already in use" not in log:
        return ""
    # Slurm's daemons say which; of others it stands in the unit.
    ports = re.findall(r"port \((\d+)\): Address already in use", log)
    ports = ports or re.findall(r"--port (\d+)", run(["systemctl", "show", "-p", "ExecStart", "--", name])[1])
    holder = port_holder(int(ports[-1])) if ports else ""
    return f"\nport {ports[-1]} is taken by {holder}; stop it and run again" if holder else ""
