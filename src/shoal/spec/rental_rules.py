"""Rules between accounts at providers, rented nodesets, partitions and the network."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from shoal.spec.checks import minutes, seconds
from shoal.spec.finding import Path, Problem, nearest, show
from shoal.spec.hosts import Controller, NodeSet, NodeSets
from shoal.spec.network import Network
from shoal.spec.partitions import Partition, show_time
from shoal.spec.rental import (
    DEFAULT_IDLE_TIME,
    INTERVAL_SETTINGS,
    KINDS,
    LIFETIME,
    PRIVATE_NETWORKS,
    SANDBOX,
    SETTING_CHOICES,
    SETTINGS,
    Budget,
    OfferChoice,
    ProviderAccount,
    kinds,
)

Accounts = Mapping[str, ProviderAccount | None]
"""None stands for an entry of the file that is not an account."""

RENTAL_FIELDS = (
    *("max", "type", "region", "zone", "market", "idle", "lifetime", "max_price", "offers", "prefer", "budget"),
)
"""The fields that only a rented nodeset has."""
_LIMITS = ("per_hour", "per_day", "per_month")


def rental_problems(
    accounts: Accounts,
    nodesets: NodeSets,
    partitions: Mapping[str, Partition | None],
    budget: Budget | None,
    hosts: Collection[str | None] = (),
) -> Iterator[Problem]:
    """Every rule about rented machines that does not hold. `hosts` has the accounts of rented hosts that stay."""
    readable = {name: nodeset for name, nodeset in nodesets.items() if nodeset is not None}
    yield from _account_problems(accounts, readable, hosts)
    for name, nodeset in readable.items():
        yield from _nodeset_problems(("nodesets", name), nodeset, accounts)
        yield from _budget_problems(("nodesets", name, "budget"), nodeset.budget)
    yield from _budget_problems(("budget",), budget)
    rentals = {name: nodeset for name, nodeset in readable.items() if nodeset.is_rental}
    if budget is not None and not rentals and not hosts:
        yield Problem(("budget",), "nothing is rented", "", "delete it, or give a nodeset a provider", "warning")
    yield from _lifetime_problems(rentals, partitions)


def hub_problems(network: Network, controller: str | None, nodesets: NodeSets) -> Iterator[Problem]:
    """The controller admits rented nodes, so the way to them goes through it."""
    rents = any(nodeset is not None and nodeset.is_rental for nodeset in nodesets.values())
    if rents and controller is not None and network.hub not in (None, controller):
        fix = "delete it: the way to rented nodes goes through the controller"
        yield Problem(("network", "hub"), "not the controller, and nodes are rented", show(network.hub), fix)


def lan_problems(
    network: Network, controller: Controller | None, accounts: Accounts, nodesets: NodeSets
) -> Iterator[Problem]:
    """In a LAN, rented machines reach only a controller that is in a private network of their provider.

    It is there if the account has the setting of such a network, or if both have the same site. An account with a `url`
    is at a simulator, or at an API of one's own. A rented controller has a rule of its own.
    """
    if network.kind != "lan" or controller is None or controller.is_rented:
        return
    for name, nodeset in nodesets.items():
        if nodeset is None or (
            controller.is_set("site") and nodeset.is_set("site") and controller.site == nodeset.site
        ):
            continue
        places = _named_accounts(("nodesets", name), nodeset)
        public = [(place, account) for place, account in places if _is_public(account, accounts.get(account))]
        for place, account in public[:1]:
            what = (
                "rented machines in a LAN: they reach no controller elsewhere, and cost money until they are replaced"
            )
            fix = (
                "set `network: wireguard`; or, if the controller is in their private network, give both the same `site`"
            )
            yield Problem(place, what, show(account), fix, "warning")


def _is_public(name: str, account: ProviderAccount | None) -> bool:
    """Whether machines of an account are behind a provider's addresses, in no private network that the file names."""
    if account is None or account.is_set("url"):
        return False
    networks = PRIVATE_NETWORKS.get(account.kind or name)
    return networks is not None and not {*networks} & {*account.settings}


