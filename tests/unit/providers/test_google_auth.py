"""How requests to Google are authenticated."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth import jwt
from tests.contract.rental_providers import http, saying
from tests.support.cases import cases
from tests.support.programs import stand_in

from shoal.cloud.providers.api import ProviderLogin
from shoal.cloud.providers.google_auth import AUDIENCE, GoogleTokens
from shoal.errors import ProviderError
from shoal.registry import install_command

PEM = (
    rsa.generate_private_key(65537, 2048)
    .private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    .decode()
)
KEY = {"client_email": "shoal@reefs.test", "private_key": PEM, "token_uri": "https://none.test", "project_id": "reefs"}


@pytest.fixture(autouse=True)
def no_gcloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A test asks for no token of the person who runs it."""
    monkeypatch.setenv("PATH", str(tmp_path))


def account(secret: str = "", url: str = "", **settings: str) -> ProviderLogin:
    return ProviderLogin("google", "gcp", secret, url, settings)


async def test_service_account_signs_its_own_tokens() -> None:
    login = GoogleTokens(account(json.dumps(KEY)))
    claims: Any = jwt.decode(await login.bearer(), verify=False)
    assert (claims["iss"], claims["sub"], claims["aud"]) == ("shoal@reefs.test", "shoal@reefs.test", AUDIENCE)
    assert await login.bearer() == await login.bearer()
    assert login.project == "reefs"


def test_project_setting_overrides_the_key() -> None:
    assert GoogleTokens(account(json.dumps(KEY), project="lagoons")).project == "lagoons"


def test_missing_google_auth_is_reported_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(ProviderError) as caught:
        GoogleTokens(account(json.dumps(KEY)))
    assert caught.value.message == "google needs the package google-auth, which is not installed"
    assert caught.value.hint == f"run `{install_command('gcp')}`" and "'google-auth>=2.35'" in caught.value.hint


@cases(
    "secret, told",
    ("AIza-plain-text", "the key of google is not the JSON of a service account"),
    ('{"client_email": "x"}', "it lacks private_key, token_uri"),
    ('{"client_email": "s3cret', "it lacks everything: it is not JSON"),
    (json.dumps({**KEY, "private_key": "s3cret"}), "the private key in the service account's JSON of google"),
)
def test_invalid_key_is_reported_without_its_value(secret: str, told: str) -> None:
    with pytest.raises(ProviderError) as caught:
        GoogleTokens(account(secret, project="reefs"))
    assert told in caught.value.message
    assert "s3cret" not in str(caught.value)
    assert "AIza" not in str(caught.value)


def test_missing_project_is_reported_with_the_fix() -> None:
    with pytest.raises(ProviderError, match="has no Google project") as caught:
        GoogleTokens(account(json.dumps({**KEY, "project_id": ""})))
    assert caught.value.hint == "add `project:` to providers.google"


async def test_simulator_accepts_any_bearer() -> None:
    assert await GoogleTokens(account("sk-1", "http://127.0.0.1:1", project="p")).bearer() == "sk-1"
    assert await GoogleTokens(account("", "http://127.0.0.1:1", project="p")).bearer()


@cases("program, token", ("echo ya29.mine", "ya29.mine"), ("exit 1", "ya29.x"))
async def test_command_without_a_key_uses_the_login_of_gcloud(tmp_path: Path, program: str, token: str) -> None:
    stand_in(tmp_path / "gcloud", f"[ $1 = auth ] && {program}")
    async with saying(http("200 OK", b'{"access_token": "ya29.x", "expires_in": 3599}')) as url:
        assert await GoogleTokens(account(project="p"), metadata=url).bearer() == token


async def test_metadata_token_is_cached_while_valid() -> None:
    async with saying(http("200 OK", b'{"access_token": "ya29.x", "expires_in": 3599}')) as url:
        login = GoogleTokens(account(project="p"), metadata=url)
        assert await login.bearer() == "ya29.x"
    assert await login.bearer() == "ya29.x"


@cases(
    "answer",
    b"",
    http("404 Not Found", b"{}"),
    *(http("200 OK", body) for body in (b"{}", b"<html>", b"[" * 100_000)),
    http("200 OK", b'{"access_token": "t", "expires_in": NaN}'),
    http("200 OK", b'{"access_token": "t", "expires_in": 1e999}'),
    http("200 OK", b'{"access_token": "' + b"x" * (40 << 20) + b'", "expires_in": 1}'),
    ids=["nothing", "not found", "empty", "html", "nested", "nan", "infinite", "long"],
)
async def test_machine_outside_google_or_with_a_hostile_metadata_server_needs_a_key(answer: bytes) -> None:
    async with saying(answer) as url:
        login = GoogleTokens(account(project="p"), metadata=url)
        with pytest.raises(
            ProviderError, match="google has no key, and this machine gets no token from Google"
        ) as caught:
            await login.bearer()
    assert "file:~/account.json" in caught.value.hint
