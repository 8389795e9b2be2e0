"""Files, links, directories, and blocks in files that others write to as well."""

from __future__ import annotations

import os
import stat

from shoal.remote.agent.context import WRITTEN, ConvergeContext, Item, ItemChange, clear_due, record_due
from shoal.remote.agent.fast_stdlib import dumps
from shoal.remote.agent.file_io import (
    block_marks,
    file_status,
    read_bytes,
    read_text,
    remove,
    sha256,
    temporary_name,
    write_atomic,
    write_problem,
)
from shoal.remote.agent.running import Failure, advice, most_relevant_line, run, run_checked, which
from shoal.remote.agent.unix_accounts import group_of, user_of

WRITTEN_BY_SHOAL = b"Written by shoal"
DIFF_LINES = 10000
KEPT_DIGESTS = 4
"""Of each file: a run that failed or was killed may have left an older one."""


def check_file(item: Item, context: ConvergeContext) -> ItemChange | None:
    path, status = item["path"], file_status(item["path"])
    if not context.dry and os.path.isdir(os.path.dirname(path)):
        remove(temporary_name(path))  # what a killed run left
    if status and stat.S_ISDIR(status.st_mode):
        raise Failure(f"{path} is a directory, and a file is wanted there; move it away: mv {path} {path}.old")
    if not is_secret(item) and item["content"] is None:
        return ItemChange(f"remove {path}", edited=is_edited(path, context)) if status else None
    before = read_bytes(path) if status and stat.S_ISREG(status.st_mode) else None
    if status is None or before is None or not _same_content(item, before):
        reject_invalid_content(item)
        action = f"update {path}" if status else f"create {path}"
        if status and before is None:
            action = f"replace {path}, which is not a regular file"
        edited = not is_secret(item) and is_edited(path, context)
        return ItemChange(action, _file_diff(item, before or b"", status, context), edited)
    return attribute_change(item, status, context)


def reject_invalid_content(item: Item) -> None:
    """Stop before content is put in place that the program which is to read it would refuse."""
    if not item.get("accepted_by"):
        return
    status, text = run(item["accepted_by"], stdin=decode_content(item) or b"", timeout=30.0)
    if status not in (0, 127):  # 127: the program is not installed yet
        what = most_relevant_line(text, [item]) or f"`{' '.join(item['accepted_by'])}` ended with status {status}"
        raise Failure(f"{what}\n{item['path']} was not changed", advice([item], text))


def make_file(item: Item, context: ConvergeContext) -> str:
    path = item["path"]
    remember(item, context)
    note_unit_change(path, context)
    note = keep_foreign(path) if item.get("keep") else ""
    if not is_secret(item) and is_edited(path, context):
        note = keep_edited(path, context)
    if not is_secret(item) and item["content"] is None:
        remove(path)
        return note
    ids = owner_ids(item, context)
    assert ids
    data = decode_content(item)
    if data is None and not (os.path.isfile(path) and _same_content(item, read_bytes(path))):
        raise Failure(f"the value of the secret for {path} was not given")
    write_atomic(path, read_bytes(path) if data is None else data, item["mode"], *ids)
    return note


def remember(item: Item, context: ConvergeContext) -> None:
    """Keep what a file was, for the case that the services which read it do not start with the new one."""
    if item["restarts"] and not is_secret(item):
        status = file_status(item["path"])
        regular = bool(status and stat.S_ISREG(status.st_mode))
        context.replaced.append((item, read_bytes(item["path"]) if regular else None, status if regular else None))


def put_back(path: str, data: bytes | None, status: os.stat_result | None, context: ConvergeContext) -> None:
    note_unit_change(path, context)
    if data is None or status is None:
        remove(path)
    else:
        write_atomic(path, data, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)


def note_unit_change(path: str, context: ConvergeContext) -> None:
    if path.startswith(("/etc/systemd/system/", "/usr/lib/systemd/system/", "/lib/systemd/system/")):
        context.changed_units.add(path)
        context.known_units = {}


