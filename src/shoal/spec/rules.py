"""What must hold between several fields of a spec: names that exist, hosts named once, fields that belong together.

The rules read plain data and skip whatever has the wrong shape, so that a file with a misspelt key still gets every
other finding in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from shoal import hostlist
from shoal.spec.accounting_rules import accounting_problems
from shoal.spec.environments import environment_problems
from shoal.spec.network_rules import network_problems
from shoal.spec.problem import Path, Problem, nearest, path_text
from shoal.spec.rented_rules import rented_names, rented_problems, rents
from shoal.spec.storage_rules import storage_problems, user_problems
from shoal.spec.tracking import tracking_problems
from shoal.spec.words import minutes, show, slurm_time
from shoal.train.contract import GRACE_SECONDS

_PROVIDER_ONLY = ("count", "image", "cpus", "memory", "disk", "gpus", "cgroups")
_HOSTS_ONLY = ("user", "port", "identity")
_DEFAULTS: Mapping[str, object] = {"image": "debian12", "gpus": 0, "cgroups": False}


def problems(data: object) -> list[Problem]:
    """Every rule that does not hold in the data of a whole spec."""
    if not isinstance(data, Mapping):
        return []
    return [
        *_sources(data),
        *_hosts_once(data),
        *_partitions(data),
        *_one_default(data),
        *_left_out(data),
        *_times(data),
        *_preemption(data),
        *_options_once(data),
        *_something_computes(data),
        *network_problems(data, [name for _, _, name in _hosts(data)], len(list(rented_names(data)))),
        *accounting_problems(data, [name for _, _, name in _hosts(data)]),
        *environment_problems(data),
        *tracking_problems(data, [name for _, _, name in _hosts(data)]),
        *storage_problems(data, [name for _, _, name in _hosts(data)]),
        *user_problems(data),
        *rented_problems(data),
    ]


def _sources(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Every set of hosts is either there already or made by a provider, and says nothing that belongs to the other."""
    for path, entry in _host_sets(data):
        key = "host" if path == ("controller",) else "hosts"
        given, made = _is_set(entry, key), _is_set(entry, "provider")
        if not given and len(path) == 2 and rents(entry):
            yield from _none_of_it(path, entry, _HOSTS_ONLY, key)
            continue
        if given and made:
            yield Problem(
                (*path, "provider"), f"both `{key}` and `provider`", "", "keep the one you mean, delete the other"
            )
            continue
        if not given and not made:
            if entry.get(key) == []:
                yield Problem((*path, key), "an empty list of hosts", "[]", "name at least one host")
            else:
                yield Problem(path, f"neither `{key}` nor `provider`", "", f"add `{key}`, or `provider: sandbox`")
            continue
        yield from _none_of_it(path, entry, _PROVIDER_ONLY if given else _HOSTS_ONLY, "provider" if given else key)
        if entry.get("provider") == "sandbox" and key == "hosts" and not _is_set(entry, "count"):
            yield Problem(path, "missing key `count`", "", "say how many hosts to make: `count: 2`")


def _none_of_it(path: Path, entry: Mapping[str, Any], keys: tuple[str, ...], other: str) -> Iterator[Problem]:
    for name in keys:
        if _is_set(entry, name):
            yield Problem((*path, name), f"`{name}` without `{other}`", "", f"delete it, or use `{other}`")


