"""Where hosts keep environments, and the commands that inspect, copy and remove them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shoal.remote import program_text, python_command, shell_command
from shoal.remote.environment_builder import MARK

LOCAL_DIRECTORY = "/var/lib/shoal/environments"
"""Where a host keeps its own copies."""
RECENT_USE_S = 600
"""`env clean` keeps an environment this long after its last use: a job that needs it may not be in the queue yet."""


@dataclass(frozen=True)
class BuiltEnvironment:
    """A built environment, as its name on the controller describes it."""

    name: str
    id: str
    """The hash of its packages, Python and platform."""
    path: str
    """Where jobs use it, on every host."""
    link: str = ""
    """Its path by name, which stays the same when the name gets another environment."""
    place: str = "shared"
    python: str = ""
    """The version: 3.11."""
    source: str = ""
    """The hash of its requirements, which names the cache of its packages."""
    text: str = ""
    """The hash of the file that it was built from."""
    torch: str | None = None
    cuda: str | None = None
    packages: tuple[str, ...] = field(default=())
    bound: tuple[tuple[str, str], ...] = field(default=())
    """Files in it that work only where another file exists, and the path of that."""
    made_at: int = 0
    shoal: str = ""
    """The release of Shoal whose `shoal.train` is in it; empty where it has none."""

    @property
    def program(self) -> str:
        return f"{self.path}/bin/python"

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> BuiltEnvironment:
        """From the controller's JSON, without keys of a later version."""
        values = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        bound = tuple((file, target) for file, target in data.get("bound", ()))
        return cls(**{**values, "packages": tuple(data.get("packages", ())), "bound": bound})

    def as_json(self) -> str:
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)}) + "\n"


def library_files() -> dict[str, Path]:
    """The training library, which stands alone: its files by their paths in an environment."""
    package = Path(__file__).resolve().parent.parent
    top_level = [package / name for name in ("__init__.py", "contract.py", "hostlist.py")]
    library = [*top_level, *sorted((package / "train").rglob("*.py"))]
    return {f"shoal/{path.relative_to(package).as_posix()}": path for path in library}


def added_files() -> dict[str, str]:
    """What Shoal adds to the packages of an environment: the training library, and what Python runs at its start."""
    start = {f"{_START}.py": program_text("environment_start"), f"{_START}.pth": f"import {_START}\n"}
    return {**{name: path.read_text("utf-8") for name, path in library_files().items()}, **start}


_START = "shoal_environment"


def read_names_command(directory: str) -> list[str]:
    """Print the JSON of every name, one per line."""
    return _command("read_names", directory)


def parse_names(text: str, directory: str) -> dict[str, BuiltEnvironment]:
    """The environments that a directory's names stand for, with their current paths: they move with the directory."""
    environments = [BuiltEnvironment.of(json.loads(line)) for line in text.splitlines() if line.startswith("{")]
    return {environment.name: locate(environment, directory) for environment in environments}


def locate(environment: BuiltEnvironment, directory: str) -> BuiltEnvironment:
    """The environment with its paths, as one of this directory."""
    place = LOCAL_DIRECTORY if environment.place == "local" else directory
    return replace(environment, path=f"{place}/{environment.id}", link=f"{place}/{environment.name}")


def user_names_command(cluster: str, jobs: str, directories: Collection[str]) -> tuple[str, ...]:
    """Print the environments that a user may use, as one JSON object. It is run as the user."""
    return python_command("job_directory", "environments", cluster, jobs, *directories)


def write_name_command(directory: str, name: str) -> list[str]:
    """Make a name stand for an environment, whose JSON comes by standard input."""
    return _command("write_name", directory, name)


def write_link_command(environment: BuiltEnvironment) -> list[str]:
    """Make the path by name lead to an environment, on a host that has it."""
    return _command("write_link", environment.link, environment.id)


def remove_name_command(directory: str, name: str) -> list[str]:
    """Forget a name. The environment stays until it is removed."""
    return _command("remove_name", directory, name)


@dataclass(frozen=True)
class NodeEnvironment:
    """What a node has of an environment."""

    state: str
    """`missing`, `broken`, or the version of its Python."""
    archive: bool = False
    """The node can read the archive, and so unpack a copy itself."""
    driver: str = ""
    """The version of its NVIDIA driver; empty where there are no GPUs."""
    why: str = ""
    """The error where it is `broken`."""


def inspect_command(path: str, archive: str = "", *, use: bool = False) -> list[str]:
    """Inspect an environment on a node. `use`: a job is about to use it, so `env clean` must keep it."""
    return _command("inspect", path, "yes" if use else "no", archive or "/nonexistent")


def parse_inspection(text: str) -> NodeEnvironment:
    values = dict(line.partition(" ")[::2] for line in text.splitlines())
    driver = values.get("driver", "").strip()
    return NodeEnvironment(values.get("env", "missing"), "archive" in values, driver, values.get("why", "").strip())


def unpack_command(path: str, archive: str = "-") -> list[str]:
    """Unpack a copy of an environment; without an archive, from standard input."""
    return _command("unpack", path, archive)


@dataclass(frozen=True)
class StoredEnvironment:
    """An environment that a host keeps."""

    id: str
    age: int
    """Seconds since it was built or last used by `shoal run`."""
    busy: bool
    """A process on the host uses it."""


def list_command(directory: str) -> list[str]:
    return _command("list", directory)


def parse_listing(text: str) -> list[StoredEnvironment]:
    return [
        StoredEnvironment(number, int(age), int(busy) > 0)
        for number, age, busy in (line.split() for line in text.splitlines() if len(line.split()) == 3)
    ]


def remove_command(directory: str, ids: Collection[str]) -> list[str]:
    return _command("remove", directory, *ids)


def sweep_command(directory: str, sources: Collection[str], ids: Collection[str]) -> list[str]:
    """Remove caches and archives of all but these. Removes nothing while a build runs."""
    return _command("sweep", directory, " ".join(sources), " ".join(ids))


def _command(verb: str, *arguments: str) -> list[str]:
    return [*shell_command(program_text("environment_store.sh", MARK=MARK), verb, *arguments)]
