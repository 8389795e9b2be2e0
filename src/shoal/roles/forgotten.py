"""Rented machines that a new file would leave without anybody who gives them back: they would cost money for good.

The service on the controller rents and gives back with the accounts of the file that is in force. A machine of an
account that the next file does not have, or has at another place, is one that nobody can ask about any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.agent.facts import Facts
from shoal.spec.finding import Finding
from shoal.spec.model import Spec
from shoal.spec.rented import account_settings, accounts, rented_sets

STATUS = "/var/lib/shoal/elastic/status.json"
"""What the service says of itself at the end of every step, with each machine that is there or may be."""
ACCOUNTS = "/etc/shoal/elastic/accounts.json"
"""The accounts that it has, without their keys."""


@dataclass(frozen=True)
class Forgotten:
    """A machine that nobody would give back."""

    token: str
    node: str
    account: str
    id: str
    """The provider's name of it; empty while it is only ordered."""
    state: str
    """As in the ledger: `intended`, `made`, `joined` or `releasing`."""

    def __str__(self) -> str:
        return f"{self.node} ({self.account} {self.id or 'on order'})"


def strangers(spec: Spec, controller: Facts | None) -> tuple[Forgotten, ...]:
    """The machines of accounts that the file does not have, or has at another place."""
    before = _object(controller, ACCOUNTS)
    return _machines(controller, lambda account: _is_another(spec, account, before.get(account)))


def forgotten(spec: Spec, controller: Facts | None) -> tuple[Forgotten, ...]:
    """The machines that nobody gives back once this file is in force: where it rents nothing, all there are."""
    return strangers(spec, controller) if rented_sets(spec) else machines_on(controller)


def machines_on(host: Facts | None) -> tuple[Forgotten, ...]:
    """All that the service on a host has rented, as it last said."""
    return _machines(host, lambda account: True)


def given_up(spec: Spec, controller: Facts | None) -> frozenset[str]:
    """The accounts that the service is to lose by this file, also to another place; all where it is to go."""
    before = _object(controller, ACCOUNTS)
    return frozenset(name for name, was in before.items() if not rented_sets(spec) or _is_another(spec, name, was))


def forgotten_finding(spec: Spec, machines: Sequence[Forgotten], host: str) -> Finding:
    """What to say of such machines."""
    named = accounts(spec)
    gone = list(dict.fromkeys(one.account for one in machines if one.account not in named))
    moved = list(dict.fromkeys(one.account for one in machines if one.account in named))
    if gone:
        why, back = f"the file has no account {', '.join(gone)} any more", "put it back until they are gone"
    elif rented_sets(spec):
        why, back = f"account {', '.join(moved)} is another one in the file now", "put it back until they are gone"
    else:
        why, back = "the file has no nodeset that is rented any more", "put one back until they are gone"
    return Finding(
        "error",
        f"rented machines would be left to cost money, as {why}",
        ", ".join(map(str, machines)),
        f"{back}, or run `shoal reap` with the old file",
        host=host,
    )


def _is_another(spec: Spec, name: str, was: object) -> bool:
    """Whether the file does not have an account that the service has, or has it at another place."""
    now = accounts(spec).get(name)
    if now is None:
        return True
    if not isinstance(was, dict):
        return False
    settings = was.get("settings")
    projects = {account_settings(now).get("project"), settings.get("project") if isinstance(settings, dict) else None}
    # A project that is not written is the key's own, which is most likely the one that somebody writes out later.
    return (now.kind or name, now.url or "") != (was.get("kind"), was.get("url")) or len(projects - {None, ""}) > 1


def _machines(controller: Facts | None, wanted: Callable[[str], bool]) -> tuple[Forgotten, ...]:
    listed = _object(controller, STATUS).get("machines")
    found = []
    for token, one in listed.items() if isinstance(listed, dict) else ():
        if isinstance(one, dict) and wanted(str(one.get("account"))):
            found.append(Forgotten(token, *(str(one.get(key) or "") for key in ("node", "account", "id", "state"))))
    return tuple(found)


def _object(controller: Facts | None, path: str) -> Mapping[str, Any]:
    """A file of the controller's as data; nothing where there is none, or it is broken."""
    fact = controller.files.get(path) if controller else None
    try:
        told = json.loads(fact.text) if fact and fact.text else {}
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
