"""Users and groups with fixed ids. One that has another id is corrected where nothing depends on the old one."""

from __future__ import annotations

import os
import stat
import time

from shoal.agent.program.disk import read_text
from shoal.agent.program.failure import Failure
from shoal.agent.program.running import must
from shoal.agent.program.wire import Item
from shoal.agent.program.world import Change, World, note_due, settle

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

REMOTE = ("autofs", "nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "beegfs", "glusterfs")
VOLATILE = ("/proc", "/sys", "/dev", "/run")
SEARCH_SECONDS = 120.0
PEOPLE = 1000
"""The first id of people. Below it are accounts that the host's own programs run as."""


def check_group(item: Item, world: World) -> Change | None:
    import grp

    name, gid, found = item["name"], item["gid"], group_of(item["name"])
    if found and found.gr_gid == gid:
        return None
    try:
        raise Failure(taken("group", name, gid, grp.getgrgid(gid).gr_name))
    except KeyError:
        pass
    if not found:
        return Change(f"create group {name} with id {gid}")
    if found.gr_gid < PEOPLE and any(not user.get("system", True) for user in _users_of(item, world)):
        raise Failure(not_a_person("group", name, found.gr_gid))
    refuse_dependants(name, "group", found.gr_gid, gid, *_hand_over(item, world))
    return Change(f"change the id of group {name} from {found.gr_gid} to {gid}")


def make_group(item: Item, world: World) -> str:
    name, gid, found = item["name"], item["gid"], group_of(item["name"])
    if not found:
        must(["groupadd", "--gid", str(gid), "--", name], "could not make group " + name)
        return ""
    owns, services = _hand_over(item, world)
    change = ["groupmod", "--gid", str(gid), "--", name]
    return renumber(world, change, "group", found.gr_gid, gid, owns, services)


def _hand_over(item: Item, world: World) -> tuple[list[str], list[str]]:
    """What may be handed over with a group: what its users' items say."""
    users = _users_of(item, world)
    return [path for user in users for path in user["owns"]], [name for user in users for name in user["services"]]


def _users_of(group: Item, world: World) -> list[Item]:
    return [user for user in world.items if user["kind"] == "user" and user["group"] == group["name"]]


def check_user(item: Item, world: World) -> Change | None:
    import grp
    import pwd

    name, uid, found, group = item["name"], item["uid"], user_of(item["name"]), group_of(item["group"])
    if item.get("locked"):
        # Who has the name and another id is somebody else.
        return Change(f"lock user {name}") if found and found.pw_uid == uid and not expired(name) else None
    if found and found.pw_uid < PEOPLE and not item.get("system", True):
        raise Failure(not_a_person("user", name, found.pw_uid))
    if not found or found.pw_uid != uid:
        try:
            other = pwd.getpwuid(uid).pw_name
        except KeyError:
            other = ""
        if other and other != item.get("twin_of"):
            raise Failure(taken("user", name, uid, other))
    if not group and not world.dry:
        raise Failure(f"user {name} is to have the group {item['group']}, which this host does not have")
    if not found:
        return Change(f"create user {name} with id {uid}")
    if found.pw_uid != uid:
        refuse_dependants(name, "user", found.pw_uid, uid, item["owns"], item["services"])
        return Change(f"change the id of user {name} from {found.pw_uid} to {uid}")
    notes = [
        note
        for note, differs in (
            ("group " + item["group"], not group or found.pw_gid != group.gr_gid),
            ("home " + item["home"], found.pw_dir != item["home"]),
            ("shell " + item["shell"], found.pw_shell != item["shell"]),
        )
        if differs
    ]
    member_of = {entry.gr_name for entry in grp.getgrall() if name in entry.gr_mem} if item["groups"] else set()
    notes += ["member of " + wanted for wanted in item["groups"] if wanted not in member_of]
    notes += ["no member of " + other for other in unwanted_groups(item)]
    if not item.get("system", True) and expired(name):
        notes.append("login allowed")
    return Change(f"set {', '.join(notes)} of user {name}") if notes else None


def make_user(item: Item, world: World) -> str:
    name, found = item["name"], user_of(item["name"])
    if item.get("locked"):
        must(["usermod", "--expiredate", "1", "--", name], "could not lock user " + name)
        return ""
    for group in unwanted_groups(item):
        must(["gpasswd", "--delete", name, group], f"could not take user {name} out of group {group}")
    settings = ["--gid", item["group"], "--home-dir" if not found else "--home", item["home"], "--shell", item["shell"]]
    if item["groups"]:
        settings += ["--groups", ",".join(item["groups"])]
    if not found:
        kind = ["--system"] if item.get("system", True) else []
        kind += ["--non-unique"] if item.get("twin_of") else []
        argv = ["useradd", *kind, "--no-create-home", "--uid", str(item["uid"]), *settings, "--", name]
        must(argv, "could not make user " + name)
        return ""
    if item["groups"]:
        settings.append("--append")
    if not item.get("system", True):
        settings += ["--expiredate", ""]
    if (found.pw_uid, found.pw_dir) == (item["uid"], item["home"]):
        must(["usermod", *settings, "--", name], "could not change user " + name)
        return ""
    argv = ["usermod", "--uid", str(item["uid"]), *settings, "--", name]
    return renumber(world, argv, "user", found.pw_uid, item["uid"], item["owns"], item["services"])


def unwanted_groups(item: Item) -> list[str]:
    """Groups that the user is a member of and must not be."""
    return [name for name in item.get("not_in", ()) if (group := group_of(name)) and item["name"] in group.gr_mem]


def expired(name: str) -> bool:
    """Whether the account is locked: it has an end, and that is over."""
    for line in read_text("/etc/shadow").splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) > 7:
            return fields[7].isdigit() and int(fields[7]) < time.time() / 86400
    return False


