"""Documents as text for goldens: each item with the fields that differ from its kind's defaults.

A program of `shoal.remote` is named, `<remote/NAME>`, where its text stands: it has tests of its own.
"""

import difflib
import json
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from shoal import remote
from shoal.agent.document import Block, Document, File, Item, SecretRef
from shoal.roles.component import Stage

Stages = Mapping[Stage, Document]
COLUMNS = 120


def document_text(stages: Stages, **bases: Stages) -> str:
    """Every item in its order; of one that a base has too, only what differs. Text for Slurm is whole, or the same."""
    known: dict[str, list[tuple[str, Item]]] = {}
    for name, base in bases.items():
        for item in chain.from_iterable(base.values()):
            known.setdefault(_heading(item), []).append((name, item))
    lines = []
    for stage, document in stages.items():
        lines.append(f"==== {stage.name.lower()}")
        for item in document:
            lines += _item_text(item, known.get(_heading(item), []))
    return "\n".join(lines) + "\n"


def defaults_text() -> str:
    """The defaults of each kind of item, which no other golden repeats."""
    lines = []
    for kind in Item.__subclasses__():
        lines.append(f"-- {kind.kind}")
        for spec in fields(kind):
            default = "required" if spec.default is MISSING else _shown(spec.name, spec.default)
            lines.append(f"   {spec.name}: {default}")
    return "\n".join(lines) + "\n"


def _item_text(item: Item, known: list[tuple[str, Item]]) -> list[str]:
    heading, settings, content = _heading(item), _settings(item), _content(item)
    for name, base in known:
        if (_settings(base), _content(base)) == (settings, content):
            return [f"{heading} (as {name})"]
    same_content = [(name, base) for name, base in known if _content(base) == content]
    if not same_content and (not known or "/etc/slurm/" in heading):
        return [heading, *settings, *content]
    name, base = (same_content or known)[0]
    if settings == _settings(base):
        settings = []
    elif not settings:
        settings = ["   defaults"]
    content = [] if content == _content(base) else _changed_lines(_content(base), content)
    return [f"{heading} (unlike {name})", *settings, *content]


def _changed_lines(before: list[str], after: list[str]) -> list[str]:
    """The lines that differ, between their neighbours; all lines where that is shorter."""
    found = list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]
    lines = ["   @@" if line.startswith("@@") else line for line in found]
    return lines if len(lines) < len(after) else after


def _heading(item: Item) -> str:
    return f"-- {item.key}" + (" absent" if isinstance(item, File) and item.content is None else "")


def _settings(item: Item) -> list[str]:
    """The fields that differ from their defaults and are not in the key; on one line if they fit."""
    found = []
    for spec in fields(item)[2 if isinstance(item, Block) else 1 :]:
        value = getattr(item, spec.name)
        if value != spec.default and not (spec.name == "content" and isinstance(value, str)):
            found.append(f"{spec.name}: {_shown(spec.name, value)}")
    line = ", ".join(found)
    return [f"   {text}" for text in ([line] if len(line) < COLUMNS - 3 else found) if text]


def _content(item: Item) -> list[str]:
    content = getattr(item, "content", None)
    if not isinstance(content, str):
        return []
    lines = json_lines(content) if content.startswith("{") else _name_programs(content).splitlines()
    return [f"   | {line}" for line in lines] or ["   empty"]


def json_lines(text: str) -> list[str]:
    """A JSON file that has a line for each value, in as few lines as its objects and lists fit into."""
    data = json.loads(text)
    assert text.rstrip("\n") in (json.dumps(data, indent=1), json.dumps(data)), "another layout"
    return _fold(data, "")


