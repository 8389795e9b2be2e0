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
from shoal.spec.rented import accounts, rented_sets

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
    known, before = accounts(spec), _object(controller, ACCOUNTS)

    def another(name: str) -> bool:
        if name not in known:
            return True
        was = before.get(name)
        if not isinstance(was, dict):
            return False
        now = known[name]
        place = (now.kind or name, now.url or "", now.project or now.settings.get("project"))
        settings = was.get("settings")
        project = settings.get("project") if isinstance(settings, dict) else None
        return place != (was.get("kind"), was.get("url"), project)

    return _machines(controller, another)


def forgotten(spec: Spec, controller: Facts | None) -> tuple[Forgotten, ...]:
    """The machines that nobody gives back once this file is in force: where it rents nothing, all there are."""
    return strangers(spec, controller) if rented_sets(spec) else _machines(controller, lambda account: True)


def gives_up(spec: Spec, controller: Facts | None) -> bool:
    """Whether the service is to lose an account by this file, or to go."""
    before = _object(controller, ACCOUNTS)
    return bool(before) and (not rented_sets(spec) or not before.keys() <= accounts(spec).keys())


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


def _machines(controller: Facts | None, wanted: Callable[[str], bool]) -> tuple[Forgotten, ...]:
    listed = _object(controller, STATUS).get("machines")
    found = []
    for token, one in listed.items() if isinstance(listed, dict) else ():
        if isinstance(one, dict) and wanted(str(one.get("account"))):
            words = [str(one.get(key) or "") for key in ("node", "account", "id", "state")]
            found.append(Forgotten(token, *words))
    return tuple(found)


def _object(controller: Facts | None, path: str) -> Mapping[str, Any]:
    """A file of the controller's as data; nothing where there is none, or it is broken."""
    fact = controller.files.get(path) if controller else None
    try:
        told = json.loads(fact.text) if fact and fact.text else {}
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
