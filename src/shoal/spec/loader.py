"""From `shoal.yaml` to a Spec, or to everything that is wrong with it.

text → reader.read → data with places → Spec, or errors and a partial Spec → Spec.problems → findings by line
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from shoal.errors import SpecError
from shoal.spec import reader
from shoal.spec.checks import InvalidValue
from shoal.spec.containers import PLUGIN, plugstack
from shoal.spec.files import PLUGSTACK, read_sources
from shoal.spec.finding import Finding, Problem, closest, nearest, show
from shoal.spec.finding import Path as FilePlace
from shoal.spec.hosts import HostEntry, parse_host
from shoal.spec.model import UNCHECKED, Spec
from shoal.spec.reader import Tree

Model = TypeVar("Model", bound=BaseModel)

_WRONG_TYPE = {
    "bool_type": ("not true or false", "write `true` or `false`"),
    "string_type": ("not text", "write a plain word"),
    "tuple_type": ("not a list", "write [a, b], or one `- a` a line"),
    "dict_type": ("not a mapping", "write `key: value` lines under it"),
    "model_type": ("not a mapping", "write `key: value` lines under it"),
}

_WRITTEN: dict[FilePlace, str] = {
    ("cluster",): "cluster: reef",
    ("controller",): "controller: {host: gpu01}",
    ("nodesets",): "nodesets: {lab: {hosts: [gpu01, gpu02]}}",
    ("partitions",): "partitions: {main: {nodesets: [lab]}}",
    ("storage",): "storage: {/shared: {kind: nfs}}",
    ("environments",): "environments: {torch: {requirements: requirements.txt}}",
}
"""How keys are written that most files have."""


def load_all(path: Path) -> tuple[Spec, list[Finding]]:
    """The spec in a file, and what is worth a warning about it. Raises SpecError with every finding."""
    return load_text_all(read_text(path), str(path), path.parent)


def load_text(text: str, file: str) -> Spec:
    """The spec in a text; `file` is the name that findings give it."""
    return load_text_all(text, file)[0]


def load_text_all(text: str, file: str, base: Path | None = None) -> tuple[Spec, list[Finding]]:
    """The spec in a text, and what is worth a warning about it. With `base`, the files below it that it names too."""
    tree = reader.read(text, file)
    findings = list(tree.findings)
    spec: Spec | None = None
    failure = ""
    try:
        spec = Spec.model_validate(tree.data, context=UNCHECKED)
    except ValidationError as error:
        failure = str(error)
        findings += explain(error.errors(include_url=False), tree, _keys_at)
    readable = spec or partial(Spec, tree.data)
    problems = readable.problems()
    sources = {**readable.files, **(readable.containers.sources if readable.containers else {})}
    if base is not None and sources:
        files, file_problems = read_sources(sources, base, readable.slurm.options)
        if PLUGIN in sources and PLUGSTACK in files:
            fix = "use `files` alone for the plugin, too, or delete it there"
            file_problems.append(Problem(("files", PLUGSTACK), "the engine pyxis writes this file", "", fix))
        elif PLUGIN in sources:
            files[PLUGSTACK] = plugstack()
        spec, problems = spec and spec.model_copy(update={"files": files}), problems + file_problems
    findings += [
        tree.finding(problem.path, problem.what, problem.found, problem.fix, level=problem.level)
        for problem in problems
    ]
    findings = sorted(dict.fromkeys(findings), key=reader.by_place)
    if spec is None or any(finding.level == "error" for finding in findings):
        assert findings, failure
        raise SpecError(tuple(findings))
    return spec, findings


def read_text(path: Path, *, missing: str = "`shoal init` writes one") -> str:
    """What is in the file, as text. Raises SpecError when it cannot be read; `missing` is what to do without one."""
    try:
        with path.open("rb") as file:
            data = file.read(reader.MAX_BYTES + 1)
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        finding = Finding("error", "no such file", fix=missing, file=str(path))
    except IsADirectoryError:
        finding = Finding("error", "this is a directory", fix="name the file in it", file=str(path))
    except UnicodeDecodeError as error:
        line, col = reader.position(data, error.start)
        byte, fix = f"byte 0x{data[error.start]:02x}", "save it as UTF-8"
        finding = Finding("error", "not UTF-8 text", byte, fix, file=str(path), line=line, col=col)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        finding = Finding("error", "cannot read the file", cause, file=str(path))
    raise SpecError((finding,))


def explain(details: Sequence[ErrorDetails], tree: Tree, keys_at: Callable[[FilePlace], list[str]]) -> list[Finding]:
    """A finding for each error, except where the reader has made one. `keys_at` has the keys of a mapping."""
    findings = []
    misspelt = _intended_keys(details, keys_at)
    for detail in details:
        path: FilePlace = detail["loc"]
        if detail["type"] == "missing" and path in misspelt:
            continue  # one finding is enough: the key is there under another name
        unreadable = any(path[:end] in tree.unreadable for end in range(len(path) + 1))
        if unreadable and detail["type"] != "extra_forbidden":
            continue
        findings.append(_explain(detail, tree, keys_at))
    return findings


def partial(model: type[Model], data: Mapping[str, Any]) -> Model:
    """A model of the valid part of the data, for the rules: a misspelt key must not hide their findings.

    An invalid field has its default, or None where it has none, and its name is in `invalid`. An invalid entry of a
    list or a mapping is None.
    """
    values: dict[str, Any] = {}
    invalid: set[str] = set()
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key in data:
            try:
                values[name] = _field_adapter(model, name).validate_python(data[key])
            except ValidationError:
                values[name] = _partial_value(field.annotation, data[key])
            if values[name] is None:
                invalid.add(name)
                del values[name]
        if name not in values and field.is_required():
            values[name] = None
    instance = model.model_construct(_fields_set={*data} & {*model.model_fields}, **values)
    object.__setattr__(instance, "invalid", frozenset(invalid))  # the model is frozen
    return instance


def _partial_value(annotation: Any, value: Any) -> Any:
    """The valid part of a value; None where there is none."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is dict and isinstance(value, dict):
        return {str(key): _partial_entry(arguments[1], entry) for key, entry in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_partial_entry(arguments[0], entry) for entry in value)
    model = _nested_model(annotation) if origin not in (dict, tuple) else None
    if model is HostEntry and isinstance(value, str):
        value = parse_host(value)
    return partial(model, value) if model is not None and isinstance(value, dict) else None


