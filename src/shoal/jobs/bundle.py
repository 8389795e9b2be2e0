"""The working tree as one archive named by its content: what ran can be run again, and is sent once.

`tree_files.py` says which files it has. The archive of the same files is the same bytes, independent of who made it and
when.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.environments.store import library_files
from shoal.errors import UsageError
from shoal.jobs.tree_files import NOTHING, LeftOut, list_tree
from shoal.remote.log_reader import SENT_TIME
from shoal.spec.finding import printable

DEFAULT_LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True)
class Bundle:
    """An archive and the hash of its content."""

    hash: str
    data: bytes
    files: tuple[str, ...]
    workdir: str = "."
    """Where in the tree the person stood."""
    root: str = ""
    """The tree on the person's machine."""
    left_out: LeftOut = NOTHING


def working_tree(here: Path, script: str, limit: int = DEFAULT_LIMIT, include: Sequence[str] = ()) -> Bundle:
    """The tree around `here`. Raises UsageError when the script is not in it, or when it is too large to send."""
    tree = list_tree(here, include)
    root, names = tree.root, tree.names
    target, script_name = (here / script).resolve(), printable(script)
    if not target.exists():
        raise UsageError(f"there is no {script_name} in {here}", hint="name a script of your working tree")
    if target.is_dir():
        raise UsageError(f"{script_name} is a directory", hint="name the script in it")
    if root.resolve() not in target.parents:
        raise UsageError(
            f"{script_name} is outside of your working tree {root}", hint="run the command from the tree it is in"
        )
    inside = target.relative_to(root.resolve()).as_posix()
    spelled = os.path.relpath((here / script).absolute(), root.absolute())
    if inside not in names and spelled not in names:
        hint = f"use --include {script_name}, or take it out of .gitignore"
        raise UsageError(f"git ignores {script_name}, so it would not be sent", hint=hint)
    if not script.endswith(".py") and not os.access(target, os.X_OK):
        hint = f"name it .py, or `chmod +x {script_name}`"
        raise UsageError(f"{script_name} is neither a Python script nor executable", hint=hint)
    _check_size(root, names, limit)
    bundle = _bundle({name: root / name for name in names}, os.path.relpath(here.resolve(), root.resolve()))
    return replace(bundle, root=str(root), left_out=tree.left_out)


def runtime() -> Bundle:
    """Shoal's own part of a job: the program that runs a rank, and the training library for the script to import."""
    package = Path(__file__).resolve().parent.parent
    # Beside the library, not in it: scripts import from there, and may have a `runner` of their own.
    programs = [package / "remote/start.py", *(package / "remote/runner").glob("*.py")]
    contents = {f"programs/{path.relative_to(package / 'remote').as_posix()}": path for path in sorted(programs)}
    return _bundle({**contents, **library_files()})


def _bundle(contents: Mapping[str, Path], workdir: str = ".") -> Bundle:
    data = archive(contents)
    return Bundle(hashlib.sha256(data).hexdigest()[:20], data, tuple(contents), workdir)


def archive(contents: Mapping[str, Path]) -> bytes:
    """A tar of files and links. Owners are left out, and times are equal, so that equal trees give equal bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(contents):
            path = contents[name]
            info = tarfile.TarInfo(name)
            info.mtime = SENT_TIME
            if path.is_symlink():
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
                tar.addfile(info)
                continue
            data = path.read_bytes()
            info.size = len(data)
            info.mode = 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _check_size(root: Path, names: Iterable[str], limit: int) -> None:
    sizes = {name: (root / name).lstat().st_size for name in names}
    total = sum(sizes.values())
    if total <= limit:
        return
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:5]
    listing = ", ".join(f"{printable(name)} ({_mib(sizes[name])})" for name in largest)
    raise UsageError(
        f"the working tree {root} is {_mib(total)}, more than the {_mib(limit)} that are sent with a job; the largest"
        f" files: {listing}",
        hint="put data into .gitignore and on the nodes' storage, or raise --max-size",
    )


def _mib(size: int) -> str:
    return f"{size / 1024 / 1024:.1f} MiB"
