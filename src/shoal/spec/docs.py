"""The reference of `shoal.yaml`, made from the models: a page for people, a JSON Schema for editors."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any

from shoal.spec.accounting import Account, Accounting, Qos, Share
from shoal.spec.containers import Containers, Registry
from shoal.spec.environments import Environment, Proxy
from shoal.spec.files import ShippedFile
from shoal.spec.health import Health
from shoal.spec.hosts import Controller, HostEntry, HostSet, Login, NodeSet
from shoal.spec.machines import RENTED_FIELDS, HasSite, LoginFields, MachineFields, RentedHostFields, Sandbox
from shoal.spec.model import Spec
from shoal.spec.network import Network
from shoal.spec.partitions import Partition
from shoal.spec.rental import Budget, OfferChoice, ProviderAccount
from shoal.spec.slurm_options import SlurmOptions
from shoal.spec.storage import SharedDirectory
from shoal.spec.tracking import Tracking
from shoal.spec.users import ClusterUser
from shoal.spec.values import SpecModel

EXAMPLE = """\
# shoal.yaml
cluster: reef
controller: {host: desktop, compute: true}
nodesets:
  lab:
    hosts: [gpu01, gpu02, {name: gpu03, address: 10.0.0.13}]
    user: ubuntu
  rack:
    hosts:
      - rack[01-16]
    features: [a100]
  fish:
    provider: sandbox
    count: 2
    gpus: 2
partitions:
  main: {nodesets: [lab, controller], default: true, max_time: 1-00:00:00}
  big: {nodesets: [rack], max_nodes: 8}
  play: {nodesets: [fish], max_time: 30}
"""

_SECTIONS: tuple[tuple[str, type[SpecModel]], ...] = (
    ("The file", Spec),
    ("controller", Controller),
    ("login", Login),
    ("nodesets", NodeSet),
    ("A host", HostEntry),
    ("Logging in", LoginFields),
    ("Made by a provider", MachineFields),
    ("Rented hosts", RentedHostFields),
    ("sandbox", Sandbox),
    ("partitions", Partition),
    ("providers", ProviderAccount),
    ("Offers", OfferChoice),
    ("budget", Budget),
    ("network", Network),
    ("accounting", Accounting),
    ("Accounts", Account),
    ("Users of an account", Share),
    ("QOS", Qos),
    ("storage", SharedDirectory),
    ("users", ClusterUser),
    ("environments", Environment),
    ("containers", Containers),
    ("A registry of images", Registry),
    ("proxy", Proxy),
    ("tracking", Tracking),
    ("files", ShippedFile),
    ("health", Health),
    ("slurm", SlurmOptions),
)

_INTRODUCTION = f"""\
<!-- Made from the models in src/shoal/spec by `python -m shoal.spec.docs > docs/spec.md`. -->

# shoal.yaml

One file says what the cluster is. `shoal check` reads it and names everything that is wrong with it, each with its line
and column; `shoal schema` prints a JSON Schema, with which an editor completes it; `shoal init` writes a first one.

```yaml
{EXAMPLE}```

The file is plain YAML 1.2: mappings, lists, text, whole numbers, `true` and `false`. Anchors, aliases, merge keys and
tags are refused, and so is every key that is not on this page.
"""


def spec_markdown() -> str:
    """The page `docs/spec.md`."""
    return "\n".join([_INTRODUCTION, *(_section(title, model) for title, model in _SECTIONS)]).rstrip() + "\n"


def schema() -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of the file."""
    body = _json_schema(Spec)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **body,
        "title": "shoal.yaml",
        "description": "A Slurm cluster, as Shoal builds it.",
    }


def _json_schema(model: type[SpecModel]) -> Any:
    """Pydantic's schema, with the text under each field. Reading that takes long, so no other command does it."""
    _describe_fields()
    return _tidy(model.model_json_schema())


@cache
def _describe_fields() -> None:
    models: list[type[SpecModel]] = [HasSite, HostSet, *(model for _, model in _SECTIONS)]
    for model in models:
        texts: dict[str, str] = {}
        for parent in reversed(model.__mro__[: model.__mro__.index(SpecModel)]):
            texts.update(_texts_under_fields(parent))
        for name, field in model.model_fields.items():
            field.description = texts.get(name)
    # In the order of their definition: a model takes in those above it as they are.
    for model in sorted(models, key=_place):
        model.model_rebuild(force=True)


