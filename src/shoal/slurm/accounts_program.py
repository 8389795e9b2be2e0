#!/usr/bin/python3
"""Brings Slurm's accounts, users and QOS to what a file says. Runs on the host that has the database.

    accounts.py check WANTED RECORD            exit 0 when nothing is to be done, else say what
    accounts.py apply WANTED RECORD COMMAND..  run COMMAND (a backup), then do it

What an earlier run made and WANTED no longer names is removed; RECORD is where that is remembered. What others made
with sacctmgr stays. Jobs that have ended keep their records in any case. Python 3.8, standard library only.
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

PAUSES = (2, 3, 5, 5)
"""Seconds between tries while slurmdbd, which may have just started, does not do what it is asked."""

ASSOCIATION = {
    # what `sacctmgr show` calls a setting, and what `sacctmgr modify` does
    "Fairshare": "Share",
    "QOS": "QOS",
    "DefaultQOS": "DefaultQOS",
    "MaxJobs": "MaxJobs",
    "MaxSubmitJobs": "MaxSubmit",
    "MaxWall": "MaxWall",
    "MaxTRESPerJob": "MaxTRES",
    "GrpJobs": "GrpJobs",
    "GrpTRES": "GrpTRES",
    "GrpTRESMins": "GrpTRESMins",
}
QOS = {
    "Priority": "Priority",
    "MaxJobsPerUser": "MaxJobsPU",
    "MaxSubmitJobsPerUser": "MaxSubmitPU",
    "MaxTRESPerUser": "MaxTRESPU",
    "MaxWall": "MaxWall",
    "MaxTRESPerJob": "MaxTRES",
    "GrpJobs": "GrpJobs",
    "GrpTRES": "GrpTRES",
    "GrpTRESMins": "GrpTRESMins",
}


class Refused(Exception):
    """What could not be done, and what to do about it."""


def main() -> None:
    verb, wanted_file, record_file = sys.argv[1:4]
    with open(wanted_file) as file:
        wanted = json.load(file)
    ours = remembered(record_file)
    try:
        if verb == "check":
            commands = due(wanted, ours)
            print("".join(" ".join(command) + "\n" for command in commands), end="")
            sys.exit(1 if commands or names(wanted) != ours else 0)
        apply(wanted, ours, record_file, backup=sys.argv[4:])
    except Refused as refused:
        sys.exit(str(refused))


def due(wanted: Data, ours: dict[str, Words]) -> list[Words]:
    """What is to be done. Where nothing is wanted, and nothing was, Slurm need not be asked."""
    if not any(ours.values()) and names(wanted) == ours:
        return []
    return differences(wanted, ours, current(wanted["cluster"]))


def apply(wanted: Data, ours: dict[str, Words], record_file: str, backup: Words) -> None:
    commands = patiently(due, wanted, ours)
    if commands:
        run(backup, "no backup could be made, so nothing was changed")
    # Noted before anything is made, so that a run that is killed leaves nothing that no later one removes.
    write(record_file, {kind: sorted({*ours[kind], *found}) for kind, found in names(wanted).items()})
    for command in commands:
        if command[0] == "delete":
            delete(command)
        else:
            patiently(sacctmgr, *command)
    write(record_file, names(wanted))


def delete(command: Words) -> None:
    """Slurm keeps users and accounts that have jobs, but no QOS: jobs that wait for one would wait for ever."""
    _, kind, name = command[:3]
    if kind == "qos":
        jobs = run(["squeue", "-h", "-q", name, "-o", "%i"], "cannot see whether jobs have the QOS " + name).split()
        if jobs:
            raise Refused(f"the QOS {name} has jobs: {', '.join(jobs)}. Wait for them, or end them with scancel")
    try:
        sacctmgr(*command)
    except Refused as refused:
        raise Refused(f"{refused}. Wait for the jobs, or end them with scancel") from None


def patiently(ask: Callable[..., T], *about: Any) -> T:
    """slurmdbd may have just started, and learns only after that, from slurmctld, that there are GPUs."""
    for pause in PAUSES:
        try:
            return ask(*about)
        except Refused:
            time.sleep(pause)
    return ask(*about)


def remembered(path: str) -> dict[str, Words]:
    """What earlier runs made."""
    try:
        with open(path) as file:
            found = json.load(file)
    except (OSError, ValueError):
        found = {}
    return {kind: found.get(kind, []) for kind in ("qos", "accounts", "users")}


def names(wanted: Data) -> dict[str, Words]:
    users = [user + "@" + account for user, found in wanted["users"].items() for account in found["accounts"]]
    return {"qos": sorted(wanted["qos"]), "accounts": sorted(wanted["accounts"]), "users": sorted(users)}


def write(path: str, value: Data | dict[str, Words]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".part", "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def current(cluster: str) -> Data:
    """What Slurm has now: settings of QOS, accounts and users in accounts, and each user's default account."""
    # All three at once: sacctmgr waits more than it works.
    everything = [
        Question("assoc", ["cluster=" + cluster, "wopl"], ["Account", "User", "ParentName", *ASSOCIATION.values()]),
        Question("qos", [], ["Name", *QOS.values()]),
        Question("user", [], ["User", "DefaultAccount"]),
    ]
    associations, found_qos, found_users = [question.rows() for question in everything]
    accounts: Data = {}
    users: dict[tuple[str, str], Data] = {}
    for row in associations:
        settings = {name: row[shown] for name, shown in ASSOCIATION.items()}
        if row["User"]:
            users[row["User"], row["Account"]] = settings
        else:
            accounts[row["Account"]] = {"parent": row["ParentName"], "settings": settings}
    qos = {row["Name"]: {name: row[shown] for name, shown in QOS.items()} for row in found_qos}
    defaults = {row["User"]: row["DefaultAccount"] for row in found_users}
    return {"accounts": accounts, "users": users, "qos": qos, "defaults": defaults}


