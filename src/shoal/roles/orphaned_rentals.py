"""Rented machines that a new spec would orphan: no service would release them, and they would cost money for ever.

The rental service uses the provider accounts of the current spec. A machine of an account that the next spec does not
have, or has with another provider or project, can no longer be listed or released.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.agent.facts import Facts
from shoal.cloud.rental import Rental
from shoal.cloud.status_file import STATUS as STATUS_FILE
from shoal.cloud.status_file import ServiceStatus
from shoal.spec.finding import Finding
from shoal.spec.members import provider_accounts, rented_sets
from shoal.spec.model import Spec
from shoal.spec.rental import account_settings

STATUS = str(STATUS_FILE)
"""The service's status after every step, with each machine that exists or may exist."""
ACCOUNTS = "/etc/shoal/elastic/accounts.json"
"""The service's provider accounts, without their keys."""


def rentals_of_other_accounts(spec: Spec, controller: Facts | None) -> tuple[Rental, ...]:
    """The rentals of accounts that the spec does not have, or has with another provider or project."""
    before = _object(controller, ACCOUNTS)
    return _machines(controller, lambda account: _has_changed(spec, account, before.get(account)))


def orphaned_rentals(spec: Spec, controller: Facts | None) -> tuple[Rental, ...]:
    """The rentals that no service would release under this spec: all of them where it rents nothing."""
    return rentals_of_other_accounts(spec, controller) if rented_sets(spec) else reported_rentals(controller)


def reported_rentals(host: Facts | None) -> tuple[Rental, ...]:
    """All rentals of the service on a host, by its last status."""
    return _machines(host, lambda account: True)


def dropped_accounts(spec: Spec, controller: Facts | None) -> frozenset[str]:
    """The provider accounts that the service loses with this spec; all of them where it is removed."""
    before = _object(controller, ACCOUNTS)
    return frozenset(name for name, old in before.items() if not rented_sets(spec) or _has_changed(spec, name, old))


def orphan_finding(spec: Spec, machines: Sequence[Rental], host: str) -> Finding:
    """An error that names the orphaned rentals and the reason."""
    spec_accounts = provider_accounts(spec)
    accounts = dict.fromkeys(rental.account for rental in machines)
    removed = [name for name in accounts if name not in spec_accounts]
    what, missing = "the file has no rented nodeset any more", "one"
    if removed:
        what, missing = f"the file has no account {', '.join(removed)} any more", "it"
    elif rented_sets(spec):
        what, missing = f"account {', '.join(accounts)} is another one in the file now", "it"
    what = f"rented machines would never be released, as {what}"
    fix = f"put {missing} back until they are released, or run `shoal reap` with the old file"
    return Finding("error", what, ", ".join(map(str, machines)), fix, host=host)


def _has_changed(spec: Spec, name: str, old: object) -> bool:
    """Whether the spec lacks an account of the service, or has it with another provider or project."""
    now = provider_accounts(spec).get(name)
    if now is None:
        return True
    if not isinstance(old, dict):
        return False
    settings = old.get("settings")
    projects = {account_settings(now).get("project"), settings.get("project") if isinstance(settings, dict) else None}
    # Without a project the key's own applies, most likely the one that the user adds later.
    return (now.kind or name, now.url or "") != (old.get("kind"), old.get("url")) or len(projects - {None, ""}) > 1


def _machines(controller: Facts | None, has_account: Callable[[str], bool]) -> tuple[Rental, ...]:
    status = ServiceStatus(0.0, machines=_object(controller, STATUS).get("machines", {}))
    return tuple(rental for rental in status.rentals if has_account(rental.account))


def _object(controller: Facts | None, path: str) -> Mapping[str, Any]:
    """A JSON file of the controller; empty where there is none, or it is damaged."""
    try:
        data = json.loads(controller.text(path)) if controller else {}
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
