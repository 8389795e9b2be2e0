#!/usr/bin/python3
"""Makes Slurm's accounts, users and QOS what a file says. Runs on the host of the database.

    accounts.py check GOAL RECORD            exit 0 if there is nothing to do, else print the commands
    accounts.py apply GOAL RECORD COMMAND..  run COMMAND (a backup), then the commands

RECORD lists what earlier runs added: of this, what GOAL no longer names is removed. What others added with sacctmgr
stays. Jobs that have ended keep their records in any case.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, TypeVar

    Data = Dict[str, Any]
    Words = List[str]
    T = TypeVar("T")

RETRY_PAUSES_S = (2, 3, 5, 5)
"""Between attempts: slurmdbd may have just started."""

LIMITS = {
    # the names of a setting in `sacctmgr modify` and in `sacctmgr show`
    "MaxWall": "MaxWall",
    "MaxTRESPerJob": "MaxTRES",
    "GrpJobs": "GrpJobs",
    "GrpTRES": "GrpTRES",
    "GrpTRESMins": "GrpTRESMins",
}
ASSOCIATION = {
    "Fairshare": "Share",
    "QOS": "QOS",
    "DefaultQOS": "DefaultQOS",
    "MaxJobs": "MaxJobs",
    "MaxSubmitJobs": "MaxSubmit",
    **LIMITS,
}
QOS = {
    "Priority": "Priority",
    "MaxJobsPerUser": "MaxJobsPU",
    "MaxSubmitJobsPerUser": "MaxSubmitPU",
    "MaxTRESPerUser": "MaxTRESPU",
    **LIMITS,
}


class AccountsError(Exception):
    """A command failed; the message has the fix."""


def main() -> None:
    verb, goal_file, record_file = sys.argv[1:4]
    with open(goal_file) as file:
        goal = json.load(file)
    recorded = read_record(record_file)
    try:
        if verb == "check":
            commands = pending_commands(goal, recorded)
            print("".join(" ".join(command) + "\n" for command in commands), end="")
            sys.exit(1 if commands or list_names(goal) != recorded else 0)
        apply(goal, recorded, record_file, backup=sys.argv[4:])
    except AccountsError as error:
        sys.exit(str(error))


def pending_commands(goal: Data, recorded: dict[str, Words]) -> list[Words]:
    """The sacctmgr commands to run. With nothing in goal and record, Slurm is not queried."""
    if not any(recorded.values()) and list_names(goal) == recorded:
        return []
    options = sorted({name.split()[1] for name in [*recorded.get("qos_options", []), *option_names(goal)]})
    return diff_commands(goal, recorded, read_current(goal["cluster"], options))


def apply(goal: Data, recorded: dict[str, Words], record_file: str, backup: Words) -> None:
    commands = retry(pending_commands, goal, recorded)
    if commands:
        run(backup, "cannot make a backup, so nothing was changed")
    # Recorded before anything is added, so that a later run removes what a killed run leaves.
    names = list_names(goal)
    write(
        record_file, {kind: sorted({*recorded.get(kind, []), *names.get(kind, [])}) for kind in {**recorded, **names}}
    )
    for command in commands:
        if command[0] == "delete":
            delete(command)
        else:
            retry(sacctmgr, *command)
    write(record_file, list_names(goal))


def delete(command: Words) -> None:
    """Slurm refuses to delete users and accounts with jobs, but not a QOS: its pending jobs would wait forever."""
    _, kind, name = command[:3]
    if kind == "qos":
        jobs = run(["squeue", "-h", "-q", name, "-o", "%i"], "cannot list the jobs with the QOS " + name).split()
        if jobs:
            raise AccountsError(f"the QOS {name} has jobs: {', '.join(jobs)}. Wait for them, or end them with scancel")
    try:
        sacctmgr(*command)
    except AccountsError as error:
        raise AccountsError(f"{error}. Wait for the jobs, or end them with scancel") from None


def retry(function: Callable[..., T], *arguments: Any) -> T:
    """slurmdbd may have just started, and learns of GPUs only later, from slurmctld."""
    for pause in RETRY_PAUSES_S:
        try:
            return function(*arguments)
        except AccountsError:
            time.sleep(pause)
    return function(*arguments)


def read_record(path: str) -> dict[str, Words]:
    """What earlier runs added."""
    try:
        with open(path) as file:
            record = json.load(file)
    except (OSError, ValueError):
        record = {}
    options = {"qos_options": record["qos_options"]} if record.get("qos_options") else {}
    return {**{kind: record.get(kind, []) for kind in ("qos", "accounts", "users")}, **options}


def list_names(goal: Data) -> dict[str, Words]:
    users = [user + "@" + account for user, entry in goal["users"].items() for account in entry["accounts"]]
    options = {"qos_options": option_names(goal)} if option_names(goal) else {}
    return {"qos": sorted(goal["qos"]), "accounts": sorted(goal["accounts"]), "users": sorted(users), **options}


def option_names(goal: Data) -> Words:
    """The options of QOS: `night Flags`, and for each resource `night MaxTRESPerUser cpu`."""
    names = []
    for qos, options in goal.get("qos_options", {}).items():
        for key, value in options.items():
            names += [f"{qos} {key} {part}" for part in value] if isinstance(value, dict) else [f"{qos} {key}"]
    return sorted(names)


def write(path: str, value: Data | dict[str, Words]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".part", "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def read_current(cluster: str, options: Words) -> Data:
    """What Slurm has: settings and `options` of QOS, accounts and users in accounts, each user's default account."""
    shown_options = {key: key for key in options if key not in QOS}
    queries = [
        (["assoc", "cluster=" + cluster, "wopl"], ["Account", "User", "ParentName", *ASSOCIATION.values()]),
        (["qos"], ["Name", *QOS.values(), *shown_options]),
        (["user"], ["User", "DefaultAccount"]),
    ]
    lines = [["sacctmgr", "-n", "-P", "show", *words, "format=" + ",".join(fields)] for words, fields in queries]
    processes = [start(line) for line in lines]  # all at once: sacctmgr mostly waits
    outputs = [finish(process, " ".join(line)) for process, line in zip(processes, lines)]
    associations, qos_rows, user_rows = [
        [dict(zip(fields, line.split("|"))) for line in text.splitlines() if line.count("|") >= len(fields) - 1]
        for text, (_, fields) in zip(outputs, queries)
    ]
    accounts: Data = {}
    users: dict[tuple[str, str], Data] = {}
    for row in associations:
        settings = {name: row[shown] for name, shown in ASSOCIATION.items()}
        if row["User"]:
            users[row["User"], row["Account"]] = settings
        else:
            accounts[row["Account"]] = {"parent": row["ParentName"], "settings": settings}
    qos = {row["Name"]: {name: row[shown] for name, shown in {**QOS, **shown_options}.items()} for row in qos_rows}
    defaults = {row["User"]: row["DefaultAccount"] for row in user_rows}
    return {"accounts": accounts, "users": users, "qos": qos, "defaults": defaults}


