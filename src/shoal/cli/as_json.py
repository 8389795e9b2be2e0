"""Values of the verbs as JSON: data classes by field, errors by what they say, sets in order."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from shoal.cli.encoding import is_utf8
from shoal.errors import ControllerFailed, ShoalError, SpecError, VersionWindow


def dump(value: Any) -> str:
    return json.dumps(plain(value), indent=2, ensure_ascii=not is_utf8(sys.stdout.encoding))


def plain(value: Any) -> Any:
    """The value as dicts, lists, text and numbers."""
    if isinstance(value, SpecError):
        return {"error": "SpecError", "findings": [plain(finding) for finding in value.findings]}
    if isinstance(value, ShoalError):
        said = {"error": type(value).__name__, "message": value.message, "fix": value.hint}
        if isinstance(value, ControllerFailed):
            return {**said, "failures": plain(value.failures)}
        return {**said, "findings": plain(value.findings)} if isinstance(value, VersionWindow) else said
    if isinstance(value, Enum):
        return value.name.lower()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
