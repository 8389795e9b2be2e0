"""Users and groups with fixed ids. One that has another id is corrected where nothing depends on the old one."""

from __future__ import annotations

import os
import stat
import time

from shoal.remote.agent.context import ConvergeContext, Item, ItemChange, clear_due, record_due
from shoal.remote.agent.file_io import read_text
from shoal.remote.agent.running import Failure, run_checked

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

REMOTE = ("autofs", "nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "beegfs", "glusterfs")
VOLATILE = ("/proc", "/sys", "/dev", "/run")
SEARCH_TIMEOUT_S = 120.0
FIRST_USER_UID = 1000
"""The first id of people. Below it are accounts that the host's own programs run as."""


def check_group(item: Item, context: ConvergeContext) -> ItemChange | None:
    import grp

    name, gid, existing = item["name"], item["gid"], group_of(item["name"])
    if existing and existing.gr_gid == gid:
        return None
    other = _entry(grp.getgrgid, gid)
    if other:
        raise Failure(describe_taken_id("group", name, gid, other.gr_name))
    if not existing:
        return ItemChange(f"create group {name} with id {gid}")
    if existing.gr_gid < FIRST_USER_UID and any(not user.get("system", True) for user in _users_of(item, context)):
        raise Failure(describe_system_account("group", name, existing.gr_gid))
    reject_dependants(name, "group", existing.gr_gid, gid, *_paths_and_services_to_hand_over(item, context))
    return ItemChange(f"change the id of group {name} from {existing.gr_gid} to {gid}")


def make_group(item: Item, context: ConvergeContext) -> str:
    name, gid, existing = item["name"], item["gid"], group_of(item["name"])
    if not existing:
        run_checked(["groupadd", "--gid", str(gid), "--", name], "could not make group " + name)
        return ""
    change = ["groupmod", "--gid", str(gid), "--", name]
    return renumber(context, change, "group", existing.gr_gid, gid, *_paths_and_services_to_hand_over(item, context))


def _paths_and_services_to_hand_over(item: Item, context: ConvergeContext) -> tuple[list[str], list[str]]:
    """What may be handed over with a group: what its users' items say."""
    users = _users_of(item, context)
    return [path for user in users for path in user["owns"]], [name for user in users for name in user["services"]]


def _users_of(group: Item, context: ConvergeContext) -> list[Item]:
    return [user for user in context.items if user["kind"] == "user" and user["group"] == group["name"]]


def check_user(item: Item, context: ConvergeContext) -> ItemChange | None:
    import grp
    import pwd

    name, uid, existing, group = item["name"], item["uid"], user_of(item["name"]), group_of(item["group"])
    if item.get("locked"):
        # The same name with another id is another user.
        return ItemChange(f"lock user {name}") if existing and existing.pw_uid == uid and not expired(name) else None
    if existing and existing.pw_uid < FIRST_USER_UID and not item.get("system", True):
        raise Failure(describe_system_account("user", name, existing.pw_uid))
    if not existing or existing.pw_uid != uid:
        other = _entry(pwd.getpwuid, uid)
        if other and other.pw_name != item.get("twin_of"):
            raise Failure(describe_taken_id("user", name, uid, other.pw_name))
    if not group and not context.dry:
        raise Failure(f"user {name} is to have the group {item['group']}, which this host does not have")
    if not existing:
        return ItemChange(f"create user {name} with id {uid}")
    if existing.pw_uid != uid:
        reject_dependants(name, "user", existing.pw_uid, uid, item["owns"], item["services"])
        return ItemChange(f"change the id of user {name} from {existing.pw_uid} to {uid}")
    notes = [] if group and existing.pw_gid == group.gr_gid else ["group " + item["group"]]
    notes += [] if existing.pw_dir == item["home"] else ["home " + item["home"]]
    notes += [] if existing.pw_shell == item["shell"] else ["shell " + item["shell"]]
    member_of = {entry.gr_name for entry in grp.getgrall() if name in entry.gr_mem} if item["groups"] else set()
    notes += ["member of " + expected for expected in item["groups"] if expected not in member_of]
    if not item.get("system", True) and expired(name):
        notes.append("login allowed")
    return ItemChange(f"set {', '.join(notes)} of user {name}") if notes else None


def make_user(item: Item, context: ConvergeContext) -> str:
    name, existing = item["name"], user_of(item["name"])
    if item.get("locked"):
        run_checked(["usermod", "--expiredate", "1", "--", name], "could not lock user " + name)
        return ""
    settings = ["--gid", item["group"], "--home" if existing else "--home-dir", item["home"], "--shell", item["shell"]]
    if item["groups"]:
        settings += ["--groups", ",".join(item["groups"])]
    if not existing:
        kind = ["--system"] if item.get("system", True) else []
        kind += ["--non-unique"] if item.get("twin_of") else []
        argv = ["useradd", *kind, "--no-create-home", "--uid", str(item["uid"]), *settings, "--", name]
        run_checked(argv, "could not make user " + name)
        return ""
    if item["groups"]:
        settings.append("--append")
    if not item.get("system", True):
        settings += ["--expiredate", ""]
    if (existing.pw_uid, existing.pw_dir) == (item["uid"], item["home"]):
        run_checked(["usermod", *settings, "--", name], "could not change user " + name)
        return ""
    argv = ["usermod", "--uid", str(item["uid"]), *settings, "--", name]
    return renumber(context, argv, "user", existing.pw_uid, item["uid"], item["owns"], item["services"])


def expired(name: str) -> bool:
    """Whether the account is locked: it has an end, and that is over."""
    for line in read_text("/etc/shadow").splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) > 7:
            return fields[7].isdigit() and int(fields[7]) < time.time() / 86400
    return False


