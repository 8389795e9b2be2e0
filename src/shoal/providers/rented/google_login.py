"""How Google is told who asks: by a token that a service account's key signs, or one that a machine of theirs is given.

A service account's JSON makes its tokens itself, without a question to anybody. With no secret at all the machine that
we run on is asked, which works on a virtual machine of Google's that has a service account.
"""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

from shoal.errors import ProviderError
from shoal.providers.rental import Account

AUDIENCE = "https://compute.googleapis.com/"
METADATA = "http://metadata.google.internal"


class GoogleLogin:
    """Bearer tokens for one account, made again before they end."""

    def __init__(self, account: Account, metadata: str = METADATA) -> None:
        self._name = account.name
        self._metadata = metadata
        self._plain = ""
        self._signer: Any = None
        self._token = ""
        self._ends = 0.0
        self.project = account.settings.get("project", "")
        secret = account.secret.strip()
        if secret.startswith("{"):
            key = _service_account(account.name, secret)
            self._signer = _signer(account.name, key)
            self.project = self.project or str(key.get("project_id", ""))
        elif account.url:
            self._plain = secret or "anybody"
        elif secret:
            raise ProviderError(
                f"the key of {account.name} is not the JSON of a service account",
                hint="make a key of type JSON for a service account, and say where it is: key: file:~/account.json",
            )
        if not self.project:
            raise ProviderError(
                f"{account.name} does not say which project of Google's pays",
                hint=f"add `project:` to providers.{account.name}",
            )

    async def bearer(self) -> str:
        """A token that is good for a minute at least."""
        if self._plain:
            return self._plain
        if self._signer is not None:
            if not self._signer.valid:
                self._signer.refresh(None)  # signs; asks nobody
            token = self._signer.token
            return token.decode() if isinstance(token, bytes) else str(token)
        if time.time() > self._ends - 60:
            self._token, self._ends = await self._ask_machine()
        return self._token

    async def _ask_machine(self) -> tuple[str, float]:
        url = f"{self._metadata}/computeMetadata/v1/instance/service-accounts/default/token"
        try:
            async with httpx.AsyncClient(timeout=5) as client:
                answer = (await client.get(url, headers={"Metadata-Flavor": "Google"})).raise_for_status().json()
            return str(answer["access_token"]), time.time() + float(answer["expires_in"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ProviderError(
                f"{self._name} has no key, and this machine is not given a token by Google ({type(error).__name__})",
                hint=f"set providers.{self._name}.key to a service account's JSON: file:~/account.json",
            ) from None


def _service_account(name: str, secret: str) -> dict[str, Any]:
    try:
        key = json.loads(secret)
        missing = [field for field in ("client_email", "private_key", "token_uri") if not key.get(field)]
    except (ValueError, AttributeError):
        missing = ["everything: it is not JSON"]
    if missing:
        raise ProviderError(
            f"the key of {name} is not the JSON of a service account; it lacks {', '.join(missing)}",
            hint="make a key of type JSON for the service account, and use the file as it is",
        )
    return dict(key)


def _signer(name: str, key: dict[str, Any]) -> Any:
    try:
        from google.auth import jwt
    except ImportError:
        raise ProviderError(
            f"{name} needs the package google-auth, which is not installed", hint="pip install 'shoal[gcp]'"
        ) from None
    signer: Any = jwt.Credentials  # its makers carry no types
    try:
        return signer.from_service_account_info(key, audience=AUDIENCE)
    except ValueError:  # its text may hold parts of the key
        raise ProviderError(
            f"the private key in the service account's JSON of {name} cannot be read",
            hint="download the key again, and use the file as it is",
        ) from None
