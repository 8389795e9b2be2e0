"""YAML text as plain data, with the line and column of everything in it.

Only the plain part of YAML 1.2 is read: mappings, lists, text, whole numbers, true and false. Anchors, aliases, merge
keys and tags are refused, and so is deep nesting: a spec needs none of them, and each is a way to write a small file
that is huge once read. `yes`, `010`, `1:30:00` and `2026-01-01` are text, as YAML 1.2 has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from shoal.errors import SpecError
from shoal.spec.finding import Finding, Level, Path, path_text, printable, show

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 16

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULL = ("", "~", "null", "Null", "NULL")
_BOOL = {word: truth for truth in (True, False) for word in (str(truth), str(truth).lower(), str(truth).upper())}

_SYNTAX = (
    (r"'\\t'", "a tab", "indent with spaces"),
    (r"expected ',' or '\]', but got '\['", "not YAML", 'put quotes around a hostlist: "gpu[01-16]"'),
    (r"mapping values", "not YAML", "check the indentation here and above, and the blanks after colons"),
    (r"block end", "not YAML", "indent the line like its neighbours"),
    (r"expected ':'", "not YAML", "write `key: value`, with a blank after the colon"),
    (r"end of stream", "not YAML", "close the quote or bracket that is still open"),
    (r"", "not YAML", "check the quotes, brackets and indentation here"),
)
"""What the parser says, and what to do about it."""


class Unreadable:
    """Stands where a value could not be read; the finding about it is made already."""


@dataclass
class Tree:
    """What a file holds, and where."""

    file: str
    data: Any = None
    places: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Line and column of each value; of its key, where the value is a mapping or a list."""
    keys: dict[Path, tuple[int, int]] = field(default_factory=dict)
    source: dict[Path, str] = field(default_factory=dict)
    """Numbers with a fraction as they are written: `.nan`, `1e3`."""
    findings: list[Finding] = field(default_factory=list)
    unreadable: set[Path] = field(default_factory=set)

    def finding(
        self,
        path: Path,
        what: str,
        found: str = "",
        fix: str = "",
        *,
        place: tuple[int, int] | None = None,
        level: Level = "error",
    ) -> Finding:
        """A finding at a path, or at the nearest value above it that the file has. Names in it are made printable."""
        above = (path[:end] for end in range(len(path), -1, -1))
        line, col = place or next((self.places[part] for part in above if part in self.places), (1, 1))
        what, found, fix = printable(what), printable(found), printable(fix)
        return Finding(level, what, found, fix, path=path_text(path), file=self.file, line=line, col=col)


def read(text: str, file: str) -> Tree:
    """The tree of a text that is YAML. Raises SpecError when it is not; what else is wrong is in its `findings`."""
    tree = Tree(file)
    if len(text) > MAX_BYTES:
        raise SpecError((tree.finding((), "the file is too large", fix="a spec has at most 1 MiB"),))
    try:
        _Builder(tree, YAML(pure=True).parse(text)).build()
    except ReaderError as error:
        character = f"character U+{error.character:04X}" if isinstance(error.character, int) else ""
        place = position(text, error.position)
        raise SpecError((tree.finding((), "not text", character, "delete it", place=place),)) from None
    except YAMLError as error:
        raise SpecError((_syntax(error, tree),)) from None
    except (SpecError, KeyboardInterrupt):
        raise
    except Exception as error:  # the parser has bugs of its own; for the user each of them is "not YAML"
        what = f"not YAML: {show(f'{type(error).__name__}: {error}')}"
        raise SpecError((tree.finding((), what, "", _SYNTAX[-1][2], place=(1, 1)),)) from None
    return tree


def by_place(finding: Finding) -> tuple[int, int]:
    """The order in which findings are shown."""
    return finding.line, finding.col


def position(text: str | bytes, offset: int) -> tuple[int, int]:
    """Line and column, from 1, of an offset into the text."""
    before = text[:offset].decode("utf-8", "replace") if isinstance(text, bytes) else text[:offset]
    return before.count("\n") + 1, len(before) - before.rfind("\n")


