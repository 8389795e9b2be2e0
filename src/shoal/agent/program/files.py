"""Files, links, directories, and blocks in files that others write to as well."""

from __future__ import annotations

import os
import stat

from shoal.agent.program.accounts import group_of, user_of
from shoal.agent.program.complaints import advice, telling_line
from shoal.agent.program.disk import file_status, read_bytes, remove, sha256, temporary_name, write_atomic
from shoal.agent.program.failure import Failure
from shoal.agent.program.running import run
from shoal.agent.program.wire import Item
from shoal.agent.program.world import Change, World

OURS = b"Written by shoal"
DIFF_LINES = 10000


def check_file(item: Item, world: World) -> Change | None:
    path, found = item["path"], file_status(item["path"])
    if not world.dry and os.path.isdir(os.path.dirname(path)):
        remove(temporary_name(path))  # what a killed run left
    if found and stat.S_ISDIR(found.st_mode):
        raise Failure(f"{path} is a directory, and a file is wanted there; move it away: mv {path} {path}.old")
    if not is_secret(item) and item["content"] is None:
        return Change(f"remove {path}") if found else None
    if found is None:
        refuse_unaccepted(item)
        return Change(f"create {path}", _file_diff(item, b"", found, world))
    if not stat.S_ISREG(found.st_mode):
        refuse_unaccepted(item)
        return Change(f"replace {path}, which is not a regular file", _file_diff(item, b"", found, world))
    before = read_bytes(path)
    if not _same_content(item, before):
        refuse_unaccepted(item)
        return Change(f"update {path}", _file_diff(item, before, found, world))
    notes = attribute_change(item, found, world)
    return Change(f"set {notes} on {path}") if notes else None


def refuse_unaccepted(item: Item) -> None:
    """Stop before content is put in place that the program which is to read it would refuse."""
    if not item.get("accepted_by"):
        return
    status, text = run(item["accepted_by"], stdin=_content(item) or b"", timeout=30.0)
    if status not in (0, 127):  # 127: it is not installed yet, and nobody reads the file
        what = telling_line(text, [item]) or f"`{' '.join(item['accepted_by'])}` ended with status {status}"
        raise Failure(f"{what}\n{item['path']} was not changed", advice([item], text))


def make_file(item: Item, world: World) -> str:
    path = item["path"]
    remember(item, world)
    note_unit_change(path, world)
    note = keep_foreign(path) if item.get("keep") else ""
    if not is_secret(item) and item["content"] is None:
        remove(path)
        return note
    ids = owner_ids(item, world)
    assert ids
    data = _content(item)
    if data is None and not (os.path.isfile(path) and _same_content(item, read_bytes(path))):
        raise Failure(f"the value of the secret for {path} was not given")
    write_atomic(path, read_bytes(path) if data is None else data, item["mode"], *ids)
    return note


def remember(item: Item, world: World) -> None:
    """Keep what a file was, for the case that the services which read it do not start with the new one."""
    if item["restarts"] and not is_secret(item):
        found = file_status(item["path"])
        regular = bool(found and stat.S_ISREG(found.st_mode))
        world.replaced.append((item, read_bytes(item["path"]) if regular else None, found if regular else None))


def put_back(path: str, data: bytes | None, found: os.stat_result | None, world: World) -> None:
    note_unit_change(path, world)
    if data is None or found is None:
        remove(path)
    else:
        write_atomic(path, data, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)


def note_unit_change(path: str, world: World) -> None:
    if path.startswith(("/etc/systemd/system/", "/usr/lib/systemd/system/", "/lib/systemd/system/")):
        world.reload_units = True


def keep_foreign(path: str) -> str:
    """Put a file that somebody else wrote aside before ours takes its place; the first one put aside stays."""
    aside, found = path + ".before-shoal", file_status(path)
    if not found or not stat.S_ISREG(found.st_mode) or os.path.exists(aside):
        return ""
    data = read_bytes(path)
    if OURS in data[:200]:
        return ""
    write_atomic(aside, data, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)
    return f"what was there is kept as {aside}"


def is_secret(item: Item) -> bool:
    """Whether the content may be shown to nobody: it is a secret, or one is filled into it."""
    return bool(item.get("secret") or item.get("fills"))


def _content(item: Item) -> bytes | None:
    """The bytes wanted. None for a secret whose value did not travel, or is yet to be made."""
    if not item.get("secret"):
        text: str = item["content"]
        return _filled(text.encode(), item)
    if "content_b64" not in item:
        return None
    from binascii import a2b_base64

    return a2b_base64(item["content_b64"])


def _filled(content: bytes, item: Item) -> bytes | None:
    for word, path in item.get("fills") or ():
        if not file_status(path):
            return None
        content = content.replace(word.encode(), read_bytes(path).strip())
    return content


def _same_content(item: Item, before: bytes) -> bool:
    data = _content(item)
    if data is not None:
        return data == before
    if item.get("fills"):
        return False
    return not item.get("sha256") or item["sha256"] == sha256(before)


