"""Mounts that are there now and after a reboot. Nothing here looks into a share: its server may be away."""

from __future__ import annotations

import errno
import os

from shoal.remote.agent.context import ConvergeContext, Item, ItemChange, has_systemd
from shoal.remote.agent.file_io import block_marks, read_text, remove, write_atomic
from shoal.remote.agent.files import make_block
from shoal.remote.agent.running import Failure, run, run_checked, which
from shoal.remote.agent.services import reload_systemd, unit_log

UNITS = "/etc/systemd/system/"
FIRST_MOUNT_TIMEOUT_S = 60.0


def check_mount(item: Item, context: ConvergeContext) -> ItemChange | None:
    mount_point, mounted = item["where"], is_mounted(item["where"])
    path, text = mount_record(item)
    before = recorded(item, path)
    if not item["mounted"]:
        return ItemChange(f"unmount {mount_point}") if before or (mounted and not item.get("automount")) else None
    if item.get("automount") and not before:
        reject_hidden_files(mount_point, mounted)
    if before != text or not mounted or is_dead(item):
        return ItemChange(f"mount {item['what']} on {mount_point}")
    return None


def reject_hidden_files(where: str, mounted: bool) -> None:
    """Stop before a share hides what is there."""
    if mounted:
        raise Failure(f"something else is mounted on {where}; unmount it, or give the share another path")
    inside = sorted(os.listdir(where)) if os.path.isdir(where) else []
    if inside and inside != ["lost+found"]:
        names = ", ".join(inside[:3]) + (", ..." if len(inside) > 3 else "")
        people = [name for name in inside if os.path.exists(f"{where}/{name}/.ssh/authorized_keys")]
        fix = f"Move them away (mv {where} {where}.old), or give the share another path"
        if people:
            # The share would hide their keys, also those of who comes to repair it.
            other = "Give the share another path: homes may be on any, such as /homes with `homes: true`"
            fix = f"{', '.join(people)} could no longer log in. {other}"
        raise Failure(f"{where} has files here that the share would hide: {names}. {fix}")


def make_mount(item: Item, context: ConvergeContext) -> str:
    if item.get("automount") and has_systemd():
        return make_automount(item, context)
    mount_point, (path, text) = item["where"], mount_record(item)
    unit = os.path.basename(path)
    unchanged = recorded(item, path) == text
    if not item["mounted"] or not unchanged:
        if is_mounted(mount_point):
            # A directory that is shown in a second place: who has files of it open keeps them.
            lazy = ["--lazy"] if item["fstype"] == "none" else []
            run_checked(
                ["umount", *lazy, "--", mount_point],
                f"cannot unmount {mount_point}; end what uses it (fuser -vm {mount_point})",
            )
        if has_systemd() and os.path.exists(path):
            run(["systemctl", "disable", "--no-reload", "--", unit])
    if not has_systemd():
        make_block({"path": path, "name": "mount " + mount_point, "content": text if item["mounted"] else ""}, context)
        if item["mounted"] and not is_mounted(mount_point):
            os.makedirs(mount_point, 0o755, exist_ok=True)
            argv = ["mount", "-t", item["fstype"], "-o", all_options(item), "--", item["what"], mount_point]
            run_checked(argv, "could not mount " + mount_point)
        return ""
    if not item["mounted"]:
        remove(path)
    elif not unchanged:
        write_atomic(path, text.encode(), 0o644, 0, 0)
    reload_systemd(context)
    if item["mounted"]:
        os.makedirs(mount_point, 0o755, exist_ok=True)
        run_checked(["systemctl", "enable", "--no-reload", "--", unit], "could not enable " + unit)
        status, text = run(["systemctl", "start", "--", unit], timeout=120.0)
        if status:
            raise Failure(f"could not mount {item['what']} on {mount_point}\n{unit_log(unit, text)}")
    return ""


