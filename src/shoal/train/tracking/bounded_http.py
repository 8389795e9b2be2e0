"""An HTTP opener of the standard library whose answers are bounded: total time, size, nesting, numbers.

A socket's own timeout starts again with every byte, and `read` returns what the server sends, whatever its size. A
tracking server that is broken, or another program at its address, takes neither the job's memory nor its thread.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_ANSWER_MIB = 8
"""A search for a job's run answers with at most twenty runs."""


class AnswerError(ValueError):
    """An answer that is too long, too late, or no JSON."""


@dataclass(frozen=True)
class Answer:
    status: int
    reason: str
    value: Any
    """What its JSON says."""


class BoundedOpener:
    """Sends requests, one at a time. Redirects are not followed, and answers are bounded."""

    def __init__(self, context: ssl.SSLContext | None, timeout: float) -> None:
        """`timeout` is that of each wait for the server; a whole answer may take three times as long."""
        self._timeout = timeout
        self._answer_timeout = 3 * timeout
        self._timer: threading.Timer | None = None
        self._late = False
        self._opener = urllib.request.build_opener(_NoRedirect(), _Http(self._watch), _Https(self._watch, context))

    def send(self, request: urllib.request.Request) -> Answer:
        """Send a request and read its answer, whatever its status. Raises what urllib does, and AnswerError."""
        self._late = False
        try:
            with self._open(request) as answer:
                return Answer(answer.status, answer.reason, self._read_json(answer, is_error=answer.status >= 300))
        except (http.client.HTTPException, OSError):
            if self._late:
                raise AnswerError(f"no complete answer within {self._answer_timeout:g} s") from None
            raise
        finally:
            self._stop_timer()

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            return self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            return error

    def _read_json(self, answer: Any, *, is_error: bool) -> Any:
        """The JSON of an answer. An empty one counts as an empty object, and so does an error without JSON."""
        limit = MAX_ANSWER_MIB * 1024 * 1024
        text = answer.read(limit + 1)
        if self._late:
            raise AnswerError(f"no complete answer within {self._answer_timeout:g} s")
        if len(text) > limit:
            raise AnswerError(f"the answer is longer than {MAX_ANSWER_MIB} MiB")
        try:
            return json.loads(text or b"{}", parse_constant=_reject_constant)
        except (ValueError, RecursionError):
            if is_error:
                return {}
            raise AnswerError("the answer is not JSON") from None

    def _watch(self, connected: socket.socket) -> None:
        """End the connection if the answer is not complete in time. Called once the request was sent."""

        def end() -> None:
            self._late = True
            with contextlib.suppress(OSError):  # the answer came at the last moment
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

        self._stop_timer()
        self._timer = threading.Timer(self._answer_timeout, end)
        self._timer.daemon = True
        self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


Watch = Callable[[socket.socket], None]


class _Http(urllib.request.HTTPHandler):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_watched(http.client.HTTPConnection, self._watch), request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, watch: Watch, context: ssl.SSLContext | None) -> None:
        super().__init__()
        self._watch = watch
        self._certificates = context or ssl.create_default_context()

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_watched(http.client.HTTPSConnection, self._watch), request, context=self._certificates)


def _watched(kind: type[http.client.HTTPConnection], watch: Watch) -> Any:
    """The connection class, which reports its socket before it waits for an answer."""

    class WatchedConnection(kind):  # type: ignore[valid-type, misc]
        def getresponse(self) -> http.client.HTTPResponse:
            watch(self.sock)
            response: http.client.HTTPResponse = super().getresponse()
            return response

    return WatchedConnection


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would turn POST into GET, and send the password to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")
