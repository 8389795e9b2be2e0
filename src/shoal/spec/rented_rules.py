"""What must hold between accounts at providers, rented nodesets and the rest of a spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from shoal.spec.problem import Path, Problem, nearest
from shoal.spec.rented import IDLE, KINDS, LIFETIME, MOST, SANDBOX, kinds
from shoal.spec.words import duration, minutes, seconds, show, slurm_time

RENTED_ONLY = ("type", "region", "zone", "market", "idle", "lifetime", "max_price", "offers", "prefer", "budget")
"""What only a nodeset with `max` may say."""
DEFAULTS: Mapping[str, object] = {"market": "on-demand", "prefer": "listed"}
_IN_OFFERS = ("provider", "type", "region", "zone", "market")
_NOT_RENTED = ("image", "cgroups")
_LIMITS = ("per_hour", "per_day", "per_month")


def says(entry: Mapping[str, Any], key: str) -> bool:
    """Whether a nodeset says something by this key. A model's own default says nothing."""
    value = entry.get(key)
    return value is not None and value not in ((), []) and value != DEFAULTS.get(key)


def rents(entry: Mapping[str, Any]) -> bool:
    """Whether a nodeset is meant to be rented, even where it does not say all that takes."""
    provider = entry.get("provider")
    other = isinstance(provider, str) and provider != SANDBOX
    return says(entry, "max") or says(entry, "offers") or other


def rented_names(data: Mapping[str, Any]) -> Iterator[tuple[str, Path, str]]:
    """Every node that may be rented, by its nodeset, its place and its name."""
    for name, entry in _nodesets(data):
        most = entry.get("max")
        if isinstance(most, int) and not isinstance(most, bool) and 1 <= most <= MOST:
            for number in range(1, most + 1):
                yield name, ("nodesets", name), f"{name}{number}"


def rented_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Every rule about rented machines that does not hold."""
    yield from _accounts(data)
    for name, entry in _nodesets(data):
        yield from _nodeset(data, name, entry)
    yield from _budgets(data)
    yield from _network(data)
    yield from _lifetimes(data)


def _accounts(data: Mapping[str, Any]) -> Iterator[Problem]:
    """An account says which provider it is at, and how to get in."""
    used = {offered for _, entry in _nodesets(data) for _, offered in _offered((), entry)}
    for name, account in _entries(data, "providers"):
        path: Path = ("providers", name)
        kind = account.get("kind") or name
        if account.get("kind") is None and isinstance(name, str) and name not in KINDS and name not in kinds():
            yield Problem(path, "missing key `kind`", "", f"say which provider it is: {', '.join(KINDS)}")
        elif kind not in KINDS and kind in kinds() and account.get("package") is None:
            fix = "name the package that has this kind, for the controller: `package: shoal-mine>=1`"
            yield Problem(path, "missing key `package`", "", fix)
        if kind == SANDBOX and account.get("url") is None:
            yield Problem(path, "missing key `url`", "", "give the address of your `shoal simulate sandbox` server")
        if kind in KINDS and kind != SANDBOX and account.get("key") is None:
            yield Problem(path, "missing key `key`", "", "say where the API key is: env:NAME or file:PATH")
        if kind == "gcp" and account.get("project") is None:
            yield Problem(path, "missing key `project`", "", "name the project that pays")
        if name not in used and used <= {*_mapping(data, "providers")}:  # else it may be the one that was meant
            yield Problem(path, "no nodeset rents from it", "", "name it in one, or delete it", "warning")


def _nodeset(data: Mapping[str, Any], name: str, entry: Mapping[str, Any]) -> Iterator[Problem]:
    path: Path = ("nodesets", name)
    if says(entry, "hosts") or not rents(entry):
        for key in ("max", *RENTED_ONLY):
            if says(entry, key):
                fix = "delete it, or say `max` and a provider in place of hosts that are always there"
                yield Problem((*path, key), f"`{key}` where nothing is rented", "", fix)
        return
    provider = entry.get("provider")
    if provider not in (None, *KINDS, *_mapping(data, "providers")):
        yield from _offers(data, path, entry)  # nobody can say yet whether it was meant to be rented
        return
    if says(entry, "count") and says(entry, "max"):
        yield Problem((*path, "count"), "both `count` and `max`", "", "keep `max`: rented nodes come and go")
    elif says(entry, "count"):
        yield Problem((*path, "count"), "`count` where nodes are rented", "", "call it `max`: rented nodes come and go")
    elif not says(entry, "max"):
        yield Problem(path, "missing key `max`", "", "say how many nodes it may have: `max: 4`")
    for key in _NOT_RENTED:
        if entry.get(key) not in (None, False, "debian12"):
            yield Problem((*path, key), f"`{key}` where nodes are rented", "", "delete it: the provider's type decides")
    if says(entry, "offers"):
        for key in _IN_OFFERS:
            if says(entry, key):
                yield Problem((*path, key), f"both `{key}` and `offers`", "", "write it into the offers")
    elif entry.get("type") is None:
        what = "neither `type` nor `offers`" if says(entry, "provider") else "neither `provider` nor `offers`"
        yield Problem(path, what, "", "say what to rent: `provider: lambda` with `type: gpu_1x_a10`")
    yield from _offers(data, path, entry)


def _offers(data: Mapping[str, Any], path: Path, entry: Mapping[str, Any]) -> Iterator[Problem]:
    """Every offer names an account that the file has, and a type; none is there twice."""
    known = list(_mapping(data, "providers"))
    for where, account in _offered(path, entry):
        if account in known:
            continue
        if account in KINDS:
            sample = "{url: http://...}" if account == SANDBOX else "{key: env:NAME}"
            fix = f"add `providers: {{{account}: {sample}}}`"
            yield Problem(where, "no account at this provider", show(account), fix)
        else:
            fix = nearest(account, list(dict.fromkeys((*known, *KINDS))))
            yield Problem(where, "unknown provider", show(account), fix)
    seen: list[object] = []
    offers = entry.get("offers")
    for index, offer in enumerate(offers) if isinstance(offers, list | tuple) else ():
        if not isinstance(offer, Mapping):
            continue
        place = (*path, "offers", index)
        if offer.get("type") is None:
            yield Problem(place, "missing key `type`", "", "say what to rent there: `type: gpu_1x_a10`")
        said = tuple(str(offer.get(key) or DEFAULTS.get(key)) for key in _IN_OFFERS)
        if said in seen:
            yield Problem(place, "the same offer twice", "", "delete one")
        seen.append(said)


def _budgets(data: Mapping[str, Any]) -> Iterator[Problem]:
    """A budget has a limit, and the smaller period not more than the larger one has."""
    budgets: list[tuple[Path, Any]] = [(("budget",), data.get("budget"))]
    budgets += [(("nodesets", name, "budget"), entry.get("budget")) for name, entry in _nodesets(data)]
    for path, budget in budgets:
        if not isinstance(budget, Mapping):
            continue
        if all(budget.get(key) is None for key in _LIMITS):
            yield Problem(path, "a budget without a limit", "", f"give one of {', '.join(_LIMITS)}")
        day, month = budget.get("per_day"), budget.get("per_month")
        if isinstance(day, int | float) and isinstance(month, int | float) and day > month:
            yield Problem((*path, "per_day"), "more than `per_month`", str(day), f"give at most {month}")
        if budget.get("after") is not None and budget.get("then") != "end":
            yield Problem((*path, "after"), "`after` where nothing is ended", "", "say `then: end`, or delete it")
        elif budget.get("then") == "end" and day is None and month is None and budget.get("per_hour") is not None:
            fix = "give per_day or per_month too: only what is spent can be used up"
            yield Problem((*path, "then"), "an hour's limit alone ends nothing", "", fix, "warning")
    if data.get("budget") is not None and not any(rents(entry) for _, entry in _nodesets(data)):
        yield Problem(("budget",), "nothing is rented", "", "delete it, or give a nodeset a provider", "warning")


def _network(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Rented nodes are let in by the controller, so the way to them goes through it."""
    network = data.get("network")
    hub = network.get("hub") if isinstance(network, Mapping) else None
    if isinstance(hub, str) and hub != _controller(data) and any(rents(entry) for _, entry in _nodesets(data)):
        fix = "delete it: the way to rented nodes goes through the controller"
        yield Problem(("network", "hub"), "not the controller, and nodes are rented", show(hub), fix)