def _file_diff(item: Item, before: bytes, found: os.stat_result | None, world: World) -> str:
    if is_secret(item):
        return "(secret)"
    if found and stat.S_ISREG(found.st_mode) and not found.st_mode & 0o004:
        return "(not shown: the file is not world-readable)"
    return difference(item["path"], before, item["content"].encode(), world)


def check_link(item: Item, world: World) -> Change | None:
    path, found = item["path"], file_status(item["path"])
    if found is None:
        return Change(f"link {path} to {item['target']}")
    if not stat.S_ISLNK(found.st_mode):
        return None  # the thing itself is there
    return Change(f"link {path} to {item['target']}") if not os.path.exists(path) else None


def make_link(item: Item, world: World) -> str:
    path = item["path"]
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    remove(temporary_name(path))
    os.symlink(item["target"], temporary_name(path))
    os.rename(temporary_name(path), path)
    return "" if os.path.exists(path) else f"there is no {item['target']} yet"


def check_directory(item: Item, world: World) -> Change | None:
    path = item["path"]
    try:
        found = os.stat(path)  # a link to a directory will do: disks are often joined in that way
    except (FileNotFoundError, NotADirectoryError):
        return Change(f"create directory {path}")
    if not stat.S_ISDIR(found.st_mode):
        raise Failure(f"{path} is not a directory, and one is wanted there; move it away: mv {path} {path}.old")
    notes = attribute_change(item, found, world)
    return Change(f"set {notes} on {path}") if notes else None


def make_directory(item: Item, world: World) -> str:
    ids = owner_ids(item, world)
    assert ids
    refuse_planted(item["path"])
    os.makedirs(item["path"], 0o755, exist_ok=True)
    os.chown(item["path"], *ids)
    os.chmod(item["path"], item["mode"])
    return ""


def refuse_planted(path: str) -> None:
    """Stop where a user's link leads root elsewhere: in a directory that is open to all, anybody can put one."""
    place = ""
    for name in path.strip("/").split("/"):
        place += "/" + name
        try:
            found = os.lstat(place)
        except OSError:
            return
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise Failure(f"{place} is a link that user {found.st_uid} made; remove it, or name another directory")


def check_block(item: Item, world: World) -> Change | None:
    path = os.path.realpath(item["path"])
    before = read_bytes(path) if os.path.exists(path) else b""
    after = with_block(before, item["name"], item["content"], path)
    return (
        Change(f"update block {item['name']} in {path}", difference(path, before, after, world))
        if (before != after)
        else None
    )


def make_block(item: Item, world: World) -> str:
    path = os.path.realpath(item["path"])
    found = file_status(path)
    before = read_bytes(path) if found else b""
    mode, uid, gid = (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) if found else (0o644, 0, 0)
    write_atomic(path, with_block(before, item["name"], item["content"], path), mode, uid, gid)
    return ""


def with_block(before: bytes, name: str, content: str, path: str) -> bytes:
    """The file with our block in it, or without when `content` is empty. Every other byte stays."""
    begin, end = f"# BEGIN shoal {name}\n".encode(), f"# END shoal {name}\n".encode()
    text = content if not content or content.endswith("\n") else content + "\n"
    block = begin + text.encode() + end if text else b""
    start = 0 if before.startswith(begin) else before.find(b"\n" + begin) + 1
    if not before.startswith(begin) and start == 0:
        gap = b"\n" if block and before and not before.endswith(b"\n") else b""
        return before + gap + block
    stop = (before + b"\n").find(b"\n" + end, start)
    if stop < 0:
        raise Failure(
            f"{path} has a line `{begin.decode().strip()}` without its `{end.decode().strip()}`; "
            "remove that line and what belongs to it, and run again"
        )
    return before[:start] + block + before[stop + 1 + len(end) :]


def owner_ids(item: Item, world: World) -> tuple[int, int] | None:
    """The ids of an item's owner and group. None in a dry run when they are still to come."""
    user, group = user_of(item["owner"]), group_of(item["group"])
    if user and group:
        return user.pw_uid, group.gr_gid
    if world.dry:
        return None
    missing = "user " + item["owner"] if not user else "group " + item["group"]
    raise Failure(f"there is no {missing} on this host to own {item['path']}; name it earlier in the document")


def attribute_change(item: Item, found: os.stat_result, world: World) -> str:
    """What has to change about owner, group and mode; "" when nothing has to."""
    ids = owner_ids(item, world)
    if ids is None:
        return f"owner {item['owner']}:{item['group']}"
    notes = []
    if (found.st_uid, found.st_gid) != ids:
        notes.append(f"owner {item['owner']}:{item['group']}")
    if stat.S_IMODE(found.st_mode) != item["mode"]:
        notes.append(f"mode {item['mode']:04o}")
    return ", ".join(notes)


def difference(path: str, before: bytes, after: bytes, world: World) -> str:
    """A unified diff, in a dry run: nobody reads it when the change is made, and it can take long."""
    if not world.dry:
        return ""
    import difflib

    try:
        old, new = before.decode().splitlines(True), after.decode().splitlines(True)
    except UnicodeDecodeError:
        return "(binary)"
    if len(old) + len(new) > DIFF_LINES:
        return f"({len(old)} lines become {len(new)})"
    lines = difflib.unified_diff(old, new, path, path + " (new)")
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)
