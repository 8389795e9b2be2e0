"""Bearer tokens for Google: signed with a service account's key, from gcloud, or from the metadata of a Google VM."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from typing import Any

import httpx

from shoal.cloud.providers.api import ProviderLogin
from shoal.cloud.providers.response_limits import ACCEPT_ENCODING, fetch, parse_json
from shoal.errors import ProviderError
from shoal.registry import install_command

METADATA_TIMEOUT_S = 5.0
GCLOUD_TIMEOUT_S = 30.0
GCLOUD_TOKEN_S = 600.0
"""How long a token of gcloud is used: it is valid for up to an hour, and gcloud does not tell."""
AUDIENCE = "https://compute.googleapis.com/"
METADATA = "http://metadata.google.internal"


class GoogleTokens:
    """Bearer tokens of one provider account, renewed before they expire."""

    def __init__(self, account: ProviderLogin, metadata: str = METADATA) -> None:
        self._name, self._metadata = account.name, metadata
        self._signer: Any = None
        self._token, self._expires = "", 0.0
        self.project = account.settings.get("project", "")
        secret = account.secret.strip()
        if secret.startswith("{"):
            key = _service_account(account.name, secret)
            self._signer = _signer(account.name, key)
            self.project = self.project or str(key.get("project_id", ""))
        elif account.url:
            self._token, self._expires = secret or "anybody", float("inf")
        elif secret:
            raise ProviderError(
                f"the key of {account.name} is not the JSON of a service account",
                hint="make a key of type JSON for a service account, and set its path: key: file:~/account.json",
            )
        if not self.project:
            raise ProviderError(
                f"{account.name} has no Google project",
                hint=f"add `project:` to providers.{account.name}",
            )

    async def bearer(self) -> str:
        """A token that is valid for at least a minute."""
        if self._signer is not None:
            if not self._signer.valid:
                self._signer.refresh(None)  # signs locally
            token = self._signer.token
            return token.decode() if isinstance(token, bytes) else str(token)
        if time.time() > self._expires - 60:
            token = await _gcloud_token()
            self._token, self._expires = token if token else await self._request_metadata()
        return self._token

    async def _request_metadata(self) -> tuple[str, float]:
        url = f"{self._metadata}/computeMetadata/v1/instance/service-accounts/default/token"
        try:
            async with httpx.AsyncClient(timeout=METADATA_TIMEOUT_S) as client:
                headers = {"Metadata-Flavor": "Google", "Accept-Encoding": ACCEPT_ENCODING}
                answer = await fetch(client, client.build_request("GET", url, headers=headers), METADATA_TIMEOUT_S)
            if not answer.is_success:
                raise ValueError(answer.status)
            token = parse_json(answer.content)
            return str(token["access_token"]), time.time() + float(token["expires_in"])
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise ProviderError(
                f"{self._name} has no key, and this machine gets no token from Google ({type(error).__name__})",
                hint=f"run `gcloud auth login`, or set providers.{self._name}.key to a service account's JSON: "
                "file:~/account.json",
            ) from None


async def _gcloud_token() -> tuple[str, float] | None:
    """A token of the person who is logged in with gcloud, for commands on their machine; None without gcloud."""
    gcloud = shutil.which("gcloud")
    if gcloud is None:
        return None
    process = await asyncio.create_subprocess_exec(
        *(gcloud, "auth", "print-access-token", "--quiet"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), GCLOUD_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    token = output.decode("ascii", "replace").strip()
    return (token, time.time() + GCLOUD_TOKEN_S) if process.returncode == 0 and token.isprintable() and token else None


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
            f"{name} needs the package google-auth, which is not installed", hint=f"run `{install_command('gcp')}`"
        ) from None
    signer: Any = jwt.Credentials  # its classes are untyped
    try:
        return signer.from_service_account_info(key, audience=AUDIENCE)
    except ValueError:  # its text may contain parts of the key
        raise ProviderError(
            f"cannot read the private key in the service account's JSON of {name}",
            hint="download the key again, and use the file as it is",
        ) from None
