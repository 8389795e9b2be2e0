#!/usr/bin/python3 -ISB
"""A stand-in for nvidia-smi on sandbox hosts: answers -L and --query-gpu from /etc/shoal-gpus. Stands alone.

Each line of that file is `index, uuid, name, memory in MiB`, and may end with the version of the driver.
"""

# It runs in every round of facts on every host, so it imports next to nothing and starts without `site`.
from __future__ import annotations

import os
import sys

FIELDS = ("index", "uuid", "name", "memory.total", "driver_version")
DRIVER = "580.95.05"


def main(arguments: list[str]) -> int:
    path = os.environ.get("SHOAL_GPUS", "/etc/shoal-gpus")
    lines: list[str] = []
    if os.path.exists(path):
        with open(path) as file:
            lines = file.read().splitlines()
    gpus = [dict(zip(FIELDS, [*line.split(", "), DRIVER])) for line in lines if line]
    if not gpus:
        print("No devices were found")
        return 6
    if arguments in (["-L"], ["--list-gpus"]):
        for gpu in gpus:
            print("GPU {index}: {name} (UUID: {uuid})".format(**gpu))
        return 0
    options = dict(argument.partition("=")[::2] for argument in arguments)
    query = options.pop("--query-gpu", "")
    form = options.pop("--format", "").split(",")
    if not query or options or form[0] != "csv":
        print("Sandbox nvidia-smi knows -L and --query-gpu=FIELDS --format=csv[,noheader][,nounits]", file=sys.stderr)
        return 2
    fields = [name.strip() for name in query.split(",")]
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        print(f'Field "{unknown[0]}" is not a valid field to query.')
        return 2
    if "noheader" not in form:
        print(", ".join(name + (" [MiB]" if name == "memory.total" else "") for name in fields))
    unit = "" if "nounits" in form else " MiB"
    for gpu in gpus:
        print(", ".join(gpu[name] + (unit if name == "memory.total" else "") for name in fields))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
