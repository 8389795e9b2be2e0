"""The requirements of an environment, read from a file on the operator's machine."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.remote.environment_builder import GIT
from shoal.spec.environments import SOURCES, Environment
from shoal.spec.finding import printable
from shoal.spec.local_files import read_regular_file

MAX_REQUIREMENTS_BYTES = 16 * 1024 * 1024
"""A lock file with the digests of a few hundred packages has about one megabyte."""
_INCLUDE = re.compile(r"(?:-r|--requirement)[ =]\s*(\S+)")
_CONSTRAINT = re.compile(r"(?:-c|--constraint)[ =]\s*(\S+)")
_LOCAL = re.compile(r"-e\b|--editable|\.{0,2}/|file:|.*@\s*file:|[A-Za-z]:\\")
_PASSWORD = re.compile(r"://[^/\s]*@")
_PINNED = re.compile(r"[A-Za-z0-9._-]+(\[[^\]]*\])?\s*==\s*[^\s*;]+(\s|;|$)|-")
_EXPORT_COMMANDS = {
    "uv.lock": "uv export --no-emit-project -o requirements.lock",
    "poetry.lock": "poetry export -o requirements.lock",
    "pdm.lock": "pdm export -o requirements.lock",
    "Pipfile.lock": "pipenv requirements > requirements.lock",
}
"""Locks that only their own tool reads, and the command that exports a requirements file from them."""


@dataclass(frozen=True)
class RequirementSet:
    """The packages of an environment. The same text gives the same environment, whoever builds it."""

    requirements: str
    constraints: str = ""
    locked: bool = False
    """Every package is named: none is added."""
    for_python: str = ""
    """The Python versions that it requires: `>=3.12`."""


def read_requirements(environment: Environment, base: Path) -> RequirementSet:
    """The requirements of an environment; `base` is the directory of the spec. Raises UsageError."""
    kind = next(key for key in SOURCES if getattr(environment, key) is not None)
    path = base / Path(getattr(environment, kind)).expanduser()
    if path.name in _EXPORT_COMMANDS:
        hint = f"run `{_EXPORT_COMMANDS[path.name]}`, and set `lock` to that file"
        raise UsageError(f"{path} is a lock that only its own tool reads", hint=hint)
    if kind == "pyproject":
        project = _project(path)
        lines = "\n".join(_dependencies(path, project)) + "\n"
        return RequirementSet(lines, for_python=str(project.get("requires-python", "")))
    if kind == "lock" and path.suffix == ".toml":
        lock = _toml(path)
        lines = "\n".join(_locked_packages(path, lock)) + "\n"
        return RequirementSet(lines, locked=True, for_python=str(lock.get("requires-python", "")))
    constraints: list[str] = []
    requirement_lines = list(_lines(path, (), constraints))
    if kind == "lock":
        _check_pinned(path, requirement_lines)
    text = "".join(f"{line}\n" for line in requirement_lines)
    return RequirementSet(text or "\n", "".join(f"{line}\n" for line in constraints), kind == "lock")


def note_git(environments: Mapping[str, Environment], base: Path) -> dict[str, Environment]:
    """The environments, with those marked that need git. What is wrong with a file is for `shoal env build` to say."""

    def needs_git(environment: Environment) -> bool:
        try:
            source = read_requirements(environment, base)
        except UsageError:
            return False
        return bool(GIT.search(source.requirements) or GIT.search(source.constraints))

    return {name: entry.with_git() if needs_git(entry) else entry for name, entry in environments.items()}


def _lines(path: Path, including: tuple[Path, ...], constraints: list[str]) -> Iterator[str]:
    """The requirement lines of a file and of those it includes. Lines of constraint files go to `constraints`."""
    text = re.sub(r"\\\n\s*", " ", _read(path))
    for raw in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", raw).strip()
        if not line:
            continue
        limits = _CONSTRAINT.match(line)
        if match := limits or _INCLUDE.match(line):
            inner = path.parent / match[1]
            if inner in (*including, path):
                raise UsageError(f"{path} includes itself", hint=f"delete `{printable(line)}`")
            lines = list(_lines(inner, (*including, path), constraints))
            if limits:
                constraints += lines
            else:
                yield from lines
            continue
        _check_reachable(path, line)
        yield line


def _check_reachable(path: Path, line: str) -> None:
    """Refuse a line with a password, and one that names a file of this machine."""
    if _PASSWORD.search(line):
        raise UsageError(
            f"{path} has an address with a password in it", hint="put it into pip.conf on the host that builds"
        )
    if _LOCAL.match(line):
        raise UsageError(
            f"{path} names {printable(line)}, which the hosts do not have",
            hint="name packages that can be downloaded; `shoal run` sends your own code",
        )


def _project(path: Path) -> dict[str, Any]:
    table = _toml(path).get("project")
    return table if isinstance(table, dict) else {}


def _dependencies(path: Path, project: dict[str, Any]) -> list[str]:
    lines = project.get("dependencies")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise UsageError(
            f"{path} has no list of dependencies under [project]", hint="add one, or use `requirements` or `lock`"
        )
    for line in lines:
        _check_reachable(path, line)
    return sorted(lines)


def _locked_packages(path: Path, lock: dict[str, Any]) -> Iterator[str]:
    """The packages of a pylock.toml (PEP 751) as lines of a requirements file."""
    packages = lock.get("packages")
    if not isinstance(packages, list) or not packages:
        raise UsageError(f"{path} is not a pylock.toml: it has no [[packages]]", hint="make one with `pip lock`")
    for package in packages:
        name, version = package.get("name"), package.get("version")
        files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else ())]
        if not name or not version or not files:
            raise UsageError(
                f"{path} names {printable(str(name))} without a version that can be downloaded",
                hint="lock packages from an index, not directories or repositories",
            )
        digests = [digest for file in files if (digest := file.get("hashes", {}).get("sha256"))]
        marker = f" ; {package['marker']}" if "marker" in package else ""
        yield f"{name}=={version}{marker}" + "".join(f" --hash=sha256:{digest}" for digest in digests)


def _check_pinned(path: Path, lines: list[str]) -> None:
    loose = [line for line in lines if not _PINNED.match(line)]
    if loose:
        raise UsageError(
            f"{path} is not a lock file: {printable(loose[0])} has no version",
            hint="write name==version on each line, or use `requirements`",
        )


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read(path))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}", hint="correct it") from None


def _read(path: Path) -> str:
    try:
        return read_regular_file(path, MAX_REQUIREMENTS_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise UsageError(f"there is no {path}", hint="name a file; paths in the spec are relative to it") from None
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read {path}: {cause}", hint="check that it is the right file") from None