def _account_problems(
    accounts: Accounts, nodesets: Mapping[str, NodeSet], hosts: Collection[str | None]
) -> Iterator[Problem]:
    """An account names its provider and its credentials, and something is rented from it."""
    used = {account for nodeset in nodesets.values() for _, account in _named_accounts((), nodeset)}
    used |= {account for account in hosts if account is not None}
    offers = [offer for nodeset in nodesets.values() for offer in nodeset.offers]
    # A name that is unknown or invalid may mean any of the accounts.
    unknown = None in hosts or any(offer is None or "provider" in offer.invalid for offer in offers)
    all_known = used <= {*accounts} and not unknown
    for name, account in accounts.items():
        if account is None:
            continue
        path: Path = ("providers", name)
        kind = account.kind or name
        if not account.is_set("kind") and name not in kinds():
            yield Problem(path, "missing key `kind`", "", f"say which provider it is: {', '.join(KINDS)}")
        elif kind not in KINDS and kind in kinds() and not account.is_set("package"):
            fix = "name the package that has this kind, for the controller: `package: shoal-mine>=1`"
            yield Problem(path, "missing key `package`", "", fix)
        kind = "" if "kind" in account.invalid else kind
        if kind == SANDBOX and not account.is_set("url"):
            yield Problem(path, "missing key `url`", "", "give the address of your `shoal simulate sandbox` server")
        if kind in KINDS and kind not in (SANDBOX, "gcp") and not account.is_set("key"):
            yield Problem(path, "missing key `key`", "", "say where the API key is: env:NAME or file:PATH")
        if kind == "gcp" and not account.is_set("project"):
            yield Problem(path, "missing key `project`", "", "name the project that pays")
        elif account.is_set("project") and "project" not in SETTINGS.get(kind, ("project",)):
            yield Problem(
                (*path, "project"), f"`project` for {kind}", "", "delete it: only Google and Nebius have them"
            )
        yield from _setting_problems(path, kind, account)
        if name not in used and all_known:
            yield Problem(path, "nothing is rented from it", "", "name it in one, or delete it", "warning")


def _setting_problems(path: Path, kind: str, account: ProviderAccount) -> Iterator[Problem]:
    """Every setting is one that the provider uses: a misspelt one would have no effect."""
    if kind not in SETTINGS or "settings" in account.invalid:
        return
    names = [*SETTINGS[kind], *INTERVAL_SETTINGS[:2]]
    for name, value in account.settings.items():
        place = (*path, "settings", name)
        if name not in names:
            yield Problem(place, f"unknown setting of {kind}", show(name), nearest(name, names))
        elif name in INTERVAL_SETTINGS and not re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
            yield Problem(place, "not a number of seconds", show(value), "write a number, such as 2 or 0.5")
        elif (options := SETTING_CHOICES.get((kind, name))) and value.lower() not in options:
            yield Problem(place, f"unknown {name}", show(value), f"choose one of {', '.join(options)}")


def _nodeset_problems(path: Path, nodeset: NodeSet, accounts: Accounts) -> Iterator[Problem]:
    if nodeset.is_set("hosts") or not nodeset.is_rental:
        for key in nodeset.set_among(RENTAL_FIELDS):
            fix = "delete it, or say `max` and a provider in place of hosts that are always there"
            yield Problem((*path, key), f"`{key}` where nothing is rented", "", fix)
        return
    if "provider" in nodeset.invalid or nodeset.provider not in (None, *KINDS, *accounts):
        yield from _offer_problems(path, nodeset, accounts)  # it may not be meant as a rented nodeset
        return
    if nodeset.is_set("count") and nodeset.is_set("max"):
        yield Problem((*path, "count"), "both `count` and `max`", "", "keep `max`: rented nodes come and go")
    elif nodeset.is_set("count"):
        yield Problem((*path, "count"), "`count` where nodes are rented", "", "call it `max`: rented nodes come and go")
    elif not nodeset.is_set("max"):
        yield Problem(path, "missing key `max`", "", "say how many nodes it may have: `max: 4`")
    for key in nodeset.set_among(("kind", "cgroups")):
        yield Problem((*path, key), f"`{key}` where nodes are rented", "", "delete it: the provider's type decides")
    if nodeset.is_set("offers"):
        for key in nodeset.set_among(OfferChoice.model_fields):
            yield Problem((*path, key), f"both `{key}` and `offers`", "", "write it into the offers")
    elif not nodeset.is_set("type"):
        what = "neither `type` nor `offers`" if nodeset.is_set("provider") else "neither `provider` nor `offers`"
        yield Problem(path, what, "", "say what to rent: `provider: lambda` with `type: gpu_1x_a10`")
    yield from _offer_problems(path, nodeset, accounts)


