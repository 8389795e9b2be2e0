"""pydantic's errors in our words, each at its place in the file."""

from __future__ import annotations

import re
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shoal.spec.finding import Finding
from shoal.spec.model import Spec
from shoal.spec.problem import Path, closest, nearest
from shoal.spec.reader import Tree
from shoal.spec.words import show

_WRONG_TYPE = {
    "bool_type": ("not true or false", "write `true` or `false`"),
    "string_type": ("not text", "write a plain word"),
    "tuple_type": ("not a list", "write [a, b], or one `- a` a line"),
    "dict_type": ("not a mapping", "write `key: value` lines under it"),
    "model_type": ("not a mapping", "write `key: value` lines under it"),
}

_WRITTEN: dict[Path, str] = {
    ("cluster",): "cluster: reef",
    ("controller",): "controller: {host: gpu01}",
    ("nodesets",): "nodesets: {lab: {hosts: [gpu01, gpu02]}}",
    ("partitions",): "partitions: {main: {nodesets: [lab]}}",
    ("storage",): "storage: {/shared: {kind: nfs}}",
    ("environments",): "environments: {torch: {requirements: requirements.txt}}",
}
"""How keys are written that most files have."""


def explain(error: ValidationError, tree: Tree, root: type[BaseModel] = Spec) -> list[Finding]:
    """A finding for each error, except where the reader or the rules have made one. `root` is the file's model."""
    findings = []
    details = error.errors(include_url=False)
    misspelt = _meant(details, root)
    for detail in details:
        if detail["type"] == "rules":
            continue  # the loader asks the rules itself, about the file as it stands
        path: Path = detail["loc"]
        if detail["type"] == "missing" and path in misspelt:
            continue  # one finding is enough: the key is there under another name
        seen = any(path[:end] in tree.unreadable for end in range(len(path) + 1))
        if seen and detail["type"] != "extra_forbidden":
            continue
        findings.append(_explain(detail, tree, root))
    return findings


def _meant(details: list[ErrorDetails], root: type[BaseModel]) -> set[Path]:
    """The keys that unknown ones were probably meant to be."""
    unknown: list[Path] = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    near = ((path[:-1], closest(str(path[-1]), list(_model_at(path[:-1], root).model_fields))) for path in unknown)
    return {(*path, key) for path, key in near if key}


def _explain(detail: ErrorDetails, tree: Tree, root: type[BaseModel]) -> Finding:
    path: Path = detail["loc"]
    if detail["type"] == "missing":
        line = _written(path)
        fix = f"add a line such as `{line}`" if line else f"add `{path[-1]}:` here"
        return tree.finding(path[:-1], f"missing key `{path[-1]}`", "", fix)
    if detail["type"] == "extra_forbidden":
        key = str(path[-1])
        fix = nearest(key, list(_model_at(path[:-1], root).model_fields))
        return tree.finding(path[:-1], "unknown key", show(key), fix, place=tree.keys.get(path))
    if path[-1:] == ("[key]",):
        path, place = path[:-1], tree.keys.get(path[:-1])
        found = show(path[-1])
    else:
        while path and path not in tree.places:  # a part of `user@host:port`: the file has only the whole
            path = path[:-1]
        place = None
        found = show(_value_at(tree.data, path)) if path not in tree.source else tree.source[path][:40]
    context: dict[str, Any] = detail.get("ctx", {})
    if detail["type"] == "shoal":
        return tree.finding(path, context["what"], context.get("found", found), context["fix"], place=place)
    what, fix = _WRONG_TYPE.get(detail["type"], ("not a value that can stand here", ""))
    if what == "not a mapping" and (line := _written(path)):
        fix = f"write it as `{line}`"
    elif what == "not a list" and isinstance(text := _value_at(tree.data, path), str):
        fix = f"write {_as_list(text)}"
    return tree.finding(path, what, found, fix, place=place)


def _written(path: Path) -> str:
    """A line as an example; nothing where the key is of the rarer kind."""
    if len(path) == 2 and path[0] == "nodesets":
        return f"{path[1]}: {{hosts: [gpu01, gpu02]}}"
    return _WRITTEN.get(path, "")


def _as_list(text: str) -> str:
    """`gpu01, gpu[02-04]` as the list that was meant: `[gpu01, "gpu[02-04]"]`."""
    items = (item.strip() for item in re.split(r",(?![^\[]*\])", text))
    return "[" + ", ".join(one if re.fullmatch(r"[\w.-]+", one) else show(one) for one in items if one) + "]"


def _model_at(path: Path, root: type[BaseModel]) -> type[BaseModel]:
    """The model that the value at a path is read into."""
    model = root
    inside = False  # a mapping by name or a list: its next part is a name or an index, not a field
    for part in path:
        if inside:
            inside = False
            continue
        annotation = model.model_fields[str(part)].annotation
        inside = get_origin(annotation) in (dict, tuple)
        model = _nested(annotation) or model
    return model


def _nested(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for argument in get_args(annotation) if (model := _nested(argument))), None)


def _value_at(data: Any, path: Path) -> Any:
    for part in path:
        data = data[part]
    return data