def _controller(data: Mapping[str, Any]) -> str:
    host = _mapping(data, "controller").get("host")
    named = host.get("name") if isinstance(host, Mapping) else host
    return named.rpartition("@")[2].partition(":")[0] if isinstance(named, str) else "controller"


def _lifetimes(data: Mapping[str, Any]) -> Iterator[Problem]:
    """A warning for jobs that may run for longer than the machine they run on is kept."""
    lives = {
        name: life
        for name, entry in _nodesets(data)
        if rents(entry) and (life := _seconds(entry.get("lifetime"), LIFETIME)) is not None
    }
    for name, entry in _nodesets(data):
        idle = _seconds(entry.get("idle"), IDLE)
        if name in lives and idle is not None and idle >= lives[name]:
            yield Problem(("nodesets", name, "idle"), "not less than `lifetime`", "", "give less")
    for name, partition in _entries(data, "partitions"):
        longest = _job_seconds(partition.get("max_time"))
        named = partition.get("nodesets")
        for nodeset in named if isinstance(named, list | tuple) else ():
            if isinstance(nodeset, str) and nodeset in lives and longest is not None and longest > lives[nodeset]:
                what = f"a job may run for longer than a node of `{nodeset}` is kept"
                fix = f"give at most its `lifetime`, or raise that: nodesets.{nodeset}.lifetime"
                yield Problem(("partitions", name, "max_time"), what, show(partition["max_time"]), fix, "warning")


def _offered(path: Path, entry: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """The accounts that a rented nodeset names, each with its place."""
    if not rents(entry):
        return
    offers = entry.get("offers")
    for index, offer in enumerate(offers) if isinstance(offers, list | tuple) else ():
        if isinstance(offer, Mapping) and isinstance(offer.get("provider"), str):
            yield (*path, "offers", index, "provider"), offer["provider"]
    if not offers and isinstance(entry.get("provider"), str):
        yield (*path, "provider"), entry["provider"]


def _seconds(value: object, default: str) -> int | None:
    try:
        return seconds(duration(default if value is None else value))
    except PydanticCustomError:
        return None


def _job_seconds(value: object) -> float | None:
    try:
        return None if value is None else 60 * minutes(slurm_time(value))
    except PydanticCustomError:
        return None


def _nodesets(data: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return _entries(data, "nodesets")


def _entries(data: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, entry) for name, entry in _mapping(data, key).items() if isinstance(entry, Mapping)]


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}