def _offer_problems(path: Path, nodeset: NodeSet, accounts: Accounts) -> Iterator[Problem]:
    """Every offer names an account of the file and a type; none is there twice."""
    for place, account in _named_accounts(path, nodeset):
        if account in accounts:
            continue
        if account in KINDS:
            sample = "{url: http://...}" if account == SANDBOX else "{key: env:NAME}"
            fix = f"add `providers: {{{account}: {sample}}}`"
            yield Problem(place, "no account at this provider", show(account), fix)
        else:
            fix = nearest(account, list(dict.fromkeys((*accounts, *KINDS))))
            yield Problem(place, "unknown provider", show(account), fix)
    earlier: list[OfferChoice] = []
    for index, offer in enumerate(nodeset.offers):
        if offer is None:
            continue
        place = (*path, "offers", index)
        if not offer.is_set("type"):
            yield Problem(place, "missing key `type`", "", "say what to rent there: `type: gpu_1x_a10`")
        if offer in earlier and not offer.invalid:
            yield Problem(place, "the same offer twice", "", "delete one")
        earlier.append(offer)


def _budget_problems(path: Path, budget: Budget | None) -> Iterator[Problem]:
    """A budget has a limit, and a day's is not above a month's."""
    if budget is None:
        return
    limits = budget.set_among(_LIMITS)
    if not limits:
        yield Problem(path, "a budget without a limit", "", f"give one of {', '.join(_LIMITS)}")
    day, month = budget.per_day, budget.per_month
    if day is not None and month is not None and day > month:
        yield Problem((*path, "per_day"), "more than `per_month`", f"{day:.10g}", f"give at most {month:.10g}")
    if budget.is_set("after") and budget.then != "end":
        yield Problem((*path, "after"), "`after` where nothing is ended", "", "say `then: end`, or delete it")
    elif budget.then == "end" and limits == ["per_hour"]:
        fix = "give per_day or per_month too: only what is spent can be used up"
        yield Problem((*path, "then"), "an hour's limit alone ends nothing", "", fix, "warning")


def _lifetime_problems(rentals: Mapping[str, NodeSet], partitions: Mapping[str, Partition | None]) -> Iterator[Problem]:
    """A node waits for jobs for less than its lifetime, and jobs do not outlive their nodes."""
    lifetimes = {
        name: seconds(nodeset.lifetime or LIFETIME)
        for name, nodeset in rentals.items()
        if "lifetime" not in nodeset.invalid
    }
    for name in lifetimes:
        idle = rentals[name].idle or DEFAULT_IDLE_TIME
        if "idle" not in rentals[name].invalid and seconds(idle) >= lifetimes[name]:
            yield Problem(("nodesets", name, "idle"), "not less than `lifetime`", "", "give less")
    for name, partition in partitions.items():
        if partition is None or partition.max_time is None:
            continue
        for nodeset_name in partition.over(list(rentals)).nodesets or ():
            if 60 * minutes(partition.max_time) > lifetimes.get(nodeset_name, float("inf")):
                what = f"a job may run for longer than a node of `{nodeset_name}` is kept"
                fix = f"give at most its `lifetime`, or raise that: nodesets.{nodeset_name}.lifetime"
                place = ("partitions", name, "max_time")
                yield Problem(place, what, show_time(partition.max_time), fix, "warning")


def _named_accounts(path: Path, nodeset: NodeSet) -> Iterator[tuple[Path, str]]:
    """The accounts that a rented nodeset names, each with its place."""
    if not nodeset.is_rental:
        return
    for index, offer in enumerate(nodeset.offers):
        if offer is not None and offer.provider is not None:
            yield (*path, "offers", index, "provider"), offer.provider
    if not nodeset.is_set("offers") and nodeset.provider is not None:
        yield (*path, "provider"), nodeset.provider
