"""auth/slurm: Slurm signs its messages itself, with keys in slurm.jwks: all of them verify, one signs. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

JWKS = "/etc/slurm/slurm.jwks"
"""Where daemons look for keys. A slurmd that finds it takes auth/slurm from its first message on."""


@dataclass(frozen=True)
class Key:
    """One of the keys. Its value stays in a file on each host, and is filled in there."""

    word: str
    """Stands where the host fills in the value."""
    digest: str
    """Of the file with the value: the key's name is made of it."""
    signs: bool = False

    @property
    def name(self) -> str:
        return f"shoal-{self.digest[:12]}"


def jwks(*keys: Key) -> str:
    """slurm.jwks. All keys verify; one signs. Hexadecimal digits are base64 as they stand."""
    entries = [
        {"alg": "HS256", "kty": "oct", "kid": key.name, "k": key.word, **({"use": "default"} if key.signs else {})}
        for key in keys
    ]
    return json.dumps({"keys": entries}, indent=1) + "\n"


def auth_settings(auth: str) -> dict[str, str]:
    """What slurm.conf says of it. Jobs that began under munge end under it: slurmctld takes both."""
    if auth == "munge":
        return {"AuthType": "auth/munge"}
    return {"AuthType": "auth/slurm", "AuthAltTypes": "auth/munge", "CredType": "cred/slurm"}