def sacctmgr(*words: str) -> None:
    run(["sacctmgr", "-i", "-Q", *words], f"sacctmgr {' '.join(words)}")


def run(argv: Words, what: str) -> str:
    return finish(start(argv), what)


def start(argv: Words) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], what: str) -> str:
    text, _ = process.communicate()
    if process.returncode:
        raise AccountsError(f"{what}: {' '.join(text.split())[-400:] or process.returncode}")
    return text


def diff_commands(goal: Data, recorded: dict[str, Words], existing: Data) -> list[Words]:
    """The sacctmgr commands that change what exists into the goal."""
    where = "cluster=" + goal["cluster"]
    commands: list[Words] = []

    def modify(target: Words, settings: Data, old: Data) -> None:
        changed = assignments(settings, old)
        if changed:
            commands.append(["modify", *target, "set", *changed])

    for name, settings in goal["qos"].items():
        if name not in existing["qos"]:
            commands.append(["add", "qos", name])
        modify(["qos", name], settings, existing["qos"].get(name, {}))
        changed = option_assignments(name, goal, recorded, existing["qos"].get(name, {}))
        if changed:
            commands.append(["modify", "qos", name, "set", *changed])
    for name, account in goal["accounts"].items():
        old = existing["accounts"].get(name)
        if old is None:
            about = ["description=" + account["description"], "organization=" + goal["cluster"]]
            commands.append(["add", "account", name, where, "parent=" + account["parent"], *about])
        elif old["parent"] != account["parent"]:
            commands.append(["modify", "account", name, where, "set", "parent=" + account["parent"]])
        modify(["account", name, where], account["settings"], old["settings"] if old else {})
    for user, entry in goal["users"].items():
        for account, settings in entry["accounts"].items():
            old = existing["users"].get((user, account))
            if old is None:
                commands.append(["add", "user", user, "account=" + account, where])
            modify(["user", user, "where", where, "account=" + account], settings, old or {})
        if existing["defaults"].get(user) not in (None, "", entry["default"]):
            commands.append(["modify", "user", user, "where", where, "set", "defaultaccount=" + entry["default"]])
    return commands + removal_commands(goal, recorded, existing, where)


