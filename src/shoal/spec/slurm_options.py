"""Further settings of Slurm that Shoal has no field for: of slurm.conf, and of one partition or QOS."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from shoal.spec.checks import choice, matching, refusal
from shoal.spec.finding import Path, Problem, show
from shoal.spec.values import SpecModel

MANAGED_SLURM_KEYS = (
    *("AuthInfo", "AuthType", "ClusterName", "CommunicationParameters", "ControlAddr", "ControlMachine"),
    *("CredType", "GresTypes", "Include", "JobAcctGatherType", "JobCompLoc", "JobCompType", "MaxNodeCount"),
    *("NodeName", "NodeSet", "PartitionName", "PluginDir", "PrivateData", "ProctrackType"),
    *("ResumeFailProgram", "ResumeProgram", "ResumeRate", "ResumeTimeout", "SelectType"),
    *("SelectTypeParameters", "SlurmctldAddr", "SlurmctldHost", "SlurmctldLogFile", "SlurmctldParameters"),
    *("SlurmctldPidFile", "SlurmctldPort", "SlurmdLogFile", "SlurmdPidFile", "SlurmdPort", "SlurmdSpoolDir"),
    *("SlurmdUser", "SlurmUser", "SrunPortRange", "StateSaveLocation", "SuspendExcNodes", "SuspendProgram"),
    *("SuspendRate", "SuspendTime", "SuspendTimeout", "SwitchType", "TopologyPlugin", "TreeWidth"),
)
"""The keys of slurm.conf that Shoal writes itself, so that they agree with what it does to the hosts."""

FIELDS_FOR_SLURM_KEYS = {"GresTypes": "`shards` or `mps` of a nodeset", "PartitionName": "`partitions`"}
"""What to use in place of some of them."""

ACCOUNTING_KEYS = (
    *("accountingstoragetype", "accountingstoragehost", "accountingstorageport", "accountingstorageenforce"),
    *("accountingstoragebackuphost", "accountingstoragepass", "accountingstorageuser"),
)
"""The keys that Shoal writes with `accounting`, in lower case."""


def option_key(what: str, managed: Mapping[str, str]) -> Callable[[object], str]:
    """A check for keys. `managed` are those that Shoal sets itself, with what to use instead where there is something.

    Slurm ignores the case of keys.
    """
    instead = {key.lower(): text for key, text in managed.items()}

    def check(value: object) -> str:
        key = matching("[A-Za-z][A-Za-z0-9]{0,63}", f"not a key of {what}", "use letters and digits only")(value)
        if key.lower() in instead:
            fix = instead[key.lower()]
            raise refusal("Shoal writes this key itself", f"use {fix}" if fix else "delete it here")
        return key

    return check


def option_value(value: object) -> str:
    """A value of Slurm's files. One with blanks is quoted there, and nothing in it can end the quotes or the line."""
    if isinstance(value, bool):
        raise refusal("not a value of Slurm's", "write YES or NO, as Slurm does")
    text = f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else value
    if not isinstance(text, str) or not re.fullmatch(r"(?! )[ !$-\[\]-~]{1,1024}(?<! )", text):
        raise refusal("not a value of slurm.conf", "use ASCII text without quotes, `#` and `\\`")
    return text


_slurm_key = option_key("slurm.conf", {key: FIELDS_FOR_SLURM_KEYS.get(key, "") for key in MANAGED_SLURM_KEYS})
OptionValue = Annotated[
    str, BeforeValidator(option_value), WithJsonSchema({"type": ["string", "number"], "title": "text or number"})
]


SlurmSource = Literal["packages", "shoal"]


class SlurmOptions(SpecModel):
    """Which Slurm the hosts get, and more of slurm.conf."""

    source: Annotated[SlurmSource, BeforeValidator(choice("source of Slurm", ("packages", "shoal")))] = Field(
        "packages", alias="from"
    )
    """Where Slurm comes from: the `packages` of each host, or `shoal`, one release for all hosts."""
    options: dict[Annotated[str, BeforeValidator(_slurm_key)], OptionValue] = Field(default_factory=dict)
    """Keys of slurm.conf with their values: `{KillWait: 60}`. Words of a list such as SchedulerParameters are added."""


def source_problems(slurm: SlurmOptions, auth: str) -> Iterator[Problem]:
    """What does not go with Shoal's own Slurm."""
    if slurm.source == "shoal" and auth != "slurm":
        what = "`slurm: {from: shoal}` has no munge: Slurm itself authenticates its daemons"
        yield Problem(("auth",), what, show(auth), "delete this line")


def option_problems(options: Mapping[str, str | None], *, accounting: bool) -> Iterator[Problem]:
    """Keys that are there twice, and keys and values that do not agree with the rest of the file."""
    path: Path = ("slurm", "options")
    yield from duplicate_keys(path, options)
    for key, value in options.items():
        place = (*path, key)
        if accounting and key.lower() in ACCOUNTING_KEYS:
            yield Problem(place, "`accounting` writes this key itself", "", "delete it here")
        if key.lower() == "taskplugin" and value is not None and "task/none" in value.lower().split(","):
            yield Problem(place, "`task/none` would end the confinement of jobs", show(value), "delete it here")


def duplicate_keys(path: Path, options: Iterable[str]) -> Iterator[Problem]:
    """Keys that are there twice, as Slurm ignores their case."""
    first_keys: dict[str, str] = {}
    for key in options:
        first = first_keys.setdefault(key.lower(), key)
        if first != key:
            yield Problem((*path, key), "duplicate key", show(key), f"`{first}` is the same key to Slurm; delete one")