def _place(model: type[SpecModel]) -> tuple[int, int]:
    containers = (NodeSet.__module__, Spec.__module__)  # in the order of their imports; other sections stand alone
    rank = containers.index(model.__module__) + 1 if model.__module__ in containers else 0
    return rank, inspect.getsourcelines(model)[1]


def _texts_under_fields(model: type) -> dict[str, str]:
    [body] = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(description))):
                texts[name] = inspect.cleandoc(description)
    return texts


def _tidy(entry: Any) -> Any:
    """Only what the loader does: it takes no `null` for an optional field, and no key that has the wrong form."""
    if isinstance(entry, list):
        return [_tidy(part) for part in entry]
    if not isinstance(entry, dict):
        return entry
    tidy = {key: _tidy(value) for key, value in entry.items() if key not in ("properties", "$defs")}
    for names in ("properties", "$defs"):  # their keys are the user's words, not the schema's
        if names in entry:
            tidy[names] = {name: _tidy(value) for name, value in entry[names].items()}
    if tidy.get("default", ...) is None:
        del tidy["default"]
    if "patternProperties" in tidy:
        tidy["additionalProperties"] = False
    if {"type": "null"} in tidy.get("anyOf", ()):
        (only,) = (option for option in tidy.pop("anyOf") if option != {"type": "null"})
        tidy = {**tidy, **only}
    return tidy


def _section(title: str, model: type[SpecModel]) -> str:
    definition = _json_schema(model)
    definition = definition["anyOf"][1] if "anyOf" in definition else definition
    required = definition.get("required", [])
    lines = [f"## {title}", "", inspect.cleandoc(model.__doc__ or ""), ""]
    own_fields = _own_fields(model)
    if own_fields:
        lines += ["| Field | Type | Default | What it says |", "|---|---|---|---|"]
    for name in (model.model_fields[field].alias or field for field in own_fields):
        entry = definition["properties"][name]
        default = "required" if name in required else _default(entry.get("default"))
        lines.append(f"| `{name}` | {_type(entry)} | {default} | {entry['description']} |")
    for base, text, when in (
        (LoginFields, "Logging in", "Without `provider`"),
        (MachineFields, "Made by a provider", "With `provider`"),
        (RentedHostFields, "Rented hosts", "With an account as `provider`"),
    ):
        if base in model.__mro__[1:]:
            anchor = text.lower().replace(" ", "-")
            lines += ["", f"{when}, also the fields of [{text}](#{anchor})."]
    return "\n".join(lines) + "\n"


def _own_fields(model: type[SpecModel]) -> list[str]:
    """The fields of a section; what all sets of hosts share is shown once, in its own section."""
    shared: set[str] = set()
    if model not in (LoginFields, MachineFields) and issubclass(model, LoginFields | MachineFields):
        shared = {*LoginFields.model_fields, *MachineFields.model_fields} - {*model.__annotations__}
        shared |= {*RENTED_FIELDS} if issubclass(model, Controller | Login) else set()
    fields = [name for name in model.model_fields if name not in shared]
    # `hosts` before what is particular to the kind of set
    return sorted(fields, key=lambda name: name not in HostSet.model_fields) if issubclass(model, HostSet) else fields


def _default(value: object) -> str:
    if value is None or value == [] or value == {}:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(entry: dict[str, Any]) -> str:
    if "$ref" in entry:
        return _LINKS[entry["$ref"].rpartition("/")[2]]
    if "const" in entry:
        return f"`{entry['const']}`"
    if "enum" in entry:
        return ", ".join(f"`{word}`" for word in entry["enum"])
    kind = entry["type"]
    if kind == "integer":
        return f"{entry['minimum']} to {entry['maximum']}"
    if kind == "boolean":
        return "`true`, `false`"
    if kind == "array":
        return f"list of {_type(entry['items'])}"
    if kind == "object":
        values = entry.get("patternProperties", {"": entry["additionalProperties"]})
        return f"name: {_type(next(iter(values.values())))}"
    return str(entry["title"]) if "title" in entry else "text or number"


_LINKS = {
    model.__name__: f"[{'host' if model is HostEntry else title}](#{title.lower().replace(' ', '-')})"
    for title, model in _SECTIONS
}


if __name__ == "__main__":
    print(spec_markdown(), end="")
