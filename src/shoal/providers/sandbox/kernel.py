"""Kernel settings of the machine that sandbox hosts take: raised with the first cluster, put back with the last."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.providers.sandbox.layout import write_atomic

PROC = Path("/proc/sys")
NEEDED = {
    "net/ipv4/ip_forward": 1,
    # Every host's systemd counts against root's share of these; 128, a usual default, is enough for twenty hosts.
    "fs/inotify/max_user_instances": 4096,
    "fs/inotify/max_user_watches": 262144,
}
BEFORE = Path("/run/shoal-kernel-settings")
"""What the settings were before the first cluster."""


def raise_settings(proc: Path = PROC, before: Path = BEFORE) -> None:
    """Raise what is too low, and remember what it was. The caller holds the machine's lock."""
    found = {name: int((proc / name).read_text()) for name in NEEDED}
    if not before.exists():
        write_atomic(before, json.dumps(found))
    for name, value in NEEDED.items():
        if found[name] < value:
            (proc / name).write_text(f"{value}\n")


def restore_settings(proc: Path = PROC, before: Path = BEFORE) -> None:
    """Put back what was there. A setting that somebody else has changed meanwhile stays."""
    if not before.exists():
        return
    for name, value in json.loads(before.read_text()).items():
        if name in NEEDED and value < NEEDED[name] == int((proc / name).read_text()):
            (proc / name).write_text(f"{value}\n")
    before.unlink()
