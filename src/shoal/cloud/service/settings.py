"""The settings that the service reads at start: the spec and the provider accounts, written by `shoal up`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shoal.cloud.providers.api import ProviderLogin
from shoal.errors import UsageError
from shoal.roles.elastic import CONTENTS, LEADER_SINCE, SETTINGS, STATE
from shoal.spec.files import load_contents
from shoal.spec.model import Spec

KNOWN_HOSTS = Path(STATE) / "known_hosts"


@dataclass(frozen=True)
class ServiceSettings:
    """The settings of the service."""

    spec: Spec
    accounts: Mapping[str, ProviderLogin]
    """By the names in the spec."""
    public_key: str
    """The controller's SSH key for rented machines, as a line of authorized_keys."""
    identity: Path
    """The file of the private key."""
    since: int = 0
    """When `shoal up` made this service the leader."""


def read_settings(directory: Path = Path(SETTINGS)) -> ServiceSettings:
    """Read the settings. Raises UsageError with the missing or broken file, never with its content."""
    spec = _json(directory / "spec.json")
    try:
        model = Spec.model_validate(spec)
    except ValidationError:
        raise _broken(directory / "spec.json", "it was written by another version of Shoal") from None
    if model.files:
        contents = _json(directory / Path(CONTENTS).name)
        try:
            model = model.model_copy(update={"files": load_contents(model.files, contents)})
        except (KeyError, TypeError, ValueError):
            raise _broken(directory / Path(CONTENTS).name, "it does not have every file") from None
    accounts: dict[str, ProviderLogin] = {}
    listed = _json(directory / "accounts.json")
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        try:
            settings = {str(key): str(value) for key, value in entry["settings"].items()}
            # the keys are beside the file, also where that was copied
            secret = _text(directory / "keys" / Path(entry["key"]).name) if entry["key"] else ""
            accounts[name] = ProviderLogin(name, entry["kind"], secret, entry["url"], settings)
        except (KeyError, TypeError, AttributeError):
            raise _broken(directory / "accounts.json", f"account {name} is incomplete") from None
    identity = directory / "id_ed25519"
    since = _leader_since(directory / Path(LEADER_SINCE).name)
    return ServiceSettings(model, accounts, _text(identity.with_suffix(".pub")), identity, since)


def _leader_since(path: Path) -> int:
    """Since when the service on this host is in charge; 0 where nothing says so."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _json(path: Path) -> object:
    try:
        content: object = json.loads(_text(path))
    except ValueError:
        raise _broken(path, "it is not JSON") from None
    return content


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or "not text"
        raise _broken(path, cause) from None


def _broken(path: Path, cause: str) -> UsageError:
    return UsageError(f"cannot read {path}: {cause}", hint="run `shoal up`, which writes it")
