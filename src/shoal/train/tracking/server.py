"""MLflow's REST API, as much of it as a training job needs, over the standard library's HTTP client.

Everything that can go wrong becomes one of two errors: `Unavailable`, to be tried again later, or `Rejected`, where
the server understood the request and will never take it.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

API = "/api/2.0/mlflow/"
ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts/"
TIMEOUT = 10.0

_LATER = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "INTERNAL_ERROR", "PERMISSION_DENIED", "UNAUTHENTICATED")
_HINTS = {
    401: "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the job",
    403: "the server refuses this user or this host name; see its --allowed-hosts",
    404: "this address is no MLflow server",
}


class Unavailable(Exception):
    """The server cannot take this now. Whether it already has is not known."""


class Rejected(Exception):
    """The server will never take this."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code

    @property
    def missing(self) -> bool:
        return self.code == "RESOURCE_DOES_NOT_EXIST"


class Server:
    """A tracking server at an http:// or https:// address."""

    def __init__(self, uri: str, environ: Mapping[str, str] = os.environ, timeout: float = TIMEOUT) -> None:
        """ValueError where the address is not one of a server."""
        self.uri, user, password = split_uri(uri)
        self.timeout = timeout
        self._headers = {"User-Agent": "shoal"}
        user = user or environ.get("MLFLOW_TRACKING_USERNAME", "")
        password = password or environ.get("MLFLOW_TRACKING_PASSWORD", "")
        if user:
            self._headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        elif token := environ.get("MLFLOW_TRACKING_TOKEN"):
            self._headers["Authorization"] = f"Bearer {token}"
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if certificate := environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"):
            handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=certificate)))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str, /, **query: str) -> dict[str, Any]:
        return self._answer("GET", API + path + "?" + urllib.parse.urlencode(query), None, "application/json")

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._answer("POST", API + path, json.dumps(body).encode(), "application/json")

    def upload(self, path: str, data: bytes) -> None:
        """Store an artifact, over one that is there: the same upload twice is the same as once."""
        self._answer("PUT", ARTIFACTS + urllib.parse.quote(path), data, "application/octet-stream")

    def _answer(self, method: str, path: str, data: bytes | None, kind: str) -> dict[str, Any]:
        headers = {**self._headers, "Content-Type": kind}
        request = urllib.request.Request(self.uri + path, data=data, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=self.timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise _explain(error) from None
        except urllib.error.URLError as error:
            raise Unavailable(f"{self.uri}: {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self.uri}: {str(error) or type(error).__name__}") from None
        try:
            value = json.loads(text or b"{}")
        except ValueError:
            raise Unavailable(f"{self.uri} answers something that is not JSON: {_HINTS[404]}") from None
        return value if isinstance(value, dict) else {}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would turn POST into GET, and carry the password to whoever it names."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def split_uri(uri: str) -> tuple[str, str, str]:
    """An address without its user and password, and those. The first may be written to a file, the others never."""
    try:
        parts = urllib.parse.urlsplit(uri)
        port = parts.port
    except ValueError:
        raise ValueError("the tracking address is not a URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"the tracking address must begin with http:// or https://, not {parts.scheme or 'nothing'!r}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    clean = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path.rstrip('/')}"
    return clean, urllib.parse.unquote(parts.username or ""), urllib.parse.unquote(parts.password or "")


def _explain(error: urllib.error.HTTPError) -> Unavailable | Rejected:
    code, message = "", ""
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException, AttributeError):
        body = json.loads(error.read())
        code, message = str(body.get("error_code") or ""), str(body.get("message") or "")
    if error.code == 413:
        return Rejected("TOO_LARGE", "the server does not take so much at once")
    if 400 <= error.code < 500 and code and code not in _LATER and error.code not in (401, 403, 408, 429):
        return Rejected(code, message[:500])
    said = message[:200] or error.reason
    hint = _HINTS.get(error.code)
    return Unavailable(f"the server answers {error.code} {said}" + (f": {hint}" if hint else ""))
