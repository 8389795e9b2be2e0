"""From `job.yaml`, or the options of a command line, to a JobSpec, or to everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.errors import SpecError
from shoal.jobs.model import JobSpec
from shoal.spec import reader
from shoal.spec.explain import explain
from shoal.spec.finding import Finding
from shoal.spec.load import read_text
from shoal.spec.problem import nearest
from shoal.spec.words import show


def load_job(path: Path, over: Mapping[str, Any] | None = None) -> JobSpec:
    """The job in a file, with `over` in place of what the file says. Raises SpecError with every finding."""
    return load_job_text(read_text(path), str(path), over)


def load_job_text(text: str, file: str, over: Mapping[str, Any] | None = None) -> JobSpec:
    """The same for a text; `file` is the name that findings give it."""
    tree = reader.read(text, file)
    over = dict(over or {})
    findings = list(tree.findings)
    # Each part by itself, so that what is wrong with either is told where it stands.
    kept = {name: value for name, value in tree.data.items() if name not in over}
    try:
        JobSpec.model_validate({**kept, **({"script": "x"} if "script" in over else {})})
    except ValidationError as error:
        findings += explain(error, tree, JobSpec)
    try:
        job_of({"script": "x", **over})
    except SpecError as error:
        findings += [finding for finding in error.findings if isinstance(finding, Finding)]
    if findings:
        findings.sort(key=reader.by_place)
        raise SpecError(tuple(findings))
    return JobSpec.model_validate({**kept, **over})


def job_of(values: Mapping[str, Any]) -> JobSpec:
    """The job of a command line or a Python call. Raises SpecError with every finding, spelled as options."""
    try:
        return JobSpec.model_validate(dict(values))
    except ValidationError as error:
        raise SpecError(tuple(_option(detail) for detail in error.errors(include_url=False))) from None


def _option(detail: Any) -> Finding:
    name = str(detail["loc"][0]) if detail["loc"] else ""
    option = f"--{name.replace('_', '-')}"
    context = detail.get("ctx", {})
    if detail["type"] == "extra_forbidden":
        return Finding("error", "unknown field", show(name), nearest(name, list(JobSpec.model_fields)))
    if detail["type"] == "missing":
        return Finding("error", "no script is named", fix="shoal run train.py, or `script:` in the job's file")
    what, fix = context.get("what", "not a value that can stand here"), context.get("fix", "")
    return Finding("error", what, context.get("found", show(detail["input"])), fix, path=option)
