"""A controller and login hosts that are rented: their rules, and the spec once it is known where they are. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shoal.spec.finding import Path as FilePlace
from shoal.spec.finding import Problem, nearest, show
from shoal.spec.hosts import Controller, HostEntry, Login
from shoal.spec.member import Placement
from shoal.spec.network import Network
from shoal.spec.rental import KINDS, SANDBOX, ProviderAccount, kinds

if TYPE_CHECKING:
    from shoal.spec.model import Spec

NOT_FOR_GOOD = {
    "digitalocean": "Shoal cannot reserve an address there yet",
    "lambda": "its machines cannot be stopped, and get another address and an empty disk when they are ordered again",
    "nebius": "Shoal cannot reserve an address there yet",
    "paperspace": "Shoal cannot reserve an address there yet",
    "runpod": "its machines are containers without an init system and without an address of their own",
    SANDBOX: "it simulates machines that come and go; `provider: sandbox` makes hosts that stay",
    "vast": "its machines are containers of strangers, which end with their contract",
}
"""Why a provider rents out no controller and no login host. Not in it: disk and address of its machines stay."""
_FOREIGN_FIELDS = ("kind", "cpus", "memory", "gpus", "cgroups", "user", "port")
"""Fields of other hosts, which the machine's type and image decide."""

RentedSet = Controller | Login
Accounts = Mapping[str, ProviderAccount | None]


def rented_host_problems(
    controller: Controller | None, login: Login | None, accounts: Accounts, network: Network
) -> Iterator[Problem]:
    """Every rule about a rented controller and rented login hosts that does not hold."""
    for path, entry in located_sets(controller, login):
        problems = list(_set_problems(path, entry, accounts))
        yield from problems
        if network.kind == "lan" and not problems and entry.provider is not None:
            fix = "set `network: wireguard`"
            what = "a rented host in a LAN: providers translate its address, so Slurm cannot use it"
            yield Problem((*path, "provider"), what, show(entry.provider), fix)


def located_sets(controller: Controller | None, login: Login | None) -> list[tuple[FilePlace, RentedSet]]:
    """The controller and the login hosts, with their places, where they are rented."""
    sets: list[tuple[FilePlace, RentedSet | None]] = [(("controller",), controller), (("login",), login)]
    return [
        (path, entry)
        for path, entry in sets
        if entry is not None and entry.is_rented and not entry.is_set("host" if path == ("controller",) else "hosts")
    ]


def _set_problems(path: FilePlace, entry: RentedSet, accounts: Accounts) -> Iterator[Problem]:
    place, name = (*path, "provider"), entry.provider
    if name is None:
        return  # invalid, and reported so
    account = accounts.get(name)
    kind = (account.kind or name) if account is not None else name
    if reason := NOT_FOR_GOOD.get(kind):
        able = ", ".join(sorted({*kinds()} - {*NOT_FOR_GOOD}))
        yield Problem(place, f"{kind} rents out no host that stays: {reason}", show(name), f"rent it from {able}")
        return
    if name not in accounts:
        if name in KINDS:
            fix = f"add `providers: {{{name}: {{key: env:NAME}}}}`"
            yield Problem(place, "no account at this provider", show(name), fix)
        else:
            names = list(dict.fromkeys((SANDBOX, *accounts, *KINDS)))
            yield Problem(place, "unknown provider", show(name), nearest(name, names))
        return
    if not entry.is_set("type"):
        yield Problem(path, "missing key `type`", "", "say what to rent: `type: e2-standard-2`")
    for key in entry.set_among(_FOREIGN_FIELDS):
        yield Problem((*path, key), f"`{key}` of a rented host", "", "delete it: its type and its image decide")


def place_hosts(spec: Spec, placements: Mapping[str, Placement]) -> Spec:
    """The spec with rented hosts as hosts that exist already, where their places are known.

    The rest of Shoal, and the rental service on the controller, then treats them like any other host.
    """
    changes: dict[str, Any] = {}
    controller, login = spec.controller, spec.login
    for path, entry in located_sets(controller, login):
        if path == ("controller",) and "controller" in placements:
            host = _entry("controller", placements["controller"], spec.network)
            shared = {"compute": controller.compute, "site": controller.site}
            driver = {"driver": controller.driver} if controller.driver else {}
            placed = Controller.model_validate({"host": host, **shared, **driver})
            changes["controller"] = placed.model_copy(update={"usd_hour": controller.usd_hour})  # for the ledger
        elif isinstance(entry, Login):
            names = [f"login{number}" for number in range(1, (entry.count or 1) + 1)]
            if all(name in placements for name in names):
                hosts = [_entry(name, placements[name], spec.network) for name in names]
                placed_login = Login.model_validate({"hosts": hosts, "site": entry.site})
                changes["login"] = placed_login.model_copy(update={"usd_hour": entry.usd_hour})
    return spec.model_copy(update=changes) if changes else spec


def _entry(name: str, at: Placement, network: Network) -> HostEntry:
    endpoint = at.address if network.kind == "wireguard" else None
    fields = {"name": name, "address": at.address, "port": at.port, "user": at.user, "endpoint": endpoint}
    identity = {"identity": str(at.identity)} if at.identity else {}
    return HostEntry.model_validate({**{key: value for key, value in fields.items() if value is not None}, **identity})
