"""Wheels of a few bytes, for tests of environments: nothing is downloaded."""

import base64
import hashlib
import stat
import zipfile
from pathlib import Path

import uv


def small_wheel(directory: Path, name: str, version: str, files: dict[str, str] | None = None, needs: str = "") -> Path:
    """A wheel of a package with these files. Without any it has one module, which knows its version and a program."""
    info = f"{name}-{version}.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    inside = {
        **(files or {f"{name}.py": f"VERSION = {version!r}\n\n\ndef main():\n    print({name!r}, VERSION)\n"}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-says = {name}:main\n",
    }
    record = "".join(f"{path},sha256={_hash(text)},{len(text.encode())}\n" for path, text in inside.items())
    inside[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    path = directory / f"{name}-{version}-py3-none-any.whl"
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in inside.items():
            entry = zipfile.ZipInfo(inner)
            entry.external_attr = (stat.S_IFREG | (0o755 if ".data/scripts/" in inner else 0o644)) << 16
            archive.writestr(entry, text)
    return path


def torch_like(directory: Path, version: str, cuda: str | None) -> Path:
    """What says of itself that it is torch for that CUDA."""
    said = f"__version__ = {version!r}\ncuda: object = {cuda!r}\n"
    return small_wheel(directory, "torch", version, {"torch/__init__.py": "", "torch/version.py": said})


def uv_wheel(directory: Path) -> Path:
    """This machine's uv as a wheel, for hosts that reach no index."""
    path = directory / "uv-999-py3-none-any.whl"
    directory.mkdir(parents=True, exist_ok=True)
    info = "uv-999.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        program = zipfile.ZipInfo("uv-999.data/scripts/uv")
        program.external_attr = (stat.S_IFREG | 0o755) << 16
        archive.writestr(program, Path(uv.find_uv_bin()).read_bytes())
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: uv\nVersion: 999\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