def _fold(value: Any, before: str) -> list[str]:
    if len(before + json.dumps(value)) < COLUMNS - 6 or not isinstance(value, dict | list):
        return [before + json.dumps(value)]
    indent = " " * (len(before) - len(before.lstrip(" ")) + 1)
    keys = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    lines = [before + ("{" if isinstance(value, dict) else "[")]
    open_line = False
    for key, part in zip(keys, value.values() if isinstance(value, dict) else value, strict=True):
        folded = _fold(part, indent + key)
        if open_line and len(folded) == 1 and len(lines[-1]) + len(folded[0]) < COLUMNS - 6:
            lines[-1] += f", {folded[0].lstrip()}"
        else:
            lines += folded
        open_line = len(folded) == 1
    return [*lines, indent[1:] + ("}" if isinstance(value, dict) else "]")]


def _shown(name: str, value: Any) -> str:
    if isinstance(value, SecretRef):
        return f"secret {value.name}"
    if isinstance(value, tuple):
        return str(tuple(_name_programs(word) if isinstance(word, str) else word for word in value))
    return f"{value:04o}" if name == "mode" else str(value) if value else repr(value)


@cache
def _name_programs(text: str) -> str:
    for name, program in _programs().items():
        text = text.replace(program, f"<remote/{name}>\n")
    return text


@cache
def _programs() -> dict[str, str]:
    """The text of each program without its first line, behind which a file says who wrote it."""
    root = Path(remote.__path__[0])
    paths = [path for path in sorted(root.rglob("*")) if path.suffix in (".py", ".sh")]
    return {str(path.relative_to(root)): text for path in paths if (text := path.read_text().partition("\n")[2])}


def folded_text(stages: Stages, **bases: Stages) -> str:
    """As `document_text`; items that follow one another in a base too are one line: the first, the last, how many.

    Files that are absent one after another are a list, and of a program with values filled in only those lines stand.
    """
    known = [(name, [_whole(item) for item in document]) for name, base in bases.items() for document in base.values()]
    lines = []
    for stage, document in stages.items():
        lines.append(f"==== {stage.name.lower()}")
        at, items = 0, [_whole(item) for item in document]
        while at < len(items):
            runs = [(_common_start(items[at:], base[i:]), name) for name, base in known for i in range(len(base))]
            count, name = max(runs, key=lambda run: run[0], default=(0, ""))
            absent = [item.path for item in takewhile(_is_plain_absence, document[at:]) if isinstance(item, File)]
            if count >= 2:
                last = _heading(document[at + count - 1]).removeprefix("-- ")
                lines.append(f"{_heading(document[at])} ... {last} ({count} as {name})")
            elif len(absent) >= 2:
                count, text = len(absent), f"-- files absent: {' '.join(absent)}"
                lines += textwrap.wrap(text, COLUMNS, subsequent_indent="   ", break_on_hyphens=False)
            else:
                count, text = 1, document_text({stage: document[at : at + 1]}, **bases)
                lines += _short_text(text.splitlines()[1:])
            at += count
    return "\n".join(lines) + "\n"


def _is_plain_absence(item: Item) -> bool:
    return isinstance(item, File) and item.content is None and not _settings(item)


def _short_text(lines: list[str]) -> list[str]:
    """The text of an item, with the name of the program of `shoal.remote` that it is but for a few lines.

    Of an item without content the settings stand in its heading if they fit.
    """
    one_line = f"{lines[0]} ({lines[-1].strip()})"
    if len(lines) == 2 and len(one_line) <= COLUMNS and " (" not in lines[0] and not lines[1].startswith("   | "):
        return [one_line]
    start = next((at for at, line in enumerate(lines) if line.startswith("   | ")), len(lines))
    content = [line.removeprefix("   | ") for line in lines[start + 1 :]]
    if "/etc/slurm/" in lines[0] or "(unlike " in lines[0] or len(content) < 12:
        return lines
    for name, program in _programs().items():
        changed = list(difflib.unified_diff(program.splitlines(), content, n=0, lineterm=""))[2:]
        if 2 * len(changed) < len(content):
            return [*lines[: start + 1], f"   | <remote/{name}>, but:", *(f"   | {line}" for line in changed)]
    return lines


def _whole(item: Item) -> list[str]:
    return [_heading(item), *_settings(item), *_content(item)]


def _common_start(items: list[list[str]], base: list[list[str]]) -> int:
    pairs = zip(items, base, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
