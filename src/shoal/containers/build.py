"""What `shoal image build` sends to a node: a Containerfile, what it copies, and the images that it starts from."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.containers.images import STEP_PROGRAM, StoredImage
from shoal.remote.runner.image_build import INSIDE

CONTAINERFILES = ("Containerfile", "Dockerfile")
REQUIREMENTS = "requirements.txt"
_INSTRUCTION = re.compile(r"^\s*(FROM|ARG)\s+(.*)$", re.IGNORECASE | re.MULTILINE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?([-+])([^}]*))?\})")


@dataclass(frozen=True)
class BuildRequest:
    """A Containerfile and its context."""

    file: str
    """The name of the Containerfile in the context."""
    text: str
    contents: Mapping[str, Path] = field(default_factory=dict)
    """Files of this machine, by their names in the context."""
    texts: Mapping[str, str] = field(default_factory=dict)

    def pack(self, archive: Callable[[Mapping[str, Path]], bytes]) -> bytes:
        """The tar that the node reads."""
        with tempfile.TemporaryDirectory() as place:
            contents = dict(self.contents)
            for name, text in {**self.texts, self.file: self.text}.items():
                contents[name] = Path(place, name)
                contents[name].write_text(text)
            return archive(contents)


def is_requirements(name: str) -> bool:
    return name.endswith((".txt", ".lock", ".toml"))


def base_names(text: str, first: str | None = None) -> list[str]:
    """The images that a Containerfile starts from, `first` in place of its first. Stages that it names are none."""
    values: dict[str, str] = {}
    stages: set[str] = set()
    names: list[str] = []
    for instruction, rest in _INSTRUCTION.findall(text.replace("\\\n", " ")):
        try:
            words = [word for word in shlex.split(rest) if not word.startswith("--")]
        except ValueError:
            continue  # buildah says what is wrong with it
        if instruction.upper() == "ARG":
            if not stages:  # those of a stage are not for FROM
                values |= {name: _with_values(value, values) for name, _, value in (w.partition("=") for w in words)}
            continue
        name = _with_values(words[0], values) if words else ""
        if not stages:
            name = first or name
        if name and name.lower() not in stages and "$" not in name and name not in names:
            names.append(name)
        stages.add(words[2].lower() if len(words) > 2 else "")
    return names


def _with_values(text: str, values: Mapping[str, str]) -> str:
    """The text with what variables stand for. One without a value and a default stays as it is."""

    def value(match: re.Match[str]) -> str:
        found = values.get(match[1] or match[2], "")
        if match[3] == "+":
            return match[4] if found else ""
        return found or (match[4] if match[3] else match[0])

    return _VARIABLE.sub(value, text)


def requirements_containerfile(base: str, *, is_locked: bool) -> str:
    """pip of the base, or else the node's, installs the packages from where the node's pip gets them."""
    options = "--no-cache-dir --no-input --requirement requirements.txt --constraint constraints.txt"
    options += " --no-deps" if is_locked else ""
    return (
        f"FROM {base}\n"
        f"COPY {REQUIREMENTS} constraints.txt /opt/shoal-requirements/\n"
        "RUN cd /opt/shoal-requirements"
        f" && if [ -e {INSIDE}/pip.conf ]; then export PIP_CONFIG_FILE={INSIDE}/pip.conf; fi"
        f" && if [ -e {INSIDE}/certificates.crt ]; then export PIP_CERT={INSIDE}/certificates.crt; fi"
        " && if python3 -m pip --version > /dev/null 2>&1; then pip='-m pip'; else pip=" + f"{INSIDE}/pip.whl/pip; fi"
        f" && PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore python3 $pip install {options}\n"
    )


def build_command(
    name: str, file: str, base: str, bases: Mapping[str, StoredImage], proxy: Mapping[str, str], auth: str
) -> tuple[str, ...]:
    """Build an image on a node, from what is on standard input, and print it."""
    keys = ("name", "layout", "source")
    known = {
        key: {field: value for field, value in asdict(image).items() if field in keys} for key, image in bases.items()
    }
    settings = {"name": name, "file": file, "from": base, "bases": known, "proxy": dict(proxy), "auth": auth}
    return ("python3", "-I", "-S", STEP_PROGRAM, "build", json.dumps(settings), "--")
