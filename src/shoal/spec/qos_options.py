"""Settings of a QOS that Shoal has no field for, as sacctmgr has them: their names, forms and values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator

from shoal.spec.checks import InvalidValue, refusal, slurm_time
from shoal.spec.finding import Path, Problem, nearest, show
from shoal.spec.slurm_options import OptionValue, duplicate_keys, option_key

Form = Literal["count", "factor", "seconds", "time", "tres", "words"]

QOS_OPTIONS: Mapping[str, Form] = {
    "Flags": "words",
    "GraceTime": "seconds",
    "GrpJobsAccrue": "count",
    "GrpSubmitJobs": "count",
    "GrpTRES": "tres",
    "GrpTRESMins": "tres",
    "GrpTRESRunMins": "tres",
    "GrpWall": "time",
    "LimitFactor": "factor",
    "MaxJobsAccruePerAccount": "count",
    "MaxJobsAccruePerUser": "count",
    "MaxJobsPerAccount": "count",
    "MaxSubmitJobsPerAccount": "count",
    "MaxTRESMinsPerJob": "tres",
    "MaxTRESPerAccount": "tres",
    "MaxTRESPerJob": "tres",
    "MaxTRESPerNode": "tres",
    "MaxTRESPerUser": "tres",
    "MaxTRESRunMinsPerAccount": "tres",
    "MaxTRESRunMinsPerUser": "tres",
    "MinPrioThreshold": "count",
    "MinTRESPerJob": "tres",
    "Preempt": "words",
    "PreemptExemptTime": "time",
    "PreemptMode": "words",
    "UsageFactor": "factor",
    "UsageThreshold": "factor",
}
"""Every option of a QOS, with the form of its value."""

_MANAGED_KEYS = {
    "Name": "the name in `qos`",
    "Priority": "`priority`",
    "MaxWall": "`max_time`",
    "MaxWallDurationPerJob": "`max_time`",
    "MaxJobsPerUser": "`max_jobs`",
    "MaxJobs": "`max_jobs`",
    "MaxSubmitJobsPerUser": "`max_submit`",
    "MaxSubmitJobs": "`max_submit`",
    "GrpJobs": "`group_jobs`",
    "Description": "",
    "ID": "",
    "RawUsage": "",
}
_FIELDS_OF_TRES = {
    "MaxTRESPerJob": {"gres/gpu": "max_gpus", "cpu": "max_cpus", "node": "max_nodes"},
    "GrpTRES": {"gres/gpu": "group_gpus", "cpu": "group_cpus"},
    "GrpTRESMins": {"gres/gpu": "gpu_hours"},
    "MaxTRESPerUser": {"gres/gpu": "max_gpus_per_user"},
}
"""The parts of these settings that Shoal has a field for."""

_FORMS: Mapping[Form, tuple[str, str]] = {
    "count": (r"[0-9]{1,9}", "give a whole number"),
    "factor": (r"[0-9]{1,9}(\.[0-9]{1,6})?", "give a number such as 0.5"),
    "seconds": (r"[0-9]{1,9}", "give seconds"),
    "tres": (r"[a-z][\w/:.-]*=[0-9]{1,15}[KMGTP]?(,[a-z][\w/:.-]*=[0-9]{1,15}[KMGTP]?)*", "write cpu=64,mem=512G"),
    "words": (r"[A-Za-z0-9_.-]+(,[A-Za-z0-9_.-]+)*", "write words with commas between"),
}


def _name(value: object) -> str:
    key = option_key("a QOS", _MANAGED_KEYS)(value)
    spelling = {name.lower(): name for name in QOS_OPTIONS}
    if key.lower() not in spelling:
        raise refusal("not an option of a QOS", nearest(key, list(QOS_OPTIONS)))
    return spelling[key.lower()]


QosOptionName = Annotated[str, BeforeValidator(_name)]
QosOptionValue = OptionValue


def qos_option_problems(path: Path, options: Mapping[str, str | None], qos: Sequence[str]) -> Iterator[Problem]:
    """Values of the wrong form, and limits that Shoal has a field for. `qos` are the names of all QOS."""
    yield from duplicate_keys(path, options)
    for key, value in options.items():
        place, form = (*path, key), QOS_OPTIONS.get(key)
        if value is None or form is None:
            continue
        if problem := _form_problem(form, value):
            yield Problem(place, "not a value of this setting", show(value), problem)
            continue
        if form == "tres":
            fields = _FIELDS_OF_TRES.get(key, {})
            for name in tres_counts(value).keys() & fields.keys():
                yield Problem(place, "Shoal has a field for this limit", show(name), f"use `{fields[name]}`")
        if key == "Preempt":
            for name in value.split(","):
                if name not in qos:
                    yield Problem(place, "unknown QOS", show(name), nearest(name, list(qos)))


def preempt_problems(
    path: Path, options: Mapping[str, Mapping[str, str | None]], slurm_options: Mapping[str, str | None]
) -> Iterator[Problem]:
    """A QOS preempts jobs of another only with the plugin for it."""
    types = [value for key, value in slurm_options.items() if key.lower() == "preempttype"]
    for name in options:
        if "Preempt" in options[name] and types != ["preempt/qos"]:
            what, fix = "it preempts no job: Slurm preempts by partition", "set slurm.options.PreemptType: preempt/qos"
            yield Problem((*path, name, "options", "Preempt"), what, "", fix, "warning")


def tres_counts(text: str) -> dict[str, str]:
    """`cpu=64,mem=512G` as a mapping."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name: count for name, _, count in pairs}


def _form_problem(form: Form, value: str) -> str:
    """How to write a value of this form; empty where it is written so."""
    if form == "time":
        try:
            slurm_time(value)
        except InvalidValue as error:
            return error.fix
        return ""
    pattern, fix = _FORMS[form]
    return "" if re.fullmatch(pattern, value) else fix
