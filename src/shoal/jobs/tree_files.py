"""The files of a working tree: which are sent with a job, and what is left out.

Inside a git repository these are the files that git tracks, and those it does not ignore. Elsewhere it is everything
below the current directory but hidden directories and caches. Patterns of the user's add files that would be left out.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from shoal.errors import UsageError
from shoal.spec.finding import printable

SKIPPED = ("__pycache__", "node_modules", "venv")
"""Directories that are left out where there is no git to say what matters."""
CACHES = (".pyc", ".egg-info")
MAX_COUNTED_FILES = 5000
"""So many files that git ignores are counted for the report."""
MAX_NAMES = 5


@dataclass(frozen=True)
class LeftOut:
    """What of a working tree is not sent, or does not work on the nodes."""

    files: int = 0
    """Files that git ignores, without caches and hidden ones."""
    bytes: int = 0
    names: tuple[str, ...] = ()
    """The largest of them, from where the person stands."""
    more: bool = False
    """There are more than were counted."""
    links: tuple[str, ...] = ()
    """Links that leave the tree, as `data -> /mnt/data`."""
    submodules: tuple[str, ...] = ()
    """Submodules without files."""


NOTHING = LeftOut()


@dataclass(frozen=True)
class TreeFiles:
    """A working tree."""

    root: Path
    names: tuple[str, ...]
    """Of the files that are sent, from `root`."""
    left_out: LeftOut


def list_tree(here: Path, patterns: Sequence[str] = ()) -> TreeFiles:
    """The tree around `here`. Raises UsageError for a pattern that no file matches."""
    top = _git(here, "rev-parse", "--show-toplevel")
    root = here if top is None else Path(top.decode().rstrip("\n"))
    listing = _Listing(every_ignored_file=bool(patterns))
    if top is None:
        listing.files = list(_all(root))
        listing.ignored = sorted(set(_all(root, hidden=True)) - set(listing.files)) if patterns else []
    else:
        listing.read(root)
    included = _included(listing, root, here, patterns)
    names = sorted({*listing.files, *included})
    ignored = [] if top is None else [name for name in listing.ignored if name not in included]
    files, more = _count(root, ignored)
    largest = sorted(files, key=lambda name: (-files[name], name))[:MAX_NAMES]
    left_out = LeftOut(
        len(files),
        sum(files.values()),
        tuple(_seen_from(here, root, name) for name in largest),
        more,
        tuple(_leaving_links(root, names)),
        tuple(_seen_from(here, root, name) for name in listing.submodules),
    )
    return TreeFiles(root, tuple(names), left_out)


@dataclass
class _Listing:
    """What git says of a tree and its submodules."""

    every_ignored_file: bool
    """Otherwise a directory that is ignored as a whole stands for its files."""
    files: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    submodules: list[str] = field(default_factory=list)

    def read(self, root: Path, prefix: str = "") -> None:
        """Add the files of a repository that are there. A submodule's files are asked of itself."""
        ignored = ["--others", "--ignored", "--exclude-standard", *([] if self.every_ignored_file else ["--directory"])]
        self.ignored += [prefix + name for name in _list_files(root, *ignored)]
        for name in _list_files(root, "--cached", "--others", "--exclude-standard"):
            path = root / name
            if path.is_symlink() or path.is_file():
                self.files.append(prefix + name)
            elif path.is_dir() and (path / ".git").exists():
                self.read(path, f"{prefix}{name.rstrip('/')}/")
            elif path.is_dir():
                self.submodules.append(prefix + name)


def _list_files(root: Path, *options: str) -> list[str]:
    listed = _git(root, "ls-files", "-z", *options)
    if listed is None:
        raise UsageError(f"git cannot list the files of {root}", hint="run `git status` there")
    return list(filter(None, listed.decode("utf-8", "surrogateescape").split("\0")))


def is_ignored(path: Path) -> bool:
    """Whether the file is left out of a working tree: git ignores it, or a directory on its way is skipped."""
    if _git(path.parent, "rev-parse", "--show-toplevel") is None:
        return is_cache(path.parent.as_posix())
    return _git(path.parent, "check-ignore", "-q", "--", path.name) is not None


def is_cache(name: str) -> bool:
    """Whether it is in a hidden directory or a cache, and no data."""
    parts = PurePosixPath(name).parts
    return any(_is_skipped(part) or part.endswith(CACHES) for part in parts)


def _is_skipped(directory: str) -> bool:
    return directory in SKIPPED or directory.startswith(".")


def _included(listing: _Listing, root: Path, here: Path, patterns: Sequence[str]) -> set[str]:
    """The files that the patterns add. A pattern without a slash is about names in every directory."""
    included: set[str] = set()
    for pattern in patterns:
        plain = os.path.normpath(os.path.relpath(pattern, here) if pattern.startswith("/") else pattern)
        matching = {
            name for name in listing.ignored if not name.endswith("/") and _matches(_seen_from(here, root, name), plain)
        }
        if not matching and not any(_matches(_seen_from(here, root, name), plain) for name in listing.files):
            raise UsageError(
                f"--include {printable(pattern)} matches no file of your working tree",
                hint="name files or directories as you see them from here, such as 'data/*.bin'; quote a pattern",
            )
        included |= {name for name in matching if (root / name).is_symlink() or (root / name).is_file()}
    return included


def _matches(name: str, pattern: str) -> bool:
    if fnmatchcase(name, pattern) or name.startswith(f"{pattern}/") or pattern == ".":
        return True
    return "/" not in pattern and fnmatchcase(PurePosixPath(name).name, pattern)


def _seen_from(here: Path, root: Path, name: str) -> str:
    place = os.path.relpath(here.resolve(), root.resolve())
    return name if place == "." else os.path.relpath(name, place)


def _count(root: Path, ignored: Iterable[str]) -> tuple[dict[str, int], bool]:
    """The size of each ignored file that may be data; and whether there are more than are counted."""
    sizes: dict[str, int] = {}
    for entry in ignored:
        if is_cache(entry):
            continue
        names = (f"{entry}{name}" for name in _all(root / entry)) if entry.endswith("/") else iter((entry,))
        for name in names:
            if len(sizes) >= MAX_COUNTED_FILES:
                return sizes, True
            try:
                sizes[name] = (root / name).lstat().st_size
            except OSError:
                continue  # removed meanwhile
    return sizes, False


def _leaving_links(root: Path, names: Iterable[str]) -> Iterator[str]:
    """Links to what the nodes do not have under that name."""
    for name in names:
        path = root / name
        if not path.is_symlink():
            continue
        target = str(path.readlink())
        inside = os.path.normpath(os.path.join(os.path.dirname(name), target))  # noqa: PTH118, PTH120
        if target.startswith("/") or inside.startswith("../") or inside == "..":
            yield f"{name} -> {target}"


def _git(directory: Path, *arguments: str) -> bytes | None:
    try:
        result = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True)
    except FileNotFoundError:
        return None
    return result.stdout if result.returncode == 0 else None


def _all(root: Path, *, hidden: bool = False) -> Iterator[str]:
    """The files below a directory; `hidden`: also those that are left out."""
    for directory, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if name != ".git" if hidden or not _is_skipped(name))
        for name in sorted(files):
            path = Path(directory) / name
            if path.is_symlink() or path.is_file():
                yield path.relative_to(root).as_posix()
