"""Completes an environment that uv has installed, run by the environment's own Python.

    environment_files.py PATH < FILES

FILES is a JSON object: text by path, to put beside the packages. The program repairs the environment's programs, writes
these files, and prints a JSON object: `torch` and `cuda`, the versions of these; `bound`, files that work in one place
only.
"""

from __future__ import annotations

import base64
import compileall
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

UV_HEADER = re.compile(rb"#!/bin/sh\n(?:#[^\n]*coding[^\n]*\n)?'''exec' \"\$\(dirname [^\n]*\n' '''\n")
HEADER = b"""#!/usr/bin/env -S sh -c 'exec "$(dirname "$(realpath "$0")")/python" "$0" "$@"'\n"""
"""Starts the Python beside a program, as uv's header does. To Python it is a comment."""
SYSTEM_PROGRAMS = (b"/bin/", b"/usr/bin/")


def main(argv: list[str]) -> int:
    path = Path(argv[0])
    repair_programs(path)
    repair_activate(path)
    bound = sorted(bound_files(path))
    torch, cuda = torch_versions(path)
    write_files(path, json.load(sys.stdin))
    print(json.dumps({"torch": torch, "cuda": cuda, "bound": bound}))
    return 0


def repair_programs(path: Path) -> None:
    """uv's header comes before a program's docstring, after which Python takes no import from `__future__`."""
    for program in programs(path):
        old = program.read_bytes()
        if UV_HEADER.match(old) and b"from __future__" in old:
            new = UV_HEADER.sub(lambda _: HEADER, old, count=1)
            program.write_bytes(new)
            for record in path.glob("lib/python*/site-packages/*.dist-info/RECORD"):
                record.write_text(record.read_text().replace(hash_and_size(old), hash_and_size(new)))


def repair_activate(path: Path) -> None:
    """A shell that does not tell which file it reads, such as dash, finds the environment where it was built."""
    file = path / "bin/activate"
    search = 'realpath -m -- "${SCRIPT_PATH:-%s}"' % file
    file.write_text(file.read_text().replace('realpath -- "$SCRIPT_PATH"', search))


def hash_and_size(data: bytes) -> str:
    return "sha256=%s,%d" % (base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode(), len(data))


def bound_files(path: Path) -> Iterator[list[str]]:
    """Files of packages that work only where another file exists, and the path of that file."""
    for program in programs(path):
        data = program.read_bytes()
        interpreter = data.partition(b"\n")[0][2:].split() if data.startswith(b"#!") else []
        if interpreter and not interpreter[0].startswith(SYSTEM_PROGRAMS):
            yield [str(program.relative_to(path)), os.fsdecode(interpreter[0])]
    for file in path.glob("lib/python*/site-packages/*.pth"):
        for line in file.read_bytes().splitlines():
            if line.startswith(b"/"):
                yield [str(file.relative_to(path)), os.fsdecode(line)]


def programs(path: Path) -> list[Path]:
    return sorted(file for file in path.glob("bin/*") if file.is_file() and not file.is_symlink())


def torch_versions(path: Path) -> list[str | None]:
    """torch's version and that of its CUDA, read without an import: that needs its libraries."""
    for file in path.glob("lib/python*/site-packages/torch/version.py"):
        text = file.read_text()
        matches = [
            re.search(r"^%s\s*(?::[^=]*)?=\s*['\"]([^'\"]*)['\"]" % name, text, re.MULTILINE)
            for name in ("__version__", "cuda")
        ]
        return [match.group(1) if match else None for match in matches]
    return [None, None]


def write_files(path: Path, files: dict[str, str]) -> None:
    """Write and compile the files. A directory that a package has already stays the package's: it may be `shoal`."""
    for packages in path.glob("lib/python*/site-packages"):
        taken = {name for name in os.listdir(packages) if (packages / name).is_dir()}
        new = {name: text for name, text in files.items() if name.partition("/")[0] not in taken}
        for name, text in new.items():
            (packages / name).parent.mkdir(parents=True, exist_ok=True)
            (packages / name).write_text(text, encoding="utf-8")
        for top in sorted({name.partition("/")[0] for name in new}):
            if top.endswith(".py"):
                compileall.compile_file(packages / top, quiet=2)
            elif (packages / top).is_dir():
                compileall.compile_dir(packages / top, quiet=2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
