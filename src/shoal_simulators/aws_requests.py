"""Requests of the simulated Amazon EC2: user data, numbered fields, filters, pages."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from shoal_simulators.instances import read_cloud_config
from shoal_simulators.market import ApiRejection

PAGE = 25
USER_DATA_BYTES = 16384


def read_user_data(encoded: str) -> tuple[tuple[str, ...], str]:
    """The keys and the script, as cloud-init would read them."""
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        raise ApiRejection("invalid", "InvalidUserData.Malformed: Invalid BASE64 encoding of user data") from None
    if len(text.encode()) > USER_DATA_BYTES:
        raise ApiRejection("invalid", "InvalidParameterValue: User data is limited to 16384 bytes")
    if not text.startswith("#cloud-config\n"):
        return (), text
    return read_cloud_config(text)


def values(form: dict[str, str], name: str) -> list[str]:
    return [value for key, value in form.items() if re.fullmatch(rf"{re.escape(name)}\.\d+", key)]


def filters(form: dict[str, str]) -> dict[str, list[str]]:
    numbers = sorted(key.split(".")[1] for key in form if re.fullmatch(r"Filter\.\d+\.Name", key))
    return {form[f"Filter.{number}.Name"]: values(form, f"Filter.{number}.Value") for number in numbers}


def page(form: dict[str, str], name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    start = int(form.get("NextToken", "0"))
    more = {"nextToken": str(start + PAGE)} if start + PAGE < len(rows) else {}
    return {name: rows[start : start + PAGE], **more}