def describe_taken_id(kind: str, name: str, number: int, other: str) -> str:
    return (
        f"the id {number} wanted for {kind} {name} belongs to {kind} {other} on this host; give {other} another id "
        f"({kind}mod, then chown its files), or choose another id for {name}"
    )


def describe_system_account(kind: str, name: str, number: int) -> str:
    return f"{kind} {name} is this host's own, with id {number}, and programs of it run as that; choose another name"


def renumber(
    context: ConvergeContext, argv: list[str], kind: str, old: int, new: int, owns: list[str], services: list[str]
) -> str:
    """Change an id, or a home, for which nothing may run as the user.

    Files go over first: killed in between, the next run finds the old id and does it all again.
    """
    up = ("active", "activating", "reloading")
    stopped = [name for name in services if context.unit(name).get("ActiveState") in up]
    record_due(context, {"start " + name: "its ids changed" for name in stopped})
    for name in stopped:
        run_checked(["systemctl", "stop", "--", name], "could not stop " + name)
    for path in files_of(kind, old, [path for path in owns if os.path.isdir(path)], limit=0):
        os.chown(path, new if kind == "user" else -1, new if kind == "group" else -1, follow_symlinks=False)
    run_checked(argv, "could not change the id", timeout=600.0)
    for name in stopped:
        run_checked(["systemctl", "start", "--", name], f"could not start {name} again")
        clear_due(context, "start " + name)
    context.known_units = {}
    return f"id {old} became {new}" if old != new else ""


def reject_dependants(name: str, kind: str, old: int, new: int, owns: list[str], services: list[str]) -> None:
    """Stop when a process or a file elsewhere depends on the old id."""
    what = f"{kind} {name} has id {old} here and needs {new}, but"
    processes = processes_of(kind, old, services)
    if processes:
        raise Failure(f"{what} these run with it: {', '.join(processes[:5])}. Stop them and run again")
    files = list(files_of(kind, old, ["/"], limit=5, outside=owns))
    if files:
        flag, program = ("-uid", "chown") if kind == "user" else ("-gid", "chgrp")
        raise Failure(
            f"{what} files outside its own directories belong to {old}: {', '.join(files)}. Hand them over (find / "
            f"-xdev {flag} {old} -exec {program} -h {new} {{}} +), or remove them, and run again"
        )


def processes_of(kind: str, number: int, services: list[str]) -> list[str]:
    label = "Uid:" if kind == "user" else "Gid:"
    processes = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        status = read_text(f"/proc/{pid}/status")
        ids = status.split(label, 1)[1].split("\n")[0].split() if label in status else []
        if str(number) in ids:
            group = read_text(f"/proc/{pid}/cgroup")
            if not any(f"/{service}.service" in group for service in services):
                processes.append(f"{read_text(f'/proc/{pid}/comm').strip()} (pid {pid})")
    return processes


def files_of(kind: str, number: int, roots: list[str], limit: int, outside: list[str] | None = None) -> Iterator[str]:
    """Paths below `roots` on local disks that belong to an id, except below `outside`; at most `limit` (0: all)."""
    skipped = remote_mounts().union(VOLATILE, outside or ())
    deadline, count = time.monotonic() + SEARCH_TIMEOUT_S, 0
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path in skipped:
            continue
        if time.monotonic() > deadline:
            raise Failure(f"could not search all files for the old id {number} within {SEARCH_TIMEOUT_S:.0f} s")
        try:
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                waiting += [entry.path for entry in os.scandir(path)]
        except OSError:
            continue
        if number == (status.st_uid if kind == "user" else status.st_gid):
            yield path
            count += 1
            if count == limit:
                return


def remote_mounts() -> set[str]:
    """Mount points of file systems of other hosts, automounts included. Looking into one may block."""
    mounts = (line.split(" - ", 1) for line in read_text("/proc/self/mountinfo").splitlines())
    return {left.split()[4] for left, right in mounts if right.split()[0] in REMOTE or right.startswith("fuse.")}


def accounts(names: list[str], find: Callable[[str], Any], table: str) -> list[Any]:
    """The accounts of these names that there are; `*` asks for all that are local to the host."""
    if "*" in names:
        names = [line.partition(":")[0] for line in read_text("/etc/" + table).splitlines() if line[:1] not in "#+-"]
    return [entry for entry in map(find, names) if entry]


def user_of(name: str) -> Any:
    import pwd

    return _entry(pwd.getpwnam, name)


def group_of(name: str) -> Any:
    import grp

    return _entry(grp.getgrnam, name)


def _entry(find: Callable[..., Any], key: str | int) -> Any:
    """An entry of a table of accounts; None where there is none."""
    try:
        return find(key)
    except KeyError:
        return None


ACCOUNT_KINDS = {"group": (check_group, make_group), "user": (check_user, make_user)}
