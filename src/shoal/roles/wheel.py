"""Shoal as a wheel, built from the running installation, so that a controller gets the same version."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

SHOAL_WHEEL = "own:wheel"
"""The wheel's reference among secrets. A spec cannot contain it: its references begin with `env:` or `file:`."""
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)
"""The time of every file in the wheel, so that the same code gives the same bytes."""
_DEPENDENCIES = ("httpx>=0.27", "pydantic>=2.9", "rich>=13.7", "ruamel.yaml>=0.18", "typer>=0.15")
"""The dependencies, for an installation without metadata."""


@dataclass(frozen=True)
class Wheel:
    """A wheel of Shoal."""

    version: str
    content: bytes
    sha256: str

    @property
    def name(self) -> str:
        return f"shoal-{self.version}-py3-none-any.whl"

    @property
    def mark(self) -> str:
        """The name of an installation: the version and the digest."""
        return f"{self.version}-{self.sha256[:12]}"


@cache
def build_wheel() -> Wheel:
    """The wheel of the running Shoal, built once, in memory."""
    root, release = Path(__file__).parents[1], _version()
    info = f"shoal-{release}.dist-info"
    texts = {f"shoal/{path.relative_to(root).as_posix()}": path.read_bytes() for path in sorted(_files(root))}
    texts[f"{info}/METADATA"] = _metadata(release).encode()
    texts[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: shoal\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in texts.items())
    texts[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in texts.items():
            entry = zipfile.ZipInfo(name, _TIMESTAMP)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    content = buffer.getvalue()
    return Wheel(release, content, hashlib.sha256(content).hexdigest())


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def _version() -> str:
    try:
        return version("shoal")
    except PackageNotFoundError:  # run from its sources
        return "0"


def requirements_of_shoal() -> list[str]:
    """What Shoal needs, as pip names it, with its extras."""
    try:
        return requires("shoal") or list(_DEPENDENCIES)
    except PackageNotFoundError:
        return list(_DEPENDENCIES)


def _metadata(release: str) -> str:
    requirements = requirements_of_shoal()
    extras = sorted({extra for requirement in requirements for extra in _extra(requirement)})
    lines = ["Metadata-Version: 2.1", "Name: shoal", f"Version: {release}", "Requires-Python: >=3.11"]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    return "\n".join(lines) + "\n"


def _extra(requirement: str) -> list[str]:
    _, _, condition = requirement.partition("extra ==")
    return [condition.strip().strip("'\"")] if condition else []


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
