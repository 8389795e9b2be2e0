"""From `job.yaml` to a JobSpec, or to everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.errors import SpecError
from shoal.jobs.model import JobSpec
from shoal.jobs.options import job_of
from shoal.spec import reader
from shoal.spec.explain import explain
from shoal.spec.finding import Finding
from shoal.spec.load import read_text

__all__ = ["job_of", "load_job", "load_job_text"]


def load_job(path: Path, over: Mapping[str, Any] | None = None) -> JobSpec:
    """The job in a file, with `over` in place of what the file says. Raises SpecError with every finding."""
    return load_job_text(read_text(path, missing="name one that describes a job"), str(path), over)


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
