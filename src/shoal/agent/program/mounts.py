"""Mounts that are there now and after a reboot."""

from __future__ import annotations

import os

from shoal.agent.program.disk import read_bytes, read_text, remove, write_atomic
from shoal.agent.program.failure import Failure
from shoal.agent.program.files import with_block
from shoal.agent.program.running import must, run
from shoal.agent.program.services import unit_log
from shoal.agent.program.systemd import has_systemd
from shoal.agent.program.wire import Item
from shoal.agent.program.world import Change, World


def check_mount(item: Item, world: World) -> Change | None:
    where, mounted = item["where"], is_mounted(item["where"])
    path, text = mount_record(item)
    if not item["mounted"]:
        return Change(f"unmount {where}") if mounted or recorded(item, path) else None
    if recorded(item, path) != text:
        return Change(f"mount {item['what']} on {where}")
    return None if mounted else Change(f"mount {item['what']} on {where}")


def make_mount(item: Item, world: World) -> str:
    where, (path, text) = item["where"], mount_record(item)
    unit = os.path.basename(path)
    same = recorded(item, path) == text
    if not item["mounted"] or not same:
        if is_mounted(where):
            must(["umount", "--", where], f"could not unmount {where}; end what uses it (fuser -vm {where})")
        if has_systemd() and os.path.exists(path):
            run(["systemctl", "disable", "--", unit])
    if not has_systemd():
        _, uid, gid = 0, os.geteuid(), os.getegid()
        before = read_bytes(path) if os.path.exists(path) else b""
        write_atomic(path, with_block(before, "mount " + where, text if item["mounted"] else "", path), 0o644, uid, gid)
        if item["mounted"] and not is_mounted(where):
            os.makedirs(where, 0o755, exist_ok=True)
            must(
                ["mount", "-t", item["fstype"], "-o", item["options"], "--", item["what"], where],
                "could not mount " + where,
            )
        return ""
    if not item["mounted"]:
        remove(path)
    elif not same:
        write_atomic(path, text.encode(), 0o644, 0, 0)
    must(["systemctl", "daemon-reload"], "could not reload systemd's units")
    if item["mounted"]:
        os.makedirs(where, 0o755, exist_ok=True)
        must(["systemctl", "enable", "--", unit], "could not enable " + unit)
        status, text = run(["systemctl", "start", "--", unit], timeout=120.0)
        if status:
            raise Failure(f"could not mount {item['what']} on {where}\n{unit_log(unit, text)}")
    return ""


def mount_record(item: Item) -> tuple[str, str]:
    """Where a mount is written down for the next boot, and how: a systemd unit, or a block in fstab."""
    if not has_systemd():
        return "/etc/fstab", "{what} {where} {fstype} {options} 0 0\n".format(**item)
    fields = {name: item[name].replace("%", "%%") for name in ("what", "where", "fstype", "options")}
    text = "# Made by shoal\n[Mount]\nWhat={what}\nWhere={where}\nType={fstype}\nOptions={options}\n".format(**fields)
    return f"/etc/systemd/system/{unit_name(item['where'])}.mount", text + "\n[Install]\nWantedBy=multi-user.target\n"


def recorded(item: Item, path: str) -> str:
    if has_systemd():
        return read_text(path)
    _, begin, rest = read_text(path).partition(f"# BEGIN shoal mount {item['where']}\n")
    return rest.partition("# END shoal mount")[0] if begin else ""


def unit_name(path: str) -> str:
    """A path as systemd names its units: `/srv/my-data` is `srv-my\\x2ddata`."""
    plain = path.strip("/")
    named = "".join(
        "-" if c == "/" else c if c.isascii() and (c.isalnum() or c in ":_.") and not (c == "." and i == 0)
        else "".join(f"\\x{byte:02x}" for byte in c.encode())
        for i, c in enumerate(plain)
    )  # fmt: skip
    return named or "-"


def is_mounted(where: str) -> bool:
    escaped = where.rstrip("/").replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
    return any(line.split()[4] == (escaped or "/") for line in read_text("/proc/self/mountinfo").splitlines())