class Question:
    """A question to sacctmgr, asked at once; the answer is waited for when it is wanted."""

    def __init__(self, kind: str, words: Words, fields: Words) -> None:
        self.fields = fields
        self.words = ["sacctmgr", "-n", "-P", "show", kind, *words, "format=" + ",".join(fields)]
        self.process = start(self.words)

    def rows(self) -> list[dict[str, str]]:
        lines = finish(self.process, " ".join(self.words)).splitlines()
        enough = len(self.fields) - 1
        return [dict(zip(self.fields, line.split("|"))) for line in lines if line.count("|") >= enough]


def sacctmgr(*words: str) -> None:
    run(["sacctmgr", "-i", "-Q", *words], f"sacctmgr {' '.join(words)}")


def run(argv: Words, what: str) -> str:
    return finish(start(argv), what)


def start(argv: Words) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], what: str) -> str:
    text, _ = process.communicate()
    if process.returncode:
        raise Refused(f"{what}: {' '.join(text.split())[-400:] or process.returncode}")
    return text


def differences(wanted: Data, ours: dict[str, Words], found: Data) -> list[Words]:
    """The commands of sacctmgr that bring what is found to what is wanted; none when it is that already."""
    where = "cluster=" + wanted["cluster"]
    commands: list[Words] = []
    for name, settings in wanted["qos"].items():
        if name not in found["qos"]:
            commands.append(["add", "qos", name])
        changed = assignments(settings, found["qos"].get(name, {}))
        if changed:
            commands.append(["modify", "qos", name, "set", *changed])
    for name, account in wanted["accounts"].items():
        there = found["accounts"].get(name)
        if there is None:
            about = ["description=" + account["description"], "organization=" + wanted["cluster"]]
            commands.append(["add", "account", name, where, "parent=" + account["parent"], *about])
        elif there["parent"] != account["parent"]:
            commands.append(["modify", "account", name, where, "set", "parent=" + account["parent"]])
        changed = assignments(account["settings"], there["settings"] if there else {})
        if changed:
            commands.append(["modify", "account", name, where, "set", *changed])
    for user, entry in wanted["users"].items():
        for account, settings in entry["accounts"].items():
            there = found["users"].get((user, account))
            if there is None:
                commands.append(["add", "user", user, "account=" + account, where])
            changed = assignments(settings, there or {})
            if changed:
                commands.append(["modify", "user", user, "where", where, "account=" + account, "set", *changed])
        if found["defaults"].get(user) not in (None, "", entry["default"]):
            commands.append(["modify", "user", user, "where", where, "set", "defaultaccount=" + entry["default"]])
    return commands + removals(wanted, ours, found, where)


def removals(wanted: Data, ours: dict[str, Words], found: Data, where: str) -> list[Words]:
    kept = names(wanted)
    pairs = [(user, account) for user, _, account in (name.partition("@") for name in ours["users"])]
    left = [pair for pair in pairs if "@".join(pair) not in kept["users"] and pair in found["users"]]
    # Slurm does not take a user out of the default account while there is another.
    left.sort(key=lambda pair: found["defaults"].get(pair[0]) == pair[1])
    commands = [["delete", "user", user, "account=" + account, where] for user, account in left]
    gone = [name for name in ours["accounts"] if name not in kept["accounts"] and name in found["accounts"]]
    # An account takes those inside it with it, so the innermost goes first.
    for name in sorted(gone, key=lambda name: -depth(name, found["accounts"])):
        commands.append(["delete", "account", name, where])
    for name in ours["qos"]:
        if name not in kept["qos"] and name in found["qos"] and name != "normal":
            commands.append(["delete", "qos", name])
    return commands


def depth(name: str, accounts: Data) -> int:
    steps = 0
    while name in accounts and steps < 100:
        name, steps = accounts[name]["parent"], steps + 1
    return steps


def assignments(settings: Data, found: dict[str, str]) -> Words:
    """`Key=value` for every setting that is not as wanted; -1 takes one away."""
    changed = []
    for key, value in settings.items():
        there = found.get(key, "")
        if isinstance(value, dict):
            has = counts(there)
            parts = [name + "=" + (count or "-1") for name, count in value.items() if count != has.get(name)]
            if parts:
                changed.append(key + "=" + ",".join(parts))
        elif key == "MaxWall":
            if (float(value) if value else None) != minutes(there):
                changed.append(key + "=" + (value or "-1"))
        elif key == "QOS":
            if (value or "") != ",".join(sorted(there.split(",") if there else [])):
                changed.append(key + "=" + (value or ""))
        elif (value or "") != (there or DEFAULTS.get(key, "")):
            changed.append(key + "=" + (value or "-1"))
    return changed


DEFAULTS = {"Fairshare": "1", "Priority": "0"}


def counts(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


def minutes(text: str) -> float | None:
    """`1-00:00:00` as minutes; None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if not match:
        return None
    days, hours, mins, secs = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + mins + secs / 60


if __name__ == "__main__":
    main()
