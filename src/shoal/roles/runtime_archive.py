"""The running Shoal with the packages that it needs, as one archive, so that a host gets it without a package index.

Compiled packages fit hosts with the same release of Python and the same kind of CPU. The archive is made once, and kept
in the operator's cache under a name that depends on everything in it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from shoal.agent.facts import Facts
from shoal.local_files import cache_dir
from shoal.roles.wheel import requirements_of_shoal

RUNTIME_ARCHIVE = "own:runtime"
"""The archive's reference among secrets, as that of the wheel."""
CACHE_MAX_AGE_S = 86400.0
"""An older archive of another version is removed when a new one is made."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_PATH = """\
import sys, os
sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), name) for name in ("shoal", "packages")]
"""
_START = f"{_PATH}from shoal.cli.app import main\nmain()\n".encode()
_ROOT = Path(__file__).parents[1]


@cache
def runtime_mark() -> str:
    """The name of this installation. It differs where anything in the archive does, so the archive need not be made."""
    digest = hashlib.sha256("\n".join((_python(), platform.machine(), *runtime_requirements())).encode())
    for path in _sources():
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def runtime_archive() -> bytes:
    """The archive, from the cache where it is there."""
    path = cache_dir() / "runtime" / f"{runtime_mark()}.tgz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.iterdir():
            if time.time() - other.stat().st_mtime > CACHE_MAX_AGE_S:
                other.unlink(missing_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_bytes(_build())
        beside.rename(path)
    return path.read_bytes()


@cache
def runtime_requirements() -> tuple[str, ...]:
    """The packages in the archive, as pip names them."""
    return tuple(sorted(f"{dist.name}=={dist.version}" for dist in _packages()))


def fits(facts: Facts) -> bool:
    """Whether the packages in the archive run on a host, as far as that is known before it is tried there."""
    version = ".".join(facts.python.split(".")[:2])
    return sys.platform == "linux" and (version, facts.arch) == (_python(), platform.machine())


def _python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _build() -> bytes:
    """The same files give the same bytes."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        files = {f"shoal/shoal/{path.relative_to(_ROOT)}": path for path in _sources()}
        files |= {f"packages/{name}": path for dist in _packages() for name, path in _files(dist)}
        _add(archive, "start.py", _START)
        _add(archive, "load.py", f"{_PATH}import {', '.join(_commands())}\n".encode())
        for name, path in sorted(files.items()):
            _add(archive, name, path.read_bytes())
    return packed.getvalue()


def _commands() -> list[str]:
    """The modules of all commands. A host loads them once: that shows that they run there, and leaves bytecode."""
    return sorted(f"shoal.{room}.{path.stem}" for room in ("cli", "verbs") for path in (_ROOT / room).glob("[!_]*.py"))


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    archive.addfile(entry, io.BytesIO(content))


def _sources() -> list[Path]:
    return sorted(path for path in _ROOT.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _packages() -> list[Distribution]:
    """Every package that Shoal needs without its extras, and that is installed."""
    needed: dict[str, Distribution] = {}
    names = [_name(requirement) for requirement in requirements_of_shoal() if "extra ==" not in requirement]
    while names:
        name = names.pop()
        if name in needed:
            continue
        try:
            needed[name] = distribution(name)
        except PackageNotFoundError:  # for another system, or another Python
            continue
        names += [_name(text) for text in needed[name].requires or () if "extra ==" not in text]
    return [needed[name] for name in sorted(needed)]


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def _files(dist: Distribution) -> Iterator[tuple[str, Path]]:
    """The files of a package below the directory of packages, without programs and bytecode."""
    for file in dist.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            path = Path(str(dist.locate_file(file)))
            if path.is_file():
                yield file.as_posix(), path
