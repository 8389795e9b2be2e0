"""Which control groups Slurm can use on this host. Nothing but trying tells."""

from __future__ import annotations

import os
import struct

from shoal.agent.program.disk import read_text
from shoal.agent.program.wire import Item

BASE = "/sys/fs/cgroup"
BPF_CALL = {"x86_64": 321, "aarch64": 280}
"""The number of the system call bpf(2)."""
PROG_LOAD, CGROUP_DEVICE = 5, 15
ALLOW_ALL = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 1, 0x95, 0, 0, 0)
"""The shortest program there is: return 1."""


def cgroup() -> Item:
    if os.path.exists(BASE + "/cgroup.controllers"):
        return {"version": 2, "writable": unified() if can_group(BASE) else []}
    try:
        names = [name for name in sorted(os.listdir(BASE)) if os.path.exists(f"{BASE}/{name}/cgroup.procs")]
    except OSError:
        names = []
    controllers = [name for name in names if name not in ("systemd", "unified")]
    return {
        "version": 1 if controllers else 0,
        "writable": [name for name in controllers if can_group(BASE + "/" + name)],
    }


def unified() -> list[str]:
    """The controllers, and `devices` where they are confined: there it is a program of the kernel's that does it."""
    devices = ["devices"] if may_load_device_programs() else []
    return [*read_text(BASE + "/cgroup.controllers").split(), *devices]


def can_group(folder: str) -> bool:
    """Whether a control group can be made here."""
    probe = f"{folder}/shoal-probe-{os.getpid()}"
    try:
        os.mkdir(probe)
        os.rmdir(probe)
    except OSError:
        return False
    return True


def may_load_device_programs() -> bool:
    """Whether the kernel takes a program that decides over devices. It may refuse those of containers."""
    import ctypes  # slow to load, and only cgroup v2 takes it

    number = BPF_CALL.get(os.uname().machine)
    if number is None:
        return True  # not seen to be refused
    program, license = ctypes.create_string_buffer(ALLOW_ALL), ctypes.create_string_buffer(b"GPL")
    wanted = struct.pack(
        "=IIQQ", CGROUP_DEVICE, len(ALLOW_ALL) // 8, ctypes.addressof(program), ctypes.addressof(license)
    )
    attributes = ctypes.create_string_buffer(wanted, 128)
    handle = ctypes.CDLL(None).syscall(number, PROG_LOAD, attributes, ctypes.sizeof(attributes))
    if handle < 0:
        return False
    os.close(handle)
    return True
