"""From `shoal.yaml` to a Spec, or to everything that is wrong with it.

text → reader.read → data with places ─┬→ Spec.model_validate → explain.explain ─┐
                                       └→ rules.problems ────────────────────────┴→ findings by line
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from shoal.errors import SpecError
from shoal.spec import reader, rules
from shoal.spec.explain import explain
from shoal.spec.finding import Finding
from shoal.spec.model import Spec


def load(path: Path) -> Spec:
    """The spec in a file. Raises SpecError with every finding, and nothing else."""
    return load_all(path)[0]


def load_all(path: Path) -> tuple[Spec, list[Finding]]:
    """The spec in a file, and what is worth a warning about it. Raises SpecError with every finding."""
    return load_text_all(read_text(path), str(path))


def load_text(text: str, file: str) -> Spec:
    """The spec in a text; `file` is the name that findings give it."""
    return load_text_all(text, file)[0]


def load_text_all(text: str, file: str) -> tuple[Spec, list[Finding]]:
    """The spec in a text, and what is worth a warning about it."""
    tree = reader.read(text, file)
    findings = list(tree.findings)
    spec: Spec | None = None
    failure = ""
    try:
        spec = Spec.model_validate(tree.data)
    except ValidationError as error:
        failure = str(error)
        findings += explain(error, tree)
    findings += [
        tree.finding(problem.path, problem.what, problem.found, problem.fix, level=problem.level)
        for problem in rules.problems(tree.data)
    ]
    findings = sorted(dict.fromkeys(findings), key=reader.by_place)
    if spec is None or any(finding.level == "error" for finding in findings):
        assert findings, failure
        raise SpecError(tuple(findings))
    return spec, findings


def read_text(path: Path, *, missing: str = "`shoal init` writes one") -> str:
    """What is in the file, as text. Raises SpecError when it cannot be read; `missing` is what to do without one."""
    return _decode(_bytes(path, missing), str(path))


def _bytes(path: Path, missing: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(reader.MAX_BYTES + 1)
    except FileNotFoundError:
        raise SpecError((Finding("error", "no such file", fix=missing, file=str(path)),)) from None
    except IsADirectoryError:
        fix = "name the file in it"
        raise SpecError((Finding("error", "this is a directory", fix=fix, file=str(path)),)) from None
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpecError((Finding("error", "cannot read the file", found, file=str(path)),)) from None


def _decode(data: bytes, file: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, col = reader.position(data, error.start)
        found, fix = f"byte 0x{data[error.start]:02x}", "save it as UTF-8"
        raise SpecError((Finding("error", "not UTF-8 text", found, fix, file=file, line=line, col=col),)) from None
