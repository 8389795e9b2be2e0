"""Amazon's query protocol: signed forms out, XML in, one endpoint per region.

The signature is 20 lines of the standard library, equal to botocore's; botocore would bring 15 MB and its own retries,
which may order twice.
"""

from __future__ import annotations

import configparser
import hashlib
import hmac
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

import httpx

from shoal.cloud.providers.api import FailureKind, ProviderLogin
from shoal.cloud.providers.http import MAX_PAGES, ApiClient, ParseAnswer, ParsedAnswer
from shoal.cloud.providers.response_limits import MAX_NESTING, MAX_VALUES, Answer
from shoal.cloud.providers.responses import ApiError, Body, ReadError

VERSION = "2016-11-15"
LIST_ENDINGS = ("Set", "GroupInfo", "ipPermissions", "groups", "ipRanges", "ipv6Ranges", "prefixListIds")
FORM, JSON = "application/x-www-form-urlencoded; charset=utf-8", "application/x-amz-json-1.1"


@dataclass(frozen=True)
class Credentials:
    """An access key, with the session token of a temporary one."""

    id: str
    secret: str = field(repr=False)
    session: str = field(repr=False, default="")


def parse_credentials(text: str, profile: str = "default") -> Credentials | None:
    """From `ID:SECRET`, a credentials file, or the JSON of `aws configure export-credentials`; None for other text."""
    text = text.strip()
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    if text.startswith("{"):
        try:
            data = json.loads(text)
        except ValueError:
            return None
        values = [data.get(name) for name in ("AccessKeyId", "SecretAccessKey", "SessionToken")]
    elif text.startswith(("[", "#", ";")):
        file = configparser.ConfigParser(interpolation=None)
        try:
            file.read_string(text)
        except configparser.Error:
            return None
        values = [file.get(profile, name, fallback=None) for name in names]
    else:
        values = [*text.split(":", 2), None, None][:3]
    id, secret, session = (value if isinstance(value, str) else "" for value in values)
    well_formed = re.fullmatch(r"\w+", id) and re.fullmatch(r"[!-~]+", secret) and re.fullmatch(r"[!-~]*", session)
    return Credentials(id, secret, session) if well_formed else None


