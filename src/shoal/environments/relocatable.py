"""Makes an environment work wherever it is moved, copied or mounted: one program, for Python 3.8 and later.

    ENVIRONMENT/bin/python -I -c PROGRAM ENVIRONMENT

What `venv` and pip write names the directory that it was written in: programs in their first line, `activate`, notes on
where packages came from. This goes once they are done. Compiled files may stay: Python puts their paths right when it
loads them. For each file that is bound to a place all the same, as a package brought it so, a line of JSON says to
which.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

FIRST_LINE = b"""#!/usr/bin/env -S sh -c 'exec "$(dirname "$(realpath "$0")")/python" "$0" "$@"'\n"""
"""Starts the Python beside a program. To Python it is a comment, and its length is the same for every path."""
ACTIVATE = {
    "activate": """\
VIRTUAL_ENV=$(realpath "$(dirname "${BASH_SOURCE:-$0}")/..")
[ -e "$VIRTUAL_ENV/pyvenv.cfg" ] || VIRTUAL_ENV="@PLACE@"  # a shell that does not tell what it reads
export VIRTUAL_ENV
""",
    "activate.fish": "set -gx VIRTUAL_ENV (realpath (dirname (status filename))/..)\n",
}
"""What finds the directory in each of them, instead of the line that names it."""
OTHER_SHELLS = ("activate.csh", "Activate.ps1")
"""In these nothing can find it."""
ANYWHERE = (b"/bin/", b"/usr/bin/")
"""Where all hosts have what programs are run by."""


def main() -> int:
    place = Path(sys.argv[1])
    name_the_version(place)
    forget_the_command(place)
    let_activate_find_itself(place)
    correct_records(place, let_programs_find_python(place))
    for path, names in bound(place):
        print(json.dumps([str(path.relative_to(place)), names]))
    return 0


def name_the_version(place: Path) -> None:
    """Lead to `python3.11` of the host, not to `python3`, which may be another one on another host."""
    for link in place.glob("bin/python*"):
        target = Path(os.readlink(link)) if link.is_symlink() else link  # noqa: PTH115 (Python 3.8)
        better = target.with_name("python{}.{}".format(*sys.version_info))
        if link.is_symlink() and target.is_absolute() and better.exists() and better.samefile(target):
            link.unlink()
            link.symlink_to(better)


def forget_the_command(place: Path) -> None:
    """How it was made is noted in `pyvenv.cfg`, and read by nobody."""
    lines = (place / "pyvenv.cfg").read_text().splitlines(keepends=True)
    (place / "pyvenv.cfg").write_text("".join(line for line in lines if not line.startswith("command")))


def let_activate_find_itself(place: Path) -> None:
    for name, finding in ACTIVATE.items():
        path, found = place / "bin" / name, finding.replace("@PLACE@", str(place))
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(found if str(place) in line else line for line in lines))
    for name in OTHER_SHELLS:
        for path in place.glob("bin/" + name):
            path.unlink()


def let_programs_find_python(place: Path) -> list[Path]:
    """The programs that were changed. Those with a long path or blanks in it pip has begun with two lines of sh."""
    python = re.escape(bytes(place / "bin" / "python"))
    head = re.compile(rb"#!(?:%s[^\n]*\n|/bin/sh\n'''exec' \"?%s[^\n]*\n' '''\n)" % (python, python))
    changed = []
    for path in programs(place):
        text = path.read_bytes()
        if head.match(text):
            path.write_bytes(head.sub(lambda _: FIRST_LINE, text, count=1))
            changed.append(path)
    return changed


def correct_records(place: Path, changed: Collection[Path]) -> None:
    """Programs have another hash now. Packages came from files that may go, so where those were is not told."""
    for record in infos(place, "RECORD"):
        with record.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        kept = []
        for name, *rest in rows:
            path = Path(os.path.normpath(record.parent.parent / name))
            if name.endswith(".dist-info/direct_url.json"):
                path.unlink()
            else:
                kept.append([name, *(hash_and_size(path) if path in changed else rest)])
        if kept != rows:
            with record.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(kept)


def hash_and_size(path: Path) -> list[str]:
    text = path.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    return ["sha256=" + digest, str(len(text))]


def bound(place: Path) -> Iterator[tuple[Path, str]]:
    """Files that work only where another one is, and which that is."""
    for path in programs(place):
        first, *_ = path.read_bytes().splitlines() or [b""]
        words = first[2:].split() if first.startswith(b"#!") else []
        if words and not words[0].startswith(ANYWHERE):
            yield path, os.fsdecode(words[0])
    for path in [*programs(place), *infos(place, "*")]:
        if path.is_file() and bytes(place) in path.read_bytes():
            yield path, str(place)
    for path in place.glob("lib/python*/site-packages/*.pth"):
        for line in path.read_bytes().splitlines():
            if line.startswith(b"/"):
                yield path, os.fsdecode(line)


def programs(place: Path) -> list[Path]:
    files = [path for path in place.glob("bin/*") if path.is_file() and not path.is_symlink()]
    return sorted(path for path in files if path.name not in ACTIVATE)


def infos(place: Path, name: str) -> list[Path]:
    """Files of that name that tell of packages."""
    return sorted(place.glob("lib/python*/site-packages/*.dist-info/" + name))


if __name__ == "__main__":
    sys.exit(main())
