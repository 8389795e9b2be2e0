"""Reads a job's files on one node and prints them.

    log_reader.py DIRECTORY OUTPUT ERROR TAIL [follow]

Each line out is `FILE<tab>TIME TEXT`, where FILE is `rank-R.N.node`, `rank-R.N.log`, `rank-R.N.end`, or
`output@STORAGE` and `error@STORAGE` for those of the batch script: every turn of a job appends to these on the node it
starts on, and only where nodes share storage is it the same file. The node of a rank comes before what it printed. With
TAIL above 0 only the last so many bytes of each file are read. With `follow` it goes on until its input ends or says
something.
"""

from __future__ import annotations

import os
import select
import sys
from typing import Iterator


def main(directory: str, output: str, error: str, tail: int, follow: bool) -> None:
    at: dict[str, int] = {}
    while True:
        for name, path in sorted(
            files(directory, output, error), key=lambda file: (not file[0].endswith(".node"), file)
        ):
            read(name, path, tail, at, last=not follow)
        sys.stdout.buffer.flush()
        if not follow:
            return
        ready, _, _ = select.select([0], [], [], 0.3)
        if ready:
            follow = False  # one last look


def files(directory: str, output: str, error: str) -> Iterator[tuple[str, str]]:
    for name, path in (("output@", output), ("error@", error if error != output else "")):
        if os.path.isfile(path):
            yield name + storage(path, os.path.dirname(directory)), path
    try:
        for name in os.listdir(directory):
            if name.startswith("rank-") and name.endswith((".node", ".log", ".end")):
                yield name, os.path.join(directory, name)
    except OSError:
        return


def storage(path: str, root: str) -> str:
    """A name of the storage that a file is on, the same on all nodes that share it: below `root` its own number."""
    try:
        if not path.startswith(root + "/"):
            return "inode-%d" % os.stat(path).st_ino
        with open(os.path.join(root, ".id")) as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def read(name: str, path: str, tail: int, at: dict[str, int], last: bool) -> None:
    """Print what is new in a file: whole lines, the rest of one only when nothing more will come."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            start = at.get(name, max(0, size - tail) if tail else 0)
            stamp = b"%.6f " % status.st_mtime if "@" in name else b""
            file.seek(start)
            data = file.read(size - start)
    except OSError:
        return
    end = data.rfind(b"\n") + 1
    if last and end < len(data):
        data += b"\n"
        end = len(data)
    lines = data[:end].split(b"\n")[:-1]
    if start and name not in at:
        lines = lines[1:]  # the tail begins inside of a line
    at[name] = start + min(end, size - start)
    for line in lines:
        sys.stdout.buffer.write(name.encode() + b"\t" + stamp + line + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:] == ["follow"])