def _partial_entry(annotation: Any, value: Any) -> Any:
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return _partial_value(annotation, value)


@cache
def _field_adapter(model: type[BaseModel], name: str) -> TypeAdapter[Any]:
    field = model.model_fields[name]
    annotation: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return TypeAdapter(annotation)


def _intended_keys(details: Sequence[ErrorDetails], keys_at: Callable[[FilePlace], list[str]]) -> set[FilePlace]:
    """The keys that unknown ones were probably meant to be."""
    unknown: list[FilePlace] = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    near = ((path[:-1], closest(str(path[-1]), keys_at(path[:-1]))) for path in unknown)
    return {(*path, key) for path, key in near if key}


def _explain(detail: ErrorDetails, tree: Tree, keys_at: Callable[[FilePlace], list[str]]) -> Finding:
    path: FilePlace = detail["loc"]
    if detail["type"] == "missing":
        line = _example_line(path)
        fix = f"add a line such as `{line}`" if line else f"add `{path[-1]}:` here"
        return tree.finding(path[:-1], f"missing key `{path[-1]}`", "", fix)
    if detail["type"] == "extra_forbidden":
        key = str(path[-1])
        fix = nearest(key, keys_at(path[:-1]))
        return tree.finding(path[:-1], "unknown key", show(key), fix, place=tree.keys.get(path))
    if path[-1:] == ("[key]",):
        path, place = path[:-1], tree.keys.get(path[:-1])
        evidence = show(path[-1])
    else:
        while path and path not in tree.places:  # a part of `user@host:port`: the file has only the whole
            path = path[:-1]
        place = None
        evidence = show(reduce(getitem, path, tree.data)) if path not in tree.source else tree.source[path][:40]
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, InvalidValue):
        return tree.finding(path, error.what, error.found or evidence, error.fix, place=place)
    what, fix = _WRONG_TYPE.get(detail["type"], ("not a value that can stand here", ""))
    if what == "not a mapping" and (line := _example_line(path)):
        fix = f"write it as `{line}`"
    elif what == "not a list" and isinstance(text := reduce(getitem, path, tree.data), str):
        fix = f"write {_as_list(text)}"
    return tree.finding(path, what, evidence, fix, place=place)


def _example_line(path: FilePlace) -> str:
    """A line as an example; nothing where the key is of the rarer kind."""
    if len(path) == 2 and path[0] == "nodesets":
        return f"{path[1]}: {{hosts: [gpu01, gpu02]}}"
    return _WRITTEN.get(path, "")


def _as_list(text: str) -> str:
    """`gpu01, gpu[02-04]` as the list that was meant: `[gpu01, "gpu[02-04]"]`."""
    items = (item.strip() for item in re.split(r",(?![^\[]*\])", text))
    return "[" + ", ".join(item if re.fullmatch(r"[\w.-]+", item) else show(item) for item in items if item) + "]"


def _model_at(path: FilePlace) -> type[BaseModel]:
    """The model that the value at a path is read into."""
    model: type[BaseModel] = Spec
    inside = False  # a mapping by name or a list: its next part is a name or an index, not a field
    for part in path:
        if inside:
            inside = False
            continue
        annotation = model.model_fields[str(part)].annotation
        inside = get_origin(annotation) in (dict, tuple)
        model = _nested_model(annotation) or model
    return model


def _keys_at(path: FilePlace) -> list[str]:
    """The keys that the file may have at a path."""
    return [field.alias or name for name, field in _model_at(path).model_fields.items()]


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for argument in get_args(annotation) if (model := _nested_model(argument))), None)
