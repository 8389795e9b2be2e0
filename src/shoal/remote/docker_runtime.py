#!/usr/bin/python3 -ISB
# Written by shoal; changes here are lost.
"""The runtime of Docker in jobs: runc, with no device in a container's files.

An image may have device nodes of any mode. The container's cgroup denies them to what runs in it, but a process of the
job that is not in it reaches them by /proc/PID/root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

OPTIONS = {os.ST_RDONLY: "ro", os.ST_NOSUID: "nosuid", os.ST_NODEV: "nodev", os.ST_NOEXEC: "noexec"}


def main(arguments: list[str]) -> None:
    if "--bundle" in arguments:
        confine(arguments[arguments.index("--bundle") + 1])
    os.execvp("runc", ["runc", *arguments])


def confine(bundle: str) -> None:
    path = os.path.join(bundle, "config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    root = os.path.join(bundle, config["root"]["path"])
    if "nodev" not in options_of(root):
        # runc mounts it once more, with the options that it has.
        subprocess.run(["mount", "-o", "remount,bind,nodev", root], check=True)
    for mount in config.get("mounts", ()):
        options = mount.setdefault("options", [])
        if mount.get("type") == "bind" or "bind" in options or "rbind" in options:
            # In a user namespace runc may not take away those that the source has.
            options += {**dict.fromkeys(options_of(mount["source"])), "nodev": None}
        elif mount.get("type") == "tmpfs" and mount["destination"] != "/dev":
            options.append("nodev")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file)


def options_of(path: str) -> list[str]:
    flags = os.statvfs(path).f_flag
    return [name for flag, name in OPTIONS.items() if flags & flag]


if __name__ == "__main__":
    main(sys.argv[1:])
