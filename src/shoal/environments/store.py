"""Where hosts keep environments, and the commands that inspect, copy and remove them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

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


def read_names_command(directory: str) -> list[str]:
    """Print the JSON of every name, one per line."""
    return ["sh", "-c", 'cd "$1/names" 2> /dev/null || exit 0; cat ./*.json 2> /dev/null || true', "sh", directory]


def parse_names(text: str, directory: str) -> dict[str, BuiltEnvironment]:
    """The environments that a directory's names stand for, with their current paths: they move with the directory."""
    environments = [BuiltEnvironment.of(json.loads(line)) for line in text.splitlines() if line.startswith("{")]
    return {
        environment.name: replace(
            environment, path=f"{LOCAL_DIRECTORY if environment.place == 'local' else directory}/{environment.id}"
        )
        for environment in environments
    }


_WRITE_NAME = r"""
set -eu
cat > "$1/names/.$2.new"
chmod 644 "$1/names/.$2.new"
mv -f "$1/names/.$2.new" "$1/names/$2.json"
"""


def write_name_command(directory: str, name: str) -> list[str]:
    """Make a name stand for an environment, whose JSON comes by standard input."""
    return ["sh", "-c", _WRITE_NAME, "sh", directory, name]


_INSPECT = rf"""
path=$1 touch=$2
if [ ! -e "$path/{MARK}" ]; then
    echo env missing
else
    [ "$touch" = no ] || touch -c "$path/{MARK}" 2> /dev/null
    query='import sys; print("%d.%d" % sys.version_info[:2])'
    if output=$("$path/bin/python" -I -S -c "$query" 2>&1); then echo env "$output"; else
        echo env broken
        echo why "$(echo "$output" | tail -n 1)"
    fi
fi
[ ! -e "$3" ] || echo archive
[ "$touch" = yes ] || driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | head -n 1)
[ -z "${{driver:-}}" ] || echo driver "$driver"
"""


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
    return ["sh", "-c", _INSPECT, "sh", path, "yes" if use else "no", archive or "/nonexistent"]


def parse_inspection(text: str) -> NodeEnvironment:
    values = dict(line.partition(" ")[::2] for line in text.splitlines())
    driver = values.get("driver", "").strip()
    return NodeEnvironment(values.get("env", "missing"), "archive" in values, driver, values.get("why", "").strip())


_UNPACK = r"""
set -eu
path=$1 archive=$2
place=$(dirname "$path")
new=$place/.$(basename "$path").new.$$
mkdir -p "$place"
rm -rf "$place/.$(basename "$path").new."*
mkdir "$new"
trap 'rm -rf "$new"' EXIT
if [ "$archive" = - ]; then tar -x -f - -C "$new"; else tar -x -f "$archive" -C "$new"; fi
cd "$new/$(basename "$path")"
version=$(sed -n 's/^version\(_info\)\? = \([0-9]*\.[0-9]*\).*/\2/p' pyvenv.cfg)
has_version() { [ "$("$1" -I -S -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null)" = "$version" ]; }
other=$(PATH=$PATH:/usr/local/bin:/opt/conda/bin command -v "python$version") || other=
if ! has_version bin/python && has_version "$other"; then
    for link in bin/python*; do
        case $(readlink "$link") in /*) ln -sfn "$other" "$link" ;; esac
    done
    sed -i "s|^home = .*|home = $(dirname "$other")|" pyvenv.cfg
fi
rm -rf "$path"
mv -T "$PWD" "$path"
"""
"""Unpacks a copy next to its path and renames it, after removing what a killed run left.

Where this host has the Python at another path than the host that built it, the copy's links are changed.
"""


def unpack_command(path: str, archive: str = "-") -> list[str]:
    return ["sh", "-c", _UNPACK, "sh", path, archive]


_LIST = rf"""
for mark in "$1"/*/{MARK}; do
    path=${{mark%/{MARK}}}
    stamp=$(stat -c %Y "$mark" 2> /dev/null) || continue  # removed meanwhile
    age=$(($(date +%s) - stamp))
    # By a variable: as an argument, this awk would match itself.
    busy=$(cat /proc/[0-9]*/maps /proc/[0-9]*/cmdline 2> /dev/null | tr '\0' '\n' |
        inside="$path/" awk 'index($0, ENVIRON["inside"]) {{ n++ }} END {{ print n + 0 }}')
    echo "${{path##*/}} $age $busy"
done
"""


@dataclass(frozen=True)
class StoredEnvironment:
    """An environment that a host keeps."""

    id: str
    age: int
    """Seconds since it was built or last used by `shoal run`."""
    busy: bool
    """A process on the host uses it."""


def list_command(directory: str) -> list[str]:
    return ["sh", "-c", _LIST, "sh", directory]


def parse_listing(text: str) -> list[StoredEnvironment]:
    return [
        StoredEnvironment(number, int(age), int(busy) > 0)
        for number, age, busy in (line.split() for line in text.splitlines() if len(line.split()) == 3)
    ]


_REMOVE = rf"""
set -eu
directory=$1
shift
for id in "$@"; do
    rm -f "$directory/$id/{MARK}"
    rm -rf "${{directory:?}}/$id" "$directory/archives/$id.tar"
done
"""
"""Removes environments, the mark first: what a killed run leaves does not count."""


def remove_command(directory: str, ids: Collection[str]) -> list[str]:
    return ["sh", "-c", _REMOVE, "sh", directory, *ids]


_SWEEP = r"""
set -eu
cd "$1/wheels" 2> /dev/null || exit 0
exec 9> ../.lock
flock -n 9 || exit 0  # a build uses them
sweep() {
    for path in "$1"/*; do
        name=${path##*/}
        case " $2 " in *" ${name%.tar} "*) continue ;; esac
        rm -rf "$path"
    done
}
sweep ../wheels "$2"
sweep ../archives "$3"
"""


def sweep_command(directory: str, sources: Collection[str], ids: Collection[str]) -> list[str]:
    """Remove caches and archives of all but these. Removes nothing while a build runs."""
    return ["sh", "-c", _SWEEP, "sh", directory, " ".join(sources), " ".join(ids)]
