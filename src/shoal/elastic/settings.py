"""What the service reads when it starts: the spec and the accounts, as `shoal up` left them on the controller."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shoal.elastic.move_ledger_program import in_charge_since
from shoal.errors import UsageError
from shoal.providers.rental import Account
from shoal.roles.elastic import SETTINGS, SINCE, STATE
from shoal.spec.model import Spec

KNOWN_HOSTS = Path(STATE) / "known_hosts"


@dataclass(frozen=True)
class Settings:
    """All that the service is told."""

    spec: Spec
    accounts: Mapping[str, Account]
    """By the names that nodesets call them."""
    public_key: str
    """The line that lets the controller into machines it rented."""
    identity: Path
    """The private half of it."""
    since: int = 0
    """When `shoal up` put this service in charge."""


def read_settings(directory: Path = Path(SETTINGS)) -> Settings:
    """Read them. Raises UsageError with the file that is missing or broken; what is in it is never shown."""
    spec = _json(directory / "spec.json")
    try:
        known = Spec.model_validate(spec)
    except ValidationError:
        raise _broken(directory / "spec.json", "it is of another version of Shoal") from None
    accounts: dict[str, Account] = {}
    told = _json(directory / "accounts.json")
    for name, entry in told.items() if isinstance(told, dict) else ():
        try:
            settings = {str(key): str(value) for key, value in entry["settings"].items()}
            # The keys lie beside the file, wherever that is.
            secret = _text(directory / "keys" / Path(entry["key"]).name) if entry["key"] else ""
            accounts[name] = Account(name, entry["kind"], secret, entry["url"], settings)
        except (KeyError, TypeError, AttributeError):
            raise _broken(directory / "accounts.json", f"account {name} is not complete") from None
    identity = directory / "id_ed25519"
    since = in_charge_since(directory / Path(SINCE).name)
    return Settings(known, accounts, _text(identity.with_suffix(".pub")), identity, since)


def _json(path: Path) -> object:
    try:
        found: object = json.loads(_text(path))
    except ValueError:
        raise _broken(path, "it is not JSON") from None
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or "not text"
        raise _broken(path, cause) from None


def _broken(path: Path, cause: str) -> UsageError:
    return UsageError(f"{path} cannot be read: {cause}", hint="run `shoal up`, which writes it")
