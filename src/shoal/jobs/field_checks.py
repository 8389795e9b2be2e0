"""Checks of the fields of a job: what may stand on an #SBATCH line, in a variable or in an address. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal import hostlist
from shoal.spec.checks import InvalidValue, refusal, slurm_time

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from shoal.spec.finding import Path as FilePlace

SECRETS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
"""Variables of the operator's that go to a job with a tracker, and never into its script: anybody may read that."""


Check = Callable[[object], Any]


@dataclass(frozen=True)
class ListOf:
    """A list whose items all pass a check."""

    item: Check


@dataclass(frozen=True)
class MappingOf:
    """A mapping whose keys and values each pass a check."""

    key: Check
    value: Check


def read_value(check: Check | ListOf | MappingOf, value: Any, place: FilePlace, mistakes: list[ErrorDetails]) -> Any:
    """The value as the check returns it. What is wrong with it is added to `mistakes`, as pydantic writes it."""
    if isinstance(check, ListOf):
        if isinstance(value, list | tuple):
            numbered = enumerate(value)
            return tuple(read_value(check.item, part, (*place, number), mistakes) for number, part in numbered)
        mistakes.append(mistake("tuple_type", place, value))
    elif isinstance(check, MappingOf):
        if isinstance(value, dict):
            keys = [read_value(check.key, key, (*place, key, "[key]"), mistakes) for key in value]
            parts = zip(keys, value.items(), strict=True)
            return {key: read_value(check.value, part, (*place, old), mistakes) for key, (old, part) in parts}
        mistakes.append(mistake("dict_type", place, value))
    else:
        try:
            return check(value)
        except InvalidValue as error:
            mistakes.append(mistake("value_error", place, value, error))
    return None


def mistake(kind: str, place: FilePlace, value: object, error: InvalidValue | None = None) -> ErrorDetails:
    """A mistake, as pydantic writes it. `spec/loader.py` explains these."""
    return {"type": kind, "loc": place, "msg": "", "input": value, "ctx": {"error": error}}


_DEPENDENCY = r"(singleton|after(any|burstbuffer|corr|notok|ok)?(:[0-9]+(_[0-9]+)?(\+[0-9]+)?)+)"
_SIGNAL = re.compile(r"(R?B?R?:)?(SIG)?([A-Z][A-Z0-9]*|[0-9]+)(@([0-9]{1,5}))?", re.IGNORECASE)


def _word(kind: str, pattern: str, fix: str, limit: int = 512) -> Callable[[object], str]:
    """A check for text that goes on an #SBATCH line: nothing in it can end the line, the word or the quotes."""
    shape = re.compile(pattern)

    def check(value: object) -> str:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(text, str) or len(text) > limit or not shape.fullmatch(text):
            raise refusal(f"not a {kind}", fix)
        return text

    return check


def warning_signal(value: object) -> str:
    match = _SIGNAL.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[5] is None:
        raise refusal("not a signal", "write it like USR1@120: the signal, and how many seconds before the end")
    if match[1]:
        fix = f"leave it out: {match[3].upper()}@{match[5]}"
        if "B" not in match[1].upper():
            raise refusal("`R:` is about a reservation, and `shoal run` asks for none", fix)
        raise refusal("`B:` sends the signal to the batch shell alone", fix)
    if match[3].upper() in ("KILL", "9", "STOP", "19"):
        raise refusal("a process cannot catch this signal, so it cannot save its work", f"use USR1@{match[5]}")
    return f"{match[3].upper()}@{match[5]}"


def time_limit(value: object) -> str:
    """A time limit as sbatch reads it, so `1:30` is 90 seconds. The spec refuses that spelling."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}:[0-5][0-9]", value) and value.strip("0:"):
        return value
    return slurm_time(value)


def node_list(value: object) -> str:
    try:
        if isinstance(value, str) and hostlist.expand(value):
            return _word("hostlist", r"[A-Za-z0-9.,\[\]_-]+", "write it like gpu[01-04]", 4096)(value)
    except ValueError as error:
        raise refusal("not a hostlist", f"{error}; write it like gpu[01-04]") from None
    raise refusal("not a hostlist", "write it like gpu[01-04]")


def variable_name(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", value):
        raise refusal("not the name of a variable", "use letters, digits and `_`")
    if value.startswith(("SLURM_", "SHOAL_")):
        raise refusal("Slurm and Shoal set this variable themselves", "give it another name")
    if value in SECRETS:
        fix = "set it where you run `shoal run` with --tracking-uri: it takes it from there, past the script"
        raise refusal("this variable is a secret, and every user can read a batch script", fix, value)
    return value


def text_value(value: object) -> str:
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or "\0" in text:
        raise refusal("not text", "put it in quotes")
    return text


def tracking_address(value: object) -> str:
    fix = "write it like http://tracking.example:5000"
    if isinstance(value, str) and "@" in value:
        raise refusal(
            "the address has a password in it, and every user can read a batch script",
            "leave it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where you run `shoal run`",
            "...@" + value.rpartition("@")[2],
        )
    if not isinstance(value, str) or not re.fullmatch(r"https?://[!-~]{1,500}", value):
        raise refusal("not the address of a tracking server", fix)
    return value


def experiment_name(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > 200:
        raise refusal("not the name of an experiment", "give one line of text")
    return value


dependency = _word(
    "dependency", f"{_DEPENDENCY}([,?]{_DEPENDENCY})*", "write it like afterok:17, afterany:17:18 or singleton", 4096
)
memory_size = _word(
    "size", r"[0-9]{1,12}[KMGTkmgt]?", "write a number and K, M, G or T: 512M, 16G; 0 is the whole node"
)
array_range = _word(
    "range of an array", r"[0-9]+(-[0-9]+(:[0-9]+)?)?(,[0-9]+(-[0-9]+(:[0-9]+)?)?)*(%[0-9]+)?", "as 0-9%2"
)
job_word = _word("name", r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", "use letters, digits, `-`, `_`, `.` and `+`", 64)
container_name = _word(
    "container's name",
    r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(?<!\.lock)(?<!\.new)",  # nodes have such files of their own beside containers
    "use letters, digits, `-`, `_`, `.` and `+`, and no `.lock` or `.new` at the end",
    64,
)
constraint = _word("constraint", r"[A-Za-z0-9_.&|()\[\]*,:=-]+", "write features and & | ( ) [ ] *, without blanks")
output_path = _word(
    "path", r"[A-Za-z0-9_.%/+=@:,~-]+", "use letters, digits and _ . % / + = @ : , ~ -, without blanks", 1024
)
directory = _word("directory", r"(/[A-Za-z0-9_.+=@-]+)+", "give an absolute path without blanks", 512)


def file_patterns(value: object) -> tuple[str, ...]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(text, str) and text for text in patterns):
        raise refusal("not patterns of files", "give a list: ['*.bin', data/]")
    return tuple(map(text_value, patterns))


def python_program(value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or value[0] == "-":
        raise refusal("not a Python", "give a program, such as python3 or /opt/env/bin/python")
    return value


def true_or_false(value: object) -> bool:
    if not isinstance(value, bool):
        raise refusal("not true or false", "write `true` or `false`")
    return value
