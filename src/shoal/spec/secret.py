"""Secrets in the spec: never the value, but where to find it. It is looked up at the last moment."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

from shoal.errors import UsageError
from shoal.spec.words import refusal

_REFERENCE = re.compile(r"(env):[A-Za-z_][A-Za-z0-9_]{0,127}|(file):[^\x00-\x1f]{1,1024}")


def secret_reference(value: object) -> str:
    """`env:NAME` or `file:PATH`. Anything else is refused without showing it: it could be the secret itself."""
    if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
        raise refusal("not a reference to a secret", "write env:NAME or file:PATH, never the secret itself", "(hidden)")
    return value


def resolve_secret(reference: str, what: str) -> bytes:
    """The value behind a reference. `what` is the key of the spec that asks for it."""
    kind, _, place = reference.partition(":")
    if kind == "env":
        value = os.environ.get(place, "").strip()
        if not value:
            raise UsageError(f"{what} is {reference}, and {place} is not set", hint=f"export {place}=...")
        return value.encode()
    path = Path(place).expanduser()
    try:
        data = path.read_bytes().strip()
    except OSError as error:
        hint = "write the secret into it, readable by you alone"
        raise UsageError(f"{what} is {reference}, and it cannot be read: {error.strerror}", hint=hint) from None
    if not data:
        raise UsageError(f"{what} is {reference}, and the file is empty", hint="write the secret into it")
    return data


SecretReference = Annotated[
    str,
    BeforeValidator(secret_reference),
    WithJsonSchema({"type": "string", "title": "env:NAME or file:PATH", "pattern": "^(env|file):.+$"}),
]