def taken(kind: str, name: str, number: int, other: str) -> str:
    return (
        f"the id {number} wanted for {kind} {name} belongs to {kind} {other} on this host; give {other} another id "
        f"({kind}mod, then chown its files), or choose another id for {name}"
    )


def not_a_person(kind: str, name: str, number: int) -> str:
    return f"{kind} {name} is this host's own, with id {number}, and programs of it run as that; choose another name"


def renumber(world: World, argv: list[str], kind: str, old: int, new: int, owns: list[str], services: list[str]) -> str:
    """Change an id, or a home, for which nothing may run as the user.

    Files go over first: killed in between, the next run finds the old id and does it all again.
    """
    stopped = [
        name for name in services if world.unit(name).get("ActiveState") in ("active", "activating", "reloading")
    ]
    note_due(world, {"start " + name: "its ids changed" for name in stopped})
    for name in stopped:
        must(["systemctl", "stop", "--", name], "could not stop " + name)
    for path in files_of(kind, old, [path for path in owns if os.path.isdir(path)], limit=0):
        os.chown(path, new if kind == "user" else -1, new if kind == "group" else -1, follow_symlinks=False)
    must(argv, "could not change the id", timeout=600.0)
    for name in stopped:
        must(["systemctl", "start", "--", name], f"could not start {name} again")
        settle(world, "start " + name)
    world.forget_units()
    return f"id {old} became {new}" if old != new else ""


def refuse_dependants(name: str, kind: str, old: int, new: int, owns: list[str], services: list[str]) -> None:
    """Stop when a process or a file elsewhere depends on the old id."""
    processes = processes_of(kind, old, services)
    if processes:
        raise Failure(
            f"{kind} {name} has id {old} here and needs {new}, but these run with it: {', '.join(processes[:5])}. "
            "Stop them and run again"
        )
    files = list(files_of(kind, old, ["/"], limit=5, outside=owns))
    if files:
        flag, program = ("-uid", "chown") if kind == "user" else ("-gid", "chgrp")
        raise Failure(
            f"{kind} {name} has id {old} here and needs {new}, but files outside its own directories belong to {old}: "
            f"{', '.join(files)}. Hand them over (find / -xdev {flag} {old} -exec {program} -h {new} {{}} +), or "
            "remove them, and run again"
        )


def processes_of(kind: str, number: int, services: list[str]) -> list[str]:
    label = "Uid:" if kind == "user" else "Gid:"
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        status = read_text(f"/proc/{pid}/status")
        ids = status.split(label, 1)[1].split("\n")[0].split() if label in status else []
        if str(number) in ids:
            group = read_text(f"/proc/{pid}/cgroup")
            if not any(f"/{service}.service" in group for service in services):
                found.append(f"{read_text(f'/proc/{pid}/comm').strip()} (pid {pid})")
    return found


def files_of(kind: str, number: int, roots: list[str], limit: int, outside: list[str] | None = None) -> Iterator[str]:
    """Paths below `roots` on local disks that belong to an id, except below `outside`; at most `limit` (0: all)."""
    skipped = remote_mounts().union(VOLATILE, outside or ())
    deadline, count = time.monotonic() + SEARCH_SECONDS, 0
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path in skipped:
            continue
        if time.monotonic() > deadline:
            raise Failure(f"could not search all files for the old id {number} within {SEARCH_SECONDS:.0f} s")
        try:
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode):
                waiting += [entry.path for entry in os.scandir(path)]
        except OSError:
            continue
        if number == (found.st_uid if kind == "user" else found.st_gid):
            yield path
            count += 1
            if count == limit:
                return


def remote_mounts() -> set[str]:
    """Where file systems of other hosts are mounted, or will be when somebody looks. Whoever looks may have to wait."""
    mounts = (line.split(" - ", 1) for line in read_text("/proc/self/mountinfo").splitlines())
    return {left.split()[4] for left, right in mounts if right.split()[0] in REMOTE or right.startswith("fuse.")}


def accounts(names: list[str], find: Callable[[str], Any], table: str) -> list[Any]:
    """The accounts of these names that there are; `*` asks for all that are local to the host."""
    if "*" in names:
        names = [line.partition(":")[0] for line in read_text("/etc/" + table).splitlines() if line[:1] not in "#+-"]
    return [found for found in map(find, names) if found]


def user_of(name: str) -> Any:
    import pwd

    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def group_of(name: str) -> Any:
    import grp

    try:
        return grp.getgrnam(name)
    except KeyError:
        return None