def sign(
    credentials: Credentials,
    region: str,
    url: str,
    body: bytes,
    now: datetime | None = None,
    *,
    service: str = "ec2",
    target: str = "",
) -> dict[str, str]:
    """The headers of a POST to `/`, signed as Signature Version 4 prescribes: of a form, or of JSON for a `target`."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    headers = {"content-type": JSON if target else FORM, "host": urlsplit(url).netloc, "x-amz-date": stamp}
    if target:
        headers["x-amz-target"] = target
    if credentials.session:
        headers["x-amz-security-token"] = credentials.session
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
    canonical = "\n".join(["POST", "/", "", *lines, "", names, hashlib.sha256(body).hexdigest()])
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{credentials.secret}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.digest(key, part.encode(), "sha256")
    credential = f"Credential={credentials.id}/{scope}"
    headers["authorization"] = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={key.hex()}"
    return headers


def flatten(fields: Mapping[str, Any]) -> dict[str, str]:
    """Nested data as the form has it: lists are numbered from one, and None is left out."""
    flat: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else key, inner)
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value, 1):
                add(f"{name}.{number}", inner)
        elif value is not None:
            flat[name] = str(value).lower() if isinstance(value, bool) else str(value)

    add("", fields)
    return flat


def read_xml(element: ElementTree.Element, depth: int = 0) -> Any:
    """An element as data: `item` elements are a list, others fields, and what has no content is text.

    An empty element is a list if its name ends like those of Amazon's lists, else an empty text.
    """
    if depth > MAX_NESTING:
        raise ValueError("too deep")
    children = list(element)
    if not children:
        return [] if _tag(element).endswith(LIST_ENDINGS) else (element.text or "").strip()
    if all(_tag(child) == "item" for child in children):
        return [read_xml(child, depth + 1) for child in children]
    return {_tag(child): read_xml(child, depth + 1) for child in children}


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _parser(root: str) -> ParseAnswer:
    def parse(answer: Answer) -> ParsedAnswer:
        if b"<!DOCTYPE" in answer.content or answer.content.count(b"<") > 2 * MAX_VALUES:
            return None, "the answer is no XML of this API"  # entities can grow without bound
        try:
            element = ElementTree.fromstring(answer.content)  # nosec B314: without DOCTYPE there are no entities
            data = read_xml(element)
        except (ElementTree.ParseError, ValueError):
            return None, f"the answer is not XML, {len(answer.content)} bytes long"
        if answer.is_success and _tag(element) != root:
            return None, f"the answer is {_tag(element)[:60]}, not {root}"
        return data, ""

    return parse


class QueryClient(ApiClient):
    """EC2 of all regions, and services beside it, with one account."""

    def __init__(self, account: ProviderLogin, base: str, *, read_error: ReadError, interval: float = 0.0) -> None:
        super().__init__(account, base.format(region="REGION"), read_error=read_error, interval=interval)
        self._template = account.url.rstrip("/") or base
        self._credentials = parse_credentials(account.secret, account.settings.get("profile", "default"))

    async def call(self, region: str, action: str, *, creates: bool = False, **fields: Any) -> Body:
        """Call an action in a region and return its answer. Raises ApiError."""
        where = f"{self.account.name}: {action} in {region}"
        form = flatten({"Action": action, "Version": VERSION, **fields})
        body = urlencode(form, quote_via=quote).encode()
        url = self._template.format(region=region) + "/"
        request = await self._signed(where, url, body, region)
        return await self._send(request, where, creates=creates, parse=_parser(f"{action}Response"))

    async def call_json(self, service: str, base: str, region: str, target: str, fields: Mapping[str, Any]) -> Body:
        """Call another service than EC2, which speaks JSON, and return its answer. Raises ApiError."""
        where = f"{self.account.name}: {target.rpartition('.')[2]} in {region}"
        url = (self.account.url.rstrip("/") or base).format(region=region) + "/"
        request = await self._signed(where, url, json.dumps(fields).encode(), region, service=service, target=target)
        return await self._send(request, where, creates=False)

    async def _signed(
        self, where: str, url: str, body: bytes, region: str, *, service: str = "ec2", target: str = ""
    ) -> httpx.Request:
        if self._credentials is None:
            hint = "give ID:SECRET, the file ~/.aws/credentials, or the JSON of `aws configure export-credentials`"
            raise ApiError(f"{where}: the key is no access key", FailureKind.AUTH, scope="provider", hint=hint)
        await self._wait_for_slot()
        headers = sign(self._credentials, region, url, body, service=service, target=target)
        return self._client.build_request("POST", url, content=body, headers=headers)

    async def items(self, region: str, action: str, name: str, **fields: Any) -> AsyncIterator[Body]:
        """The items of a list, from all pages."""
        token: str | None = None
        for _ in range(MAX_PAGES):
            page = await self.call(region, action, NextToken=token, **fields)
            for item in page.rows(name):
                yield item
            following = page.text("nextToken", "")
            if not following:
                return
            if following == token:
                raise page.error("the list repeats the same page")
            token = following
        raise page.error(f"the list has more than {MAX_PAGES} pages")

    def _redact(self, text: str) -> str:
        secrets: Sequence[str] = [self._credentials.secret, self._credentials.session] if self._credentials else []
        for secret in filter(None, secrets):
            text = text.replace(secret, "***")
        return super()._redact(text)


def number(body: Body, name: str, otherwise: float | None = None) -> float:
    """A number of an answer, whose values are all text."""
    if otherwise is not None and not body.has(name):
        return otherwise
    text = body.text(name)
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,15})?", text):
        raise body.error(f"{name} is not a number")
    return float(text)