def _hosts_once(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Every host has one place in the cluster. Names are compared as DNS does, without regard to case."""
    seen: dict[str, tuple[str, Path]] = {}
    for owner, path, name in (*_hosts(data), *rented_names(data)):
        if name.lower() not in seen:
            seen[name.lower()] = (owner, path)
            continue
        first, where = seen[name.lower()]
        if first == owner:
            yield Problem(path, "duplicate host", show(name), f"it is named at {path_text(where)} already")
        elif first in ("controller", "login"):
            both = "; for a controller that also runs jobs use `controller: {compute: true}`"
            hint = both if first == "controller" and owner != "login" else ""
            yield Problem(path, f"host is already the {first}'s", show(name), f"name it once{hint}")
        else:
            yield Problem(path, "host in two nodesets", show(name), f"it is in `{first}` already; keep one")


def _partitions(data: Mapping[str, Any]) -> Iterator[Problem]:
    """A partition has nodesets, and lists each once."""
    known = _computing(data)
    for name, partition in _entries(data, "partitions"):
        path: Path = ("partitions", name, "nodesets")
        if partition.get("nodesets") in ([], ()):
            yield Problem(path, "a partition without nodesets", "[]", "list at least one")
        listed: set[str] = set()
        for where, nodeset in _items(path, partition.get("nodesets")):
            if not isinstance(nodeset, str):
                continue
            if nodeset in listed:
                yield Problem(where, "nodeset listed twice", show(nodeset), "delete one")
            elif nodeset == "controller" and nodeset not in known:
                yield Problem(where, "the controller runs no jobs", show(nodeset), "set `compute: true` on it")
            elif nodeset not in known and isinstance(data.get("nodesets", {}), Mapping):
                yield Problem(where, "unknown nodeset", show(nodeset), nearest(nodeset, known))
            listed.add(nodeset)


def _one_default(data: Mapping[str, Any]) -> Iterator[Problem]:
    first: str | None = None
    for name, partition in _entries(data, "partitions"):
        if partition.get("default") is not True:
            continue
        if first is not None:
            path = ("partitions", name, "default")
            yield Problem(path, "two default partitions", show(name), f"`{first}` is one already")
        first = first or name


def _left_out(data: Mapping[str, Any]) -> Iterator[Problem]:
    """A warning for each nodeset that no partition lists, once the partitions themselves are in order."""
    known, lists = _computing(data), [partition.get("nodesets") for _, partition in _entries(data, "partitions")]
    listed: list[object] = []
    for sets in lists:
        listed += sets if isinstance(sets, list | tuple) else [None]
    if not lists or any(nodeset not in known for nodeset in listed):
        return
    for nodeset in known:
        if nodeset not in listed:
            where: Path = ("controller", "compute") if nodeset == "controller" else ("nodesets", nodeset)
            yield Problem(where, "in no partition: no job can run there", "", "list it in a partition", "warning")


def _computing(data: Mapping[str, Any]) -> list[str]:
    """What a partition may list."""
    computes = _mapping(data, "controller").get("compute") is True
    names = [name for name in _mapping(data, "nodesets") if name != "controller"]
    return [*names, "controller"] if computes else names


def _times(data: Mapping[str, Any]) -> Iterator[Problem]:
    for name, partition in _entries(data, "partitions"):
        longest, usual = _minutes(partition.get("max_time")), _minutes(partition.get("default_time"))
        if longest is not None and usual is not None and usual > longest:
            yield Problem(
                ("partitions", name, "default_time"),
                "longer than `max_time`",
                show(partition["default_time"]),
                f"give at most {partition['max_time']}",
            )


def _preemption(data: Mapping[str, Any]) -> Iterator[Problem]:
    """A job that can be preempted must have the time to save that it counts on."""
    partitions = _entries(data, "partitions")
    highest = max((_number(partition.get("priority"), 1) for _, partition in partitions), default=1)
    for name, partition in partitions:
        path, grace = ("partitions", name, "grace"), _number(partition.get("grace"), GRACE_SECONDS)
        if partition.get("preemptable") is False and grace != GRACE_SECONDS:
            yield Problem(path, "`grace` where no job is preempted", show(grace), "delete it, or `preemptable`")
        elif 0 <= grace < GRACE_SECONDS and _number(partition.get("priority"), 1) < highest:
            what = "a preempted job has less time to save than it counts on"
            yield Problem(path, what, f"{grace} s", f"give at least {GRACE_SECONDS}", "warning")


def _options_once(data: Mapping[str, Any]) -> Iterator[Problem]:
    """slurm.conf does not tell upper from lower case in its keys."""
    seen: dict[str, str] = {}
    for key in _mapping(_mapping(data, "slurm"), "options"):
        if key.lower() in seen:
            fix = f"`{seen[key.lower()]}` is the same key to Slurm; delete one"
            yield Problem(("slurm", "options", key), "duplicate key", show(key), fix)
        seen.setdefault(key.lower(), key)


def _something_computes(data: Mapping[str, Any]) -> Iterator[Problem]:
    controller = data.get("controller")
    if isinstance(controller, Mapping) and not controller.get("compute") and data.get("nodesets", {}) == {}:
        yield Problem((), "no host runs jobs", "", "add `nodesets`, or set `compute: true` on the controller")


def _host_sets(data: Mapping[str, Any]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for key in ("controller", "login"):
        if isinstance(data.get(key), Mapping):
            yield (key,), data[key]
    for name, nodeset in _entries(data, "nodesets"):
        yield ("nodesets", name), nodeset


def _hosts(data: Mapping[str, Any]) -> Iterator[tuple[str, Path, str]]:
    """Every host by the set it belongs to, its place, and its name."""
    for path, entry in _host_sets(data):
        owner = str(path[-1])
        key = "host" if owner == "controller" and len(path) == 1 else "hosts"
        given = entry.get(key)
        entries = [((*path, key), given)] if key == "host" else _items((*path, key), given)
        for place, host in entries:
            for name in _names(host):
                yield owner, place, name
        if entry.get("provider") != "sandbox" or given:
            continue
        if key == "host":
            yield owner, path, "controller"
        elif isinstance(count := entry.get("count"), int) and 1 <= count <= 64:
            for number in range(1, count + 1):
                yield owner, path, f"{owner}{number}"


def _names(host: object) -> list[str]:
    text = host.get("name") if isinstance(host, Mapping) else host
    if not isinstance(text, str):
        return []
    if not isinstance(host, Mapping):
        text = text.rpartition("@")[2]
        text = text if text.count(":") > 1 else text.partition(":")[0]
    try:
        return hostlist.expand(text)
    except ValueError:
        return []


def _items(path: Path, value: object) -> list[tuple[Path, Any]]:
    return [((*path, index), item) for index, item in enumerate(value)] if isinstance(value, list | tuple) else []


def _entries(data: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, entry) for name, entry in _mapping(data, key).items() if isinstance(entry, Mapping)]


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


def _is_set(entry: Mapping[str, Any], key: str) -> bool:
    """Whether the entry says something by this key. A model's own default says nothing."""
    value = entry.get(key)
    return value is not None and value != () and value != [] and value != _DEFAULTS.get(key)


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _minutes(value: object) -> float | None:
    try:
        return None if value is None else minutes(slurm_time(value))
    except PydanticCustomError:
        return None
