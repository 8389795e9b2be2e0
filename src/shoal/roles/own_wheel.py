"""Shoal itself as a wheel, made from the installation that runs, so that a controller has the very same."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

OWN_WHEEL = "own:wheel"
"""What stands for it among references to secrets, where nobody can write it: a file says `env:` or `file:`."""
_LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The time of every file in the wheel: the same code always gives the same bytes."""
_DEPENDENCIES = ("asyncssh>=2.18", "httpx>=0.27", "pydantic>=2.9", "rich>=13.7", "ruamel.yaml>=0.18", "typer>=0.15")
"""What it needs, should the installation that runs not say so itself."""


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
        """What an installation of it is called by: the version, and what is in it."""
        return f"{self.version}-{self.sha256[:12]}"


@cache
def own_wheel() -> Wheel:
    """The wheel of the Shoal that runs, made once and only in memory: no other Shoal of this machine minds it."""
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
            entry = zipfile.ZipInfo(name, _LONG_AGO)
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


def _metadata(release: str) -> str:
    try:
        needed = requires("shoal") or list(_DEPENDENCIES)
    except PackageNotFoundError:
        needed = list(_DEPENDENCIES)
    extras = sorted({extra for one in needed for extra in _extra(one)})
    lines = ["Metadata-Version: 2.1", "Name: shoal", f"Version: {release}", "Requires-Python: >=3.11"]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {one}" for one in needed]
    return "\n".join(lines) + "\n"


def _extra(requirement: str) -> list[str]:
    _, _, condition = requirement.partition("extra ==")
    return [condition.strip().strip("'\"")] if condition else []


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
