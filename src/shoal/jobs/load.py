"""From `job.yaml` to a JobSpec, or to everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.errors import SpecError
from shoal.jobs.model import RENAMED_FIELDS, JobSpec, job_from_options
from shoal.spec import reader
from shoal.spec.finding import Finding, show
from shoal.spec.loader import explain, read_text


def load_job(path: Path, over: Mapping[str, Any] | None = None) -> JobSpec:
    """The job in a file, with `over` in place of what the file says. Raises SpecError with every finding."""
    return load_job_text(read_text(path, missing="name one that describes a job"), str(path), over)


def load_job_text(text: str, file: str, over: Mapping[str, Any] | None = None) -> JobSpec:
    """The same for a text; `file` is the name that findings give it."""
    tree = reader.read(text, file)
    over = dict(over or {})
    findings = list(tree.findings)
    for name in RENAMED_FIELDS.keys() & tree.data.keys():
        place = tree.keys.get((name,))
        findings.append(tree.finding((), "renamed key", show(name), RENAMED_FIELDS[name], place=place))
    # File and options are validated apart, so that each finding names its own place.
    values = {name: value for name, value in tree.data.items() if name not in over and name not in RENAMED_FIELDS}
    try:
        JobSpec.model_validate({**values, **({"script": "x"} if "script" in over else {})})
    except ValidationError as error:
        findings += explain(error, tree, JobSpec)
    try:
        job_from_options({"script": "x", **over})
    except SpecError as error:
        findings += [finding for finding in error.findings if isinstance(finding, Finding)]
    if findings:
        findings.sort(key=reader.by_place)
        raise SpecError(tuple(findings))
    return JobSpec.model_validate({**values, **over})