def make_automount(item: Item, context: ConvergeContext) -> str:
    """A share. Who has files of it open keeps them when it goes or changes; who looks next sees the new one."""
    mount_point, (path, text) = item["where"], mount_record(item)
    name = unit_name(mount_point)
    unchanged = recorded(item, path) == text
    watched = can_automount()
    unit = name + (".automount" if watched else ".mount")
    # Without --no-reload both verbs have systemd read all its units again, in addition to the reload below.
    flags = ["--no-reload", *(["--now"] if watched else [])]
    if not item["mounted"] or not unchanged:
        run(["systemctl", "disable", *flags, "--", unit], timeout=30.0)
    if not item["mounted"] or not unchanged or is_dead(item):
        while is_mounted(mount_point):
            run_checked(
                ["umount", "--lazy", "--no-canonicalize", "--", mount_point], f"could not unmount {mount_point}"
            )
    if not item["mounted"]:
        for kind in (".automount", ".mount"):
            remove(UNITS + name + kind)
        reload_systemd(context)
        run(["systemctl", "reset-failed", "--", name + ".mount"])
        try:
            os.rmdir(mount_point)
        except OSError:
            pass  # not ours, or not empty
        return ""
    if not unchanged:
        os.makedirs(mount_point, 0o755, exist_ok=True)
        mount, _, automount = text.partition(UNIT_SEPARATOR)
        write_atomic(UNITS + name + ".mount", mount.encode(), 0o644, 0, 0)
        if watched:
            write_atomic(UNITS + name + ".automount", automount.encode(), 0o644, 0, 0)
        else:
            remove(UNITS + name + ".automount")
        reload_systemd(context)
    run_checked(["systemctl", "enable", *flags, "--", unit], "could not enable " + unit)
    status, text = run(["systemctl", "start", "--", name + ".mount"], timeout=FIRST_MOUNT_TIMEOUT_S)
    if status:
        raise Failure(f"could not mount {item['what']} on {mount_point}\n{unit_log(name + '.mount', text)}")
    return ""


WANTED = "\n[Install]\nWantedBy=multi-user.target\n"
UNIT_SEPARATOR = "\n# .automount\n"
"""Between the two units of a share, where their texts are compared as one."""


def mount_record(item: Item) -> tuple[str, str]:
    """Where a mount is written down for the next boot, and how: a systemd unit, or a block in fstab."""
    item = {**item, "options": all_options(item)}
    if not has_systemd():
        return "/etc/fstab", "{what} {where} {fstype} {options} 0 0\n".format(**item)
    fields = {name: item[name].replace("%", "%%") for name in ("what", "where", "fstype", "options")}
    text = "# Made by shoal\n[Mount]\nWhat={what}\nWhere={where}\nType={fstype}\nOptions={options}\n".format(**fields)
    path = f"{UNITS}{unit_name(item['where'])}.mount"
    if item.get("automount"):
        # No limit: readers of the share wait for as long as its server is away.
        after = "[Unit]\nWants=network-online.target\nAfter=network-online.target\n\n"
        text = text.replace("[Mount]", after + "[Mount]") + "TimeoutSec=infinity\n"
        if not can_automount():
            return path, text + WANTED
        watch = f"# Made by shoal\n[Automount]\nWhere={fields['where']}\n\n[Install]\nWantedBy=remote-fs.target\n"
        return path, text + UNIT_SEPARATOR + watch
    return path, text + WANTED


def all_options(item: Item) -> str:
    """Its options, and the one for releases that have it, where this one does."""
    options: str = item["options"]
    option: str = item.get("if_known") or ""
    program = which(item["fstype"].rpartition(".")[2]) if option else None
    if program is None:
        return options
    version = program, os.stat(program).st_mtime_ns
    if version not in HELP:
        HELP[version] = run([program, "--help"], timeout=10.0)[1]
    return options + "," + option if "-o " + option in HELP[version] else options


HELP: dict[tuple[str, int], str] = {}
"""The help text of programs, read once for all the homes of a host."""


def can_automount() -> bool:
    """Whether systemd can mount on first access. In a container it often cannot, and mounts at start."""
    return os.path.exists("/dev/autofs")


def recorded(item: Item, path: str) -> str:
    if has_systemd():
        text = read_text(path)
        watch = read_text(path[: -len(".mount")] + ".automount") if item.get("automount") else ""
        return text + UNIT_SEPARATOR + watch if text and watch else text
    begin, end = block_marks(f"mount {item['where']}")
    _, present, block = read_text(path).partition(begin + "\n")
    return block.partition(end)[0] if present else ""


def unit_name(path: str) -> str:
    """A path as systemd names its units: `/srv/my-data` is `srv-my\\x2ddata`."""
    plain = path.strip("/")
    escaped = "".join(
        "-" if c == "/" else c if c.isascii() and (c.isalnum() or c in ":_.") and not (c == "." and i == 0)
        else "".join(f"\\x{byte:02x}" for byte in c.encode())
        for i, c in enumerate(plain)
    )  # fmt: skip
    return escaped or "-"


def is_dead(item: Item) -> bool:
    """Whether the program behind a mount has ended. One that waits for its server has not."""
    if not item["fstype"].startswith("fuse") or not is_mounted(item["where"]):
        return False
    status, output = run(["stat", "--file-system", "--", item["where"]], timeout=2.0)
    return status == 1 and os.strerror(errno.ENOTCONN) in output


def is_mounted(where: str) -> bool:
    escaped = where.rstrip("/").replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
    return any(line.split()[4] == (escaped or "/") for line in read_text("/proc/self/mountinfo").splitlines())