def keep_foreign(path: str) -> str:
    """Keep a copy of a file that Shoal did not write, before it is replaced; the first copy stays."""
    backup, status = path + ".before-shoal", file_status(path)
    if not status or not stat.S_ISREG(status.st_mode) or os.path.exists(backup):
        return ""
    data = read_bytes(path)
    if WRITTEN_BY_SHOAL in data[:200]:
        return ""
    write_atomic(backup, data, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
    return f"what was there is kept as {backup}"


def is_edited(path: str, context: ConvergeContext) -> bool:
    """Whether somebody else has changed a file since an agent wrote it."""
    status = file_status(path)
    digests = context.written.get(path)
    if not digests or not status or not stat.S_ISREG(status.st_mode):
        return False
    return sha256(read_bytes(path)) not in digests


def keep_edited(path: str, context: ConvergeContext) -> str:
    """Keep a copy of a file that was edited by hand. Not beside it: some programs read all files of a directory."""
    import time

    backup = f"{context.state}/edited{path}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    os.makedirs(os.path.dirname(backup), 0o700, exist_ok=True)
    write_atomic(backup, read_bytes(path), 0o600, os.geteuid(), os.getegid())
    return f"it was edited by hand; a copy is kept as {backup}"


def record_written(context: ConvergeContext) -> None:
    """Record the digests of the files that a run is about to write. It may be killed at any moment."""
    new = {
        item["path"]: sha256(decode_content(item) or b"")
        for item in context.items
        if item["kind"] == "file" and not is_secret(item) and item["content"] is not None
    }
    due = {path: digest for path, digest in new.items() if digest not in context.written.get(path, ())}
    if due:
        for path, digest in due.items():
            context.written[path] = [*context.written.get(path, ()), digest][-KEPT_DIGESTS:]
        data = dumps(context.written).encode()
        write_atomic(context.state + WRITTEN, data, 0o600, os.geteuid(), os.getegid())


def is_secret(item: Item) -> bool:
    """Whether the content must not be shown: it is a secret, or one is filled into it."""
    return bool(item.get("secret") or item.get("fills"))


def decode_content(item: Item) -> bytes | None:
    """The bytes wanted. None for a secret whose value did not travel, or is yet to be made."""
    if "data" in item:
        data: bytes = item["data"]
        return data
    if "content_b64" not in item:
        return None if item.get("secret") else _fill_template(item["content"].encode(), item)
    from binascii import a2b_base64

    return a2b_base64(item["content_b64"])


def _fill_template(content: bytes, item: Item) -> bytes | None:
    for word, path in item.get("fills") or ():
        if not file_status(path):
            return None
        content = content.replace(word.encode(), read_bytes(path).strip())
    return content


def _same_content(item: Item, before: bytes) -> bool:
    data = decode_content(item)
    if data is not None:
        return data == before
    if item.get("fills"):
        return False
    return not item.get("sha256") or item["sha256"] == sha256(before)


def _file_diff(item: Item, before: bytes, status: os.stat_result | None, context: ConvergeContext) -> str:
    if is_secret(item):
        return "(secret)"
    is_closed = status and stat.S_ISREG(status.st_mode) and not status.st_mode & 0o004
    if is_closed or not item["mode"] & 0o004:
        return "(not shown: the file is not world-readable)"
    return difference(item["path"], before, decode_content(item) or b"", context)


def check_link(item: Item, context: ConvergeContext) -> ItemChange | None:
    path, status = item["path"], file_status(item["path"])
    if status and (not stat.S_ISLNK(status.st_mode) or os.path.exists(path)):
        return None  # the thing itself is there, or a link to it
    return ItemChange(f"link {path} to {item['target']}")


def make_link(item: Item, context: ConvergeContext) -> str:
    path = item["path"]
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    remove(temporary_name(path))
    os.symlink(item["target"], temporary_name(path))
    os.rename(temporary_name(path), path)
    return "" if os.path.exists(path) else f"there is no {item['target']} yet"


def check_directory(item: Item, context: ConvergeContext) -> ItemChange | None:
    path = item["path"]
    if item.get("writable") and (problem := write_problem(path)):
        raise Failure(f"{path} cannot be written: {problem}", f"make room, or make {path} writable")
    try:
        status = os.stat(path)  # a link to a directory will do: disks are often joined in that way
    except (FileNotFoundError, NotADirectoryError):
        return ItemChange(f"create directory {path}")
    if not stat.S_ISDIR(status.st_mode):
        raise Failure(f"{path} is not a directory, and one is wanted there; move it away: mv {path} {path}.old")
    return attribute_change(item, status, context)


def make_directory(item: Item, context: ConvergeContext) -> str:
    ids = owner_ids(item, context)
    assert ids
    reject_planted_links(item["path"])
    os.makedirs(item["path"], 0o755, exist_ok=True)
    os.chown(item["path"], *ids)
    os.chmod(item["path"], item["mode"])
    return ""


def reject_planted_links(path: str) -> None:
    """Stop at a symbolic link that a user made: in a world-writable directory it could lead root elsewhere."""
    place = ""
    for name in path.strip("/").split("/"):
        place += "/" + name
        try:
            status = os.lstat(place)
        except OSError:
            return
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            raise Failure(f"{place} is a link that user {status.st_uid} made; remove it, or name another directory")


def check_block(item: Item, context: ConvergeContext) -> ItemChange | None:
    path = os.path.realpath(item["path"])
    before = read_bytes(path) if os.path.exists(path) else b""
    after = with_block(before, item["name"], item["content"], path)
    if before == after:
        return None
    return ItemChange(f"update block {item['name']} in {path}", difference(path, before, after, context))


def make_block(item: Item, context: ConvergeContext) -> str:
    path = os.path.realpath(item["path"])
    status = file_status(path)
    before = read_bytes(path) if status else b""
    mode, uid, gid = (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) if status else (0o644, 0, 0)
    write_atomic(path, with_block(before, item["name"], item["content"], path), mode, uid, gid)
    return ""


def with_block(before: bytes, name: str, content: str, path: str) -> bytes:
    """The file with our block in it, or without when `content` is empty. Every other byte stays."""
    begin, end = (f"{mark}\n".encode() for mark in block_marks(name))
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


def owner_ids(item: Item, context: ConvergeContext) -> tuple[int, int] | None:
    """The ids of an item's owner and group. None in a dry run when they are still to come."""
    user, group = user_of(item["owner"]), group_of(item["group"])
    if user and group:
        return user.pw_uid, group.gr_gid
    if context.dry:
        return None
    missing = "user " + item["owner"] if not user else "group " + item["group"]
    raise Failure(f"there is no {missing} on this host to own {item['path']}; name it earlier in the document")


def attribute_change(item: Item, status: os.stat_result, context: ConvergeContext) -> ItemChange | None:
    """What has to change about owner, group and mode; None when nothing has to."""
    ids, notes = owner_ids(item, context), []
    if (status.st_uid, status.st_gid) != ids:
        notes.append(f"owner {item['owner']}:{item['group']}")
    if ids and stat.S_IMODE(status.st_mode) != item["mode"]:
        notes.append(f"mode {item['mode']:04o}")
    return ItemChange(f"set {', '.join(notes)} on {item['path']}") if notes else None


def difference(path: str, before: bytes, after: bytes, context: ConvergeContext) -> str:
    """A unified diff, in a dry run only: it can take long, and an applied change does not show it."""
    if not context.dry:
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


def check_secret(item: Item, context: ConvergeContext) -> ItemChange | None:
    path, status = item["path"], file_status(item["path"])
    if status is None or not status.st_size:
        return ItemChange(f"make the secret {path}", "(secret)")
    if not stat.S_ISREG(status.st_mode):
        raise Failure(f"{path} is not a regular file, and a secret is wanted there; move it away: mv {path} {path}.old")
    return attribute_change(item, status, context)


def make_secret(item: Item, context: ConvergeContext) -> str:
    path, status = item["path"], file_status(item["path"])
    ids = owner_ids(item, context)
    assert ids
    data = read_bytes(path) if status and status.st_size else random_line(item["digits"])
    write_atomic(path, data, item["mode"], *ids)
    return ""


def random_line(digits: int) -> bytes:
    """A line of random hexadecimal digits: text that needs no quoting anywhere."""
    return os.urandom((digits + 1) // 2).hex()[:digits].encode() + b"\n"


def check_device_rule(item: Item, context: ConvergeContext) -> ItemChange | None:
    path = rule_file(item)
    before = read_text(path)
    if before == item["content"] and "udev" not in context.due:
        return None
    action = ("update" if item["content"] else "remove") if before else "create"
    return ItemChange(f"{action} {path}", difference(path, before.encode(), item["content"].encode(), context))


def make_device_rule(item: Item, context: ConvergeContext) -> str:
    record_due(context, {"udev": item["key"]})
    if item["content"]:
        write_atomic(rule_file(item), item["content"].encode(), 0o644, 0, 0)
    else:
        remove(rule_file(item))
    udev_runs = which("udevadm") and os.path.exists("/run/udev/control")
    if udev_runs:
        run_checked(["udevadm", "control", "--reload"], "could not reload the device rules")
        run_checked(["udevadm", "trigger"], "could not apply the device rules")
    clear_due(context, "udev")
    return "" if udev_runs else "udev does not run here; the rule waits for a boot that has it"


def rule_file(item: Item) -> str:
    return f"/etc/udev/rules.d/{item['name']}.rules"


FILE_KINDS = {
    "file": (check_file, make_file),
    "secret": (check_secret, make_secret),
    "link": (check_link, make_link),
    "directory": (check_directory, make_directory),
    "block": (check_block, make_block),
    "device_rule": (check_device_rule, make_device_rule),
}
