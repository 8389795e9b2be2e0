"""Further keys of slurm.conf that Shoal does not write itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from shoal.spec.finding import Problem, show
from shoal.spec.values import SpecModel, matching, refusal

MANAGED_SLURM_KEYS = (
    *("AuthInfo", "AuthType", "ClusterName", "CommunicationParameters", "ControlAddr", "ControlMachine"),
    *("CredType", "GresTypes", "Include", "JobAcctGatherType", "JobCompLoc", "JobCompType", "MaxNodeCount"),
    *("NodeName", "NodeSet", "PartitionName", "PluginDir", "PrivateData", "ProctrackType", "PrologFlags"),
    *("ResumeFailProgram", "ResumeProgram", "ResumeRate", "ResumeTimeout", "SelectType"),
    *("SelectTypeParameters", "SlurmctldAddr", "SlurmctldHost", "SlurmctldLogFile", "SlurmctldParameters"),
    *("SlurmctldPidFile", "SlurmctldPort", "SlurmdLogFile", "SlurmdPidFile", "SlurmdPort", "SlurmdSpoolDir"),
    *("SlurmdUser", "SlurmUser", "SrunPortRange", "StateSaveLocation", "SuspendExcNodes", "SuspendProgram"),
    *("SuspendRate", "SuspendTime", "SuspendTimeout", "SwitchType", "TaskPlugin", "TopologyPlugin"),
    "TreeWidth",
)
"""The keys of slurm.conf that Shoal writes itself, so that they agree with what it does to the hosts."""

ACCOUNTING_KEYS = (
    *("accountingstoragetype", "accountingstoragehost", "accountingstorageport", "accountingstorageenforce"),
    *("accountingstoragetres", "accountingstoragebackuphost", "accountingstoragepass", "accountingstorageuser"),
)
"""The keys that Shoal writes with `accounting`, in lower case."""


def _option_name(value: object) -> str:
    name = matching("[A-Za-z]{1,64}", "not a key of slurm.conf", "use letters only")(value)
    if name.lower() in map(str.lower, MANAGED_SLURM_KEYS):
        raise refusal("Shoal writes this key itself", "delete it here")
    return name


def _option_value(value: object) -> str:
    # slurm.conf takes several `Key=value` on one line, so a blank would let a value smuggle in another key.
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not re.fullmatch(r"[!$-\[\]-~]{1,1024}", text):
        raise refusal("not a value of slurm.conf", "use ASCII text without blanks, quotes, `#` and `\\`")
    return text


class SlurmOptions(SpecModel):
    """More of slurm.conf."""

    options: dict[
        Annotated[str, BeforeValidator(_option_name)],
        Annotated[str, BeforeValidator(_option_value), WithJsonSchema({"type": ["string", "integer"]})],
    ] = Field(default_factory=dict)
    """Keys of slurm.conf with their values: `{KillWait: 60}`. Some keys are Shoal's alone."""


def option_problems(options: Iterable[str], *, accounting: bool) -> Iterator[Problem]:
    """Keys that are there twice, as slurm.conf ignores their case, and keys that `accounting` writes."""
    first_keys: dict[str, str] = {}
    for key in options:
        first = first_keys.setdefault(key.lower(), key)
        if first != key:
            fix = f"`{first}` is the same key to Slurm; delete one"
            yield Problem(("slurm", "options", key), "duplicate key", show(key), fix)
        if accounting and key.lower() in ACCOUNTING_KEYS:
            yield Problem(("slurm", "options", key), "`accounting` writes this key itself", "", "delete it here")