def removal_commands(goal: Data, recorded: dict[str, Words], existing: Data, where: str) -> list[Words]:
    named = list_names(goal)
    pairs = [(user, account) for user, _, account in (name.partition("@") for name in recorded["users"])]
    removed = [pair for pair in pairs if "@".join(pair) not in named["users"] and pair in existing["users"]]
    # Slurm does not remove a user from the default account while there is another account.
    removed.sort(key=lambda pair: existing["defaults"].get(pair[0]) == pair[1])
    commands = [["delete", "user", user, "account=" + account, where] for user, account in removed]
    obsolete = [name for name in recorded["accounts"] if name not in named["accounts"] and name in existing["accounts"]]
    # Deleting an account deletes those inside it, so the innermost goes first.
    for name in sorted(obsolete, key=lambda name: -depth(name, existing["accounts"])):
        commands.append(["delete", "account", name, where])
    for name in recorded["qos"]:
        if name not in named["qos"] and name in existing["qos"] and name != "normal":
            commands.append(["delete", "qos", name])
    return commands


def depth(name: str, accounts: Data) -> int:
    steps = 0
    while name in accounts and steps < 100:
        name, steps = accounts[name]["parent"], steps + 1
    return steps


def assignments(settings: Data, existing: dict[str, str]) -> Words:
    """`Key=value` for every setting that differs from the goal; -1 removes one."""
    changed = []
    for key, value in settings.items():
        old = existing.get(key, "")
        if isinstance(value, dict):
            old_counts = dict(part.split("=", 1) for part in old.split(",") if "=" in part)
            parts = [name + "=" + (count or "-1") for name, count in value.items() if count != old_counts.get(name)]
            if parts:
                changed.append(key + "=" + ",".join(parts))
        elif key == "MaxWall":
            if (float(value) if value else None) != minutes(old):
                changed.append(key + "=" + (value or "-1"))
        elif key == "QOS":
            if (value or "") != ",".join(sorted(old.split(",") if old else [])):
                changed.append(key + "=" + (value or ""))
        elif (value or "") != (old or DEFAULTS.get(key, "")):
            changed.append(key + "=" + (value or "-1"))
    return changed


def option_assignments(qos: str, goal: Data, recorded: dict[str, Words], existing: dict[str, str]) -> Words:
    """`Key=value` for every option that differs. One that an earlier run set and the goal no longer has is reset."""
    options: Data = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in goal.get("qos_options", {}).get(qos, {}).items()
    }
    for line in recorded.get("qos_options", []):
        name, key, *part = line.split()
        if name == qos and part:
            options.setdefault(key, {}).setdefault(part[0], "-1")
        elif name == qos:
            options.setdefault(key, RESET.get(key, "-1"))
    changed = []
    for key, value in options.items():
        old = existing.get(key, "")
        if isinstance(value, dict):
            counts = dict(part.split("=", 1) for part in old.split(",") if "=" in part)
            parts = [f"{name}={count}" for name, count in value.items() if amount(count) != amount(counts.get(name))]
            if parts:
                changed.append(key + "=" + ",".join(parts))
        elif normal(value) != normal(old or RESET.get(key, "-1")):
            changed.append(key + "=" + value)
    return changed


RESET = {"Preempt": "", "PreemptMode": "cluster", "UsageFactor": "1", "GraceTime": "0"}
"""What removes a setting, where -1 does not; also what a setting is that Slurm shows as empty."""
UNITS = "KMGTP"


def amount(text: str | None) -> float:
    """A count of a resource. Memory is in megabytes, and Slurm shows it with a unit; -1 is no limit."""
    if not text:
        return -1.0
    power = UNITS.find(text[-1:])
    return float(text[:-1]) * 1024 ** (power - 1) if power >= 0 else float(text)


def normal(text: str) -> Any:
    """A value in one form: a time as seconds, a number, or words in any order and case."""
    if minutes(text) is not None:
        return float(minutes(text) or 0) * 60
    try:
        return float(text)
    except ValueError:
        return sorted(filter(None, text.lower().split(",")))


DEFAULTS = {"Fairshare": "1", "Priority": "0"}


def minutes(text: str) -> float | None:
    """`1-00:00:00` as minutes; None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if not match:
        return None
    days, hours, mins, secs = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + mins + secs / 60


if __name__ == "__main__":
    main()
