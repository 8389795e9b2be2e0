"""From the options of a command line, or of a Python call, to a JobSpec, or to everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shoal.errors import SpecError
from shoal.jobs.model import JobSpec
from shoal.spec.finding import Finding
from shoal.spec.problem import nearest
from shoal.spec.words import show


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
