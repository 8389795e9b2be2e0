"""What must hold between accounting and the rest of a spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.spec.accounting import NORMAL, ROOT
from shoal.spec.problem import Path, Problem, nearest
from shoal.spec.words import show

OWN_KEYS = (
    *("accountingstoragetype", "accountingstoragehost", "accountingstorageport", "accountingstorageenforce"),
    *("accountingstoragetres", "accountingstoragebackuphost", "accountingstoragepass", "accountingstorageuser"),
)


def accounting_problems(data: Mapping[str, Any], hosts: Sequence[str]) -> Iterator[Problem]:
    """Every rule about accounting that does not hold. `hosts` are the names of all members."""
    accounting = data.get("accounting")
    if not isinstance(accounting, Mapping):
        return
    host = accounting.get("host")
    if isinstance(host, str) and host not in hosts:
        yield Problem(("accounting", "host"), "no host of the cluster", show(host), nearest(host, list(hosts)))
    accounts, qos = _mapping(accounting, "accounts"), _mapping(accounting, "qos")
    if qos and not accounts:
        what = "`qos` without `accounts`: Slurm holds nobody to a limit whose account it does not know"
        yield Problem(("accounting", "qos"), what, "", "add `accounts`: {lab: {users: [ann]}}")
    yield from _parents(accounts)
    yield from _own_keys(data)
    known = list(dict.fromkeys((NORMAL, *qos)))
    for name, account in accounts.items():
        path: Path = ("accounting", "accounts", name)
        if not isinstance(account, Mapping):
            continue
        yield from _qos(path, account, known)
        for user, share in _mapping(account, "users").items():
            if user == ROOT:
                yield Problem((*path, "users"), "root is Slurm's administrator already", show(user), "delete it")
            if isinstance(share, Mapping):
                yield from _qos((*path, "users", user), share, known)


def _own_keys(data: Mapping[str, Any]) -> Iterator[Problem]:
    """What `accounting` writes into slurm.conf is not for `slurm.options`, too."""
    for key in _mapping(_mapping(data, "slurm"), "options"):
        if isinstance(key, str) and key.lower() in OWN_KEYS:
            yield Problem(("slurm", "options", key), "`accounting` writes this key itself", "", "delete it here")


def _parents(accounts: Mapping[str, Any]) -> Iterator[Problem]:
    """Every account is part of one that is there, and none of itself."""
    parents = {
        name: str(account.get("parent") or ROOT) for name, account in accounts.items() if isinstance(account, Mapping)
    }
    for name, parent in parents.items():
        path = ("accounting", "accounts", name, "parent")
        if parent != ROOT and parent not in parents:
            yield Problem(path, "unknown account", show(parent), nearest(parent, [*parents, ROOT]))
            continue
        seen, at = {name}, parent
        while at in parents and at not in seen:
            seen.add(at)
            at = parents[at]
        if at == name:
            yield Problem(path, "an account that is part of itself", show(parent), "break the circle")


def _qos(path: Path, share: Mapping[str, Any], known: list[str]) -> Iterator[Problem]:
    asked = share.get("qos") or ()
    for name in asked if isinstance(asked, list | tuple) else ():
        if isinstance(name, str) and name not in known:
            yield Problem((*path, "qos"), "unknown QOS", show(name), nearest(name, known))
    default = share.get("default_qos")
    if not isinstance(default, str):
        return
    if default not in known:
        yield Problem((*path, "default_qos"), "unknown QOS", show(default), nearest(default, known))
    elif asked and default not in asked:
        fix = f"add {default} to `qos`, or choose one of them"
        yield Problem((*path, "default_qos"), "not among its `qos`", show(default), fix)


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}
