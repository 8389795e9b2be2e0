"""Where environments are on the hosts, and the commands that look at them, copy them and take them away."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shoal.environments.builder import MARK

LOCAL = "/var/lib/shoal/environments"
"""Where a host keeps copies of its own."""
USED_LATELY = 600
"""Seconds for which an environment stays after `shoal run` has looked at it: its job is not in the queue yet."""


@dataclass(frozen=True)
class Made:
    """An environment in force, as its name stands for it on the controller."""

    name: str
    id: str
    """The hash of what is in it: the packages, the Python, the platform."""
    path: str
    """Where jobs use it, on every host that has it."""
    place: str = "shared"
    python: str = ""
    """The version: 3.11."""
    source: str = ""
    """The hash under which its wheels are kept."""
    text: str = ""
    """The hash of the file that it was made from."""
    torch: str | None = None
    cuda: str | None = None
    packages: tuple[str, ...] = field(default=())
    bound: tuple[tuple[str, str], ...] = field(default=())
    """Files in it that work only where another one is, and which that is."""
    made_at: int = 0

    @property
    def program(self) -> str:
        return f"{self.path}/bin/python"

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Made:
        """From the controller's JSON. Keys of a later version are passed over."""
        known = {one.name: data[one.name] for one in fields(cls) if one.name in data}
        bound = tuple((file, names) for file, names in data.get("bound", ()))
        return cls(**{**known, "packages": tuple(data.get("packages", ())), "bound": bound})

    def as_json(self) -> str:
        return json.dumps({one.name: getattr(self, one.name) for one in fields(self)}) + "\n"


def names_command(directory: str) -> list[str]:
    """What is in force: every name's JSON, a line each."""
    return ["sh", "-c", 'cd "$1/names" 2> /dev/null || exit 0; cat ./*.json 2> /dev/null || true', "sh", directory]


def parse_names(text: str, directory: str) -> dict[str, Made]:
    """What the names in a directory stand for. Environments move with it: their paths are those they have now."""
    found = [Made.of(json.loads(line)) for line in text.splitlines() if line.startswith("{")]
    return {
        made.name: replace(made, path=f"{LOCAL if made.place == 'local' else directory}/{made.id}") for made in found
    }


_NAME_IT = r"""
set -eu
cat > "$1/names/.$2.new"
chmod 644 "$1/names/.$2.new"
mv -f "$1/names/.$2.new" "$1/names/$2.json"
"""


def name_command(directory: str, name: str) -> list[str]:
    """Put an environment in force; its JSON comes by standard input."""
    return ["sh", "-c", _NAME_IT, "sh", directory, name]


_LOOK = rf"""
path=$1 touch=$2
if [ ! -e "$path/{MARK}" ]; then
    echo env missing
else
    [ "$touch" = no ] || touch -c "$path/{MARK}" 2> /dev/null
    ask='import sys; print("%d.%d" % sys.version_info[:2])'
    if said=$("$path/bin/python" -I -S -c "$ask" 2>&1); then echo env "$said"; else
        echo env broken
        echo why "$(echo "$said" | tail -n 1)"
    fi
fi
[ ! -e "$3" ] || echo archive
[ "$touch" = yes ] || driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | head -n 1)
[ -z "${{driver:-}}" ] || echo driver "$driver"
"""


@dataclass(frozen=True)
class Look:
    """What a node has of an environment."""

    state: str
    """`missing`, `broken`, or the version of the Python that answers in it."""
    archive: bool = False
    """It sees the archive, so that it can unpack a copy by itself."""
    driver: str = ""
    """The version of its NVIDIA driver; empty where there are no GPUs."""
    why: str = ""
    """What is said where it is `broken`."""


def look_command(path: str, archive: str = "", *, use: bool = False) -> list[str]:
    """What a node has. `use`: a job is about to use it, so that nobody takes it away."""
    return ["sh", "-c", _LOOK, "sh", path, "yes" if use else "no", archive or "/nonexistent"]


def parse_look(text: str) -> Look:
    words = dict(line.partition(" ")[::2] for line in text.splitlines())
    driver = words.get("driver", "").strip()
    return Look(words.get("env", "missing"), "archive" in words, driver, words.get("why", "").strip())


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
version=$(sed -n 's/^version = \([0-9]*\.[0-9]*\).*/\1/p' pyvenv.cfg)
is_it() { [ "$("$1" -I -S -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null)" = "$version" ]; }
other=$(PATH=$PATH:/usr/local/bin:/opt/conda/bin command -v "python$version") || other=
if ! is_it bin/python && is_it "$other"; then
    for link in bin/python*; do
        case $(readlink "$link") in /*) ln -sfn "$other" "$link" ;; esac
    done
    sed -i "s|^home = .*|home = $(dirname "$other")|" pyvenv.cfg
fi
rm -rf "$path"
mv -T "$PWD" "$path"
"""
"""Unpacks a copy beside its place and renames it; what a killed one left goes first.

A host may have the Python that it needs somewhere else than the one that made it: the copy is led there.
"""


def unpack_command(path: str, archive: str = "-") -> list[str]:
    return ["sh", "-c", _UNPACK, "sh", path, archive]


_LIST = rf"""
for mark in "$1"/*/{MARK}; do
    path=${{mark%/{MARK}}}
    stamp=$(stat -c %Y "$mark" 2> /dev/null) || continue  # another one cleans here, too
    age=$(($(date +%s) - stamp))
    # By a variable: among arguments it would be found in those of the one who looks.
    busy=$(cat /proc/[0-9]*/maps /proc/[0-9]*/cmdline 2> /dev/null | tr '\0' '\n' |
        inside="$path/" awk 'index($0, ENVIRON["inside"]) {{ n++ }} END {{ print n + 0 }}')
    echo "${{path##*/}} $age $busy"
done
"""


@dataclass(frozen=True)
class Kept:
    """An environment that a host has."""

    id: str
    age: int
    """Seconds since it was made or `shoal run` looked at it."""
    busy: bool
    """A process of the host uses it."""


def kept_command(directory: str) -> list[str]:
    return ["sh", "-c", _LIST, "sh", directory]


def parse_kept(text: str) -> list[Kept]:
    return [
        Kept(number, int(age), int(busy) > 0)
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
"""Takes environments away, the mark first: one that is half gone is no more."""


def remove_command(directory: str, ids: Collection[str]) -> list[str]:
    return ["sh", "-c", _REMOVE, "sh", directory, *ids]


_SWEEP = r"""
set -eu
cd "$1/wheels" 2> /dev/null || exit 0
exec 9> ../.lock
flock -n 9 || exit 0  # somebody builds from them
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
    """Take away the wheels and the archives of all but these. What is there stays while somebody builds."""
    return ["sh", "-c", _SWEEP, "sh", directory, " ".join(sources), " ".join(ids)]