class _Builder:
    """Builds the data from the parser's events, so that no more is built than the file's own length."""

    def __init__(self, tree: Tree, stream: Iterator[events.Event]) -> None:
        self._tree = tree
        self._events = stream

    def build(self) -> None:
        next(self._events)  # the start of the stream
        event = next(self._events)
        if isinstance(event, events.StreamEndEvent):
            raise self._empty()
        assert isinstance(event, events.DocumentStartEvent)
        event = next(self._events)
        self._tree.places[()] = _mark(event)
        data = self._value(event, ())
        assert isinstance(next(self._events), events.DocumentEndEvent)
        event = next(self._events)
        if not isinstance(event, events.StreamEndEvent):
            raise self._fatal(_mark(event), "several documents in one file", "`---`", "keep one")
        if isinstance(data, Unreadable):
            raise self._empty()
        if not isinstance(data, dict):
            fix = "start it with `cluster: NAME`"
            raise self._fatal(self._tree.places[()], "the file is not a mapping", show(data), fix)
        self._tree.data = data

    def _empty(self) -> SpecError:
        self._tree.findings.clear()
        return self._fatal((1, 1), "the file is empty", "", "write a spec into it: `shoal init` makes one")

    def _value(self, event: events.Event, path: Path) -> Any:
        if isinstance(event, events.AliasEvent):
            return self._reject(event, path, "aliases are not supported", f"`*{event.anchor}`", "write the value out")
        if anchor := getattr(event, "anchor", None):
            anchor_text = f"`&{anchor}`"
            self._reject(event, path, "anchors are not supported", anchor_text, "delete it and write the value out")
        tag = getattr(event, "tag", None)
        if tag and tag != "!":
            self._reject(event, path, "tags are not supported", show(str(tag)), "delete it")
        if isinstance(event, events.ScalarEvent):
            return self._scalar(event, path)
        if len(path) >= MAX_DEPTH:
            raise self._fatal(_mark(event), "nested too deeply", "", f"a spec has at most {MAX_DEPTH} levels")
        if isinstance(event, events.SequenceStartEvent):
            return self._list(path)
        assert isinstance(event, events.MappingStartEvent)
        return self._mapping(path)

    def _list(self, path: Path) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self._events), events.SequenceEndEvent):
            place = (*path, len(items))
            self._tree.places[place] = _mark(event)
            items.append(self._value(event, place))
        return items

    def _mapping(self, path: Path) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while not isinstance(key := next(self._events), events.MappingEndEvent):
            if not isinstance(key, events.ScalarEvent):
                raise self._fatal(_mark(key), "not a key", "", "a key is a plain word", path)
            name = str(key.value)
            place = (*path, name)
            event = next(self._events)
            if name == "<<" and key.style is None:
                self._report(path, "merge keys are not supported", "`<<`", "write the keys out", _mark(key))
                self._value(event, (*path, "<<"))
                continue
            if name in entries:
                fix = f"it is at line {self._tree.keys[place][0]} already; keep one"
                self._report(place, "duplicate key", show(name), fix, _mark(key))
                _skip(event, self._events)
                continue
            self._tree.keys[place] = _mark(key)
            plain = isinstance(event, events.ScalarEvent) and not (event.style is None and event.value == "")
            self._tree.places[place] = _mark(event) if plain else _mark(key)
            entries[name] = self._value(event, place)
        return entries

    def _scalar(self, event: events.ScalarEvent, path: Path) -> Any:
        text = str(event.value)
        if event.style is not None or (event.tag and event.tag != "!"):
            return text
        if text in _NULL:
            return self._reject(event, path, "no value", "nothing", "give one, indent its lines, or delete the key")
        if text in _BOOL:
            return _BOOL[text]
        if _INT.fullmatch(text):
            if len(text) > 18:
                return self._reject(event, path, "the number is too large", show(text), "give a smaller one")
            return int(text)
        if _FLOAT.fullmatch(text):
            self._tree.source[path] = text
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        return text

    def _reject(self, event: events.Event, path: Path, what: str, evidence: str, fix: str) -> Unreadable:
        self._tree.unreadable.add(path)
        self._report(path, what, evidence, fix)
        return Unreadable()

    def _report(self, path: Path, what: str, evidence: str, fix: str, place: tuple[int, int] | None = None) -> None:
        self._tree.findings.append(self._tree.finding(path, what, evidence, fix, place=place))

    def _fatal(self, place: tuple[int, int], what: str, evidence: str, fix: str, path: Path = ()) -> SpecError:
        self._report(path, what, evidence, fix, place)
        self._tree.findings.sort(key=by_place)
        return SpecError(tuple(self._tree.findings))


def _skip(event: events.Event, stream: Iterator[events.Event]) -> None:
    """Pass over a value without building it."""
    depth = 0
    while True:
        if isinstance(event, events.MappingStartEvent | events.SequenceStartEvent):
            depth += 1
        elif isinstance(event, events.MappingEndEvent | events.SequenceEndEvent):
            depth -= 1
        if depth == 0:
            return
        event = next(stream)


def _mark(event: events.Event) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _syntax(error: YAMLError, tree: Tree) -> Finding:
    problem, mark = "", None
    if isinstance(error, MarkedYAMLError):
        problem = error.problem or error.context or ""
        mark = error.problem_mark or error.context_mark
    place = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    what, fix = next((what, fix) for pattern, what, fix in _SYNTAX if re.search(pattern, problem))
    return tree.finding((), what if what == "a tab" or not problem else f"{what}: {problem}", "", fix, place=place)
