"""Accounting in the file: accounts with their limits, QOS, and the database host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic_core import CoreSchema

from shoal.spec.checks import matching, refusal
from shoal.spec.finding import Path, Problem, nearest, show
from shoal.spec.qos_options import QosOptionName, QosOptionValue, preempt_problems, qos_option_problems
from shoal.spec.values import Between, MemberName, ShortForm, SlurmTime, SpecModel, UserName, text_schema

ROOT = "root"
"""Slurm's own account, the parent of all others, and its administrator."""
NORMAL = "normal"
"""The QOS that Slurm makes itself."""


def _word(kind: str, reserved: tuple[str, ...] = ()) -> BeforeValidator:
    fix = "use a lower-case letter, then lower-case letters, digits, `-`, `_` and `.`, at most 40"
    why = ("this name is Slurm's own", f"give {kind} another")
    return BeforeValidator(matching(r"[a-z][a-z0-9_.-]{0,39}", f"not a name for {kind}", fix, reserved, why))


_description = matching(
    r"[A-Za-z0-9][A-Za-z0-9 .,:/()+_-]{0,99}",
    "not a description",
    "use letters, digits, blanks and .,:/()+_- in at most 100 characters",
)


def _price(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1_000_000:
        raise refusal("not a price", "give what an hour of one GPU costs, such as 2.49")
    return float(value)


def unless_false(value: object) -> object:
    """`accounting: false` is the same as no `accounting` at all."""
    return None if value is False else value


AccountName = Annotated[str, _word("an account", (ROOT, "none", "all")), text_schema("name")]
ParentName = Annotated[str, _word("an account"), text_schema("name")]
QosName = Annotated[str, _word("a QOS", ("none", "all")), text_schema("name")]
Description = Annotated[str, BeforeValidator(_description), text_schema("description")]
Price = Annotated[float, BeforeValidator(_price), WithJsonSchema({"type": "number", "title": "price", "minimum": 0})]
Count = Annotated[int, Between(0, 1_000_000)]


class Limits(SpecModel):
    """Limits of use. A missing field sets no limit here; the limits of parent accounts still hold."""

    max_jobs: Count | None = None
    """The most jobs that each user may have running (MaxJobs)."""
    max_submit: Count | None = None
    """The most jobs that each user may have running and waiting (MaxSubmitJobs)."""
    max_time: SlurmTime | None = None
    """The longest that one job may run (MaxWall)."""
    max_gpus: Count | None = None
    """The most GPUs of one job (MaxTRES)."""
    max_cpus: Count | None = None
    """The most CPUs of one job (MaxTRES)."""
    max_nodes: Count | None = None
    """The most nodes of one job (MaxTRES)."""
    group_jobs: Count | None = None
    """The most jobs running at a time, of all users together (GrpJobs)."""
    group_gpus: Count | None = None
    """The most GPUs in use at a time, by all users together (GrpTRES)."""
    group_cpus: Count | None = None
    """The most CPUs in use at a time, by all users together (GrpTRES)."""
    gpu_hours: Count | None = None
    """A budget of GPU hours (GrpTRESMins). Slurm halves past use every 7 days, unless `slurm` sets another rate."""


class Share(Limits):
    """The share of an account, or of a user in it."""

    fairshare: Annotated[int, Between(1, 1_000_000)] = 1
    """Its share among its siblings: those that used less of their share come first."""
    qos: tuple[QosName, ...] = ()
    """The QOS its jobs may ask for. Without any, those of the parent account; at the top `normal`."""
    default_qos: QosName | None = None
    """The QOS of a job without `--qos`."""


class Account(Share):
    """People who share a part of the cluster, and are charged together."""

    description: Description | None = None
    """What it is, for `sacctmgr`."""
    parent: ParentName = ROOT
    """The account it is part of."""
    users: dict[UserName, Share] = Field(default_factory=dict)
    """Its users: a list of names, or a mapping of names to limits of their own. The first account is the default."""

    @model_validator(mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        if isinstance(value, Account):
            return value
        if not isinstance(value, dict):
            raise refusal("not an account", "write {users: [ann, bob]}")
        users = value.get("users")
        if not isinstance(users, list | tuple):
            return value
        names = [name for name in users if isinstance(name, str)]
        if len(names) < len(users):
            raise refusal("not a list of users", "write [ann, bob], or {ann: {max_gpus: 2}, bob: {}}")
        for name in names:
            if names.count(name) > 1:
                raise refusal("a user named twice", "name each once", name)
        return {**value, "users": {name: {} for name in names}}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        mapping = handler.resolve_ref_schema(handler(schema))
        users = {**mapping["properties"]["users"], "type": ["array", "object"], "items": {"type": "string"}}
        users["title"] = "names, or name: limits"
        return {**mapping, "properties": {**mapping["properties"], "users": users}}


class Qos(Limits):
    """A quality of service: a job asks for it with `--qos`, and gets its priority and its limits."""

    priority: Annotated[int, Between(0, 1_000_000)] = 0
    """A higher one comes first."""
    max_gpus_per_user: Count | None = None
    """The most GPUs that each user may use at a time (MaxTRESPerUser)."""
    options: dict[QosOptionName, QosOptionValue] = Field(default_factory=dict)
    """Further settings, as `sacctmgr` has them: `{Flags: DenyOnLimit, UsageFactor: 0.5, MaxTRESPerUser: cpu=64}`."""


class Accounting(ShortForm):
    """Job records in a database: MariaDB and slurmdbd, backed up every day.

    In the file it is `accounting: true`, or a mapping of the fields below.
    """

    short_schema: ClassVar = {"type": "boolean"}
    refusal = ("not accounting", "write true, or {accounts: {lab: {users: [ann]}}}, or delete it")

    host: MemberName | None = None
    """The host of the database. Without it, the controller."""
    accounts: dict[AccountName, Account] = Field(default_factory=dict)
    """Who may use the cluster. Without accounts, every user may, and you manage `sacctmgr` yourself."""
    qos: dict[QosName, Qos] = Field(default_factory=dict)
    """The qualities of service, by name."""
    backups: Annotated[int, Between(1, 1000)] = 14
    """How many backups to keep."""

    @classmethod
    def from_short(cls, value: object) -> dict[str, Any] | None:
        return {} if value is True else None


def accounting_problems(
    accounting: Accounting | None, hosts: Sequence[str], slurm_options: Mapping[str, str | None]
) -> Iterator[Problem]:
    """Every rule about accounting that does not hold. `hosts` are the names of all members."""
    if accounting is None:
        return
    host = accounting.host
    if host is not None and host not in hosts:
        yield Problem(("accounting", "host"), "no host of the cluster", show(host), nearest(host, list(hosts)))
    if accounting.qos and not accounting.is_set("accounts"):
        what = "`qos` without `accounts`: Slurm enforces no limit for users without an account"
        yield Problem(("accounting", "qos"), what, "", "add `accounts`: {lab: {users: [ann]}}")
    accounts = {name: account for name, account in accounting.accounts.items() if account is not None}
    yield from _parent_problems(accounts)
    qos_names = list(dict.fromkeys((NORMAL, *accounting.qos)))
    options = {name: qos.options for name, qos in accounting.qos.items() if qos is not None}
    for name in options:
        yield from qos_option_problems(("accounting", "qos", name, "options"), options[name], qos_names)
    yield from preempt_problems(("accounting", "qos"), options, slurm_options)
    for name, account in accounts.items():
        path: Path = ("accounting", "accounts", name)
        yield from _qos_problems(path, account, qos_names)
        for user, share in account.users.items():
            if user == ROOT:
                yield Problem((*path, "users"), "root is Slurm's administrator already", show(user), "delete it")
            if share is not None:
                yield from _qos_problems((*path, "users", user), share, qos_names)


def _parent_problems(accounts: Mapping[str, Account]) -> Iterator[Problem]:
    """The parent of an account exists, and no account is part of itself."""
    parents = {name: account.parent for name, account in accounts.items()}
    for name, parent in parents.items():
        path = ("accounting", "accounts", name, "parent")
        if parent != ROOT and parent not in parents:
            yield Problem(path, "unknown account", show(parent), nearest(parent, [*parents, ROOT]))
            continue
        ancestors, ancestor = {name}, parent
        while ancestor in parents and ancestor not in ancestors:
            ancestors.add(ancestor)
            ancestor = parents[ancestor]
        if ancestor == name:
            yield Problem(path, "an account that is part of itself", show(parent), "break the circle")


def _qos_problems(path: Path, share: Share, qos_names: list[str]) -> Iterator[Problem]:
    for name in share.qos:
        if name is not None and name not in qos_names:
            yield Problem((*path, "qos"), "unknown QOS", show(name), nearest(name, qos_names))
    default = share.default_qos
    if default is not None and default not in qos_names:
        yield Problem((*path, "default_qos"), "unknown QOS", show(default), nearest(default, qos_names))
    elif default is not None and share.is_set("qos") and default not in share.qos:
        fix = f"add {default} to `qos`, or choose one of them"
        yield Problem((*path, "default_qos"), "not among its `qos`", show(default), fix)
