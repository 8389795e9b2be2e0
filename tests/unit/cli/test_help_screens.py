"""The help of `shoal` and of each command: headings, and placeholders for values."""

import re
from collections import Counter
from typing import Any

import pytest
from tests.support.cases import cases
from tests.unit.cli.test_command_line import ALL, APP, invoke

from shoal.cli.app import COMMANDS
from shoal.cli.help import placeholder

TYPES = r"\b(str|int|float|bool|path|list|tuple|dict|None|True|False|Path|Annotated|datetime|range)\b"


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def options_of(command: Any) -> list[Any]:
    return [one for one in command.params if one.opts[0].startswith("-")]


def left_column(text: str) -> list[str]:
    """What stands before the explanations: arguments, and options with what is written behind them."""
    listed = re.split(r"\n(?:Arguments|Options):\n", text)[1:]
    return [line.strip().split("  ")[0] for part in listed for line in part.splitlines() if re.match(r"  [-A-Z]", line)]


def test_every_command_has_a_heading() -> None:
    named = Counter(name for names in COMMANDS.values() for name in names)
    assert named == Counter(list(APP.commands))


def test_headings_align_their_descriptions() -> None:
    shown = invoke("--help").output
    at = [shown.index(f"\n\n{heading}:\n") for heading in (*COMMANDS, "Options")]
    assert at == sorted(at)
    listed = re.findall(r"^  ([a-z]+ +)\S", shown[at[0] : at[-1]], re.MULTILINE)
    assert [name.strip() for name in listed] == [name for names in COMMANDS.values() for name in names]
    assert len({len(name) for name in listed}) == 1


@cases("words", (), ("node",), *ALL, ids=" ".join)
def test_option_shows_a_placeholder_and_no_python_type_and_no_range(words: tuple[str, ...]) -> None:
    shown = invoke(*words, "--help").output
    left = left_column(shown)
    assert [entry for entry in left if re.search(TYPES, entry)] == []
    assert not re.search(r"<\w|\bx[<>]=|[<>]=x|\[default|list\[", shown)
    for option in options_of(ALL[words]) if words in ALL else ():
        name, word = max(option.opts, key=len), placeholder(option)
        assert option.is_flag is (word == "")
        assert any(entry.endswith(f"{name} {word}".strip()) or f"{name} / " in entry for entry in left)


@cases(
    "words, shown",
    (("run",), "Usage: shoal run [OPTIONS] [SCRIPT] [ARG...]"),
    (("cancel",), "Usage: shoal cancel [OPTIONS] JOB..."),
    (("simulate",), "Usage: shoal simulate [OPTIONS] PROVIDER"),
    (("bench", "links"), "  --seconds SECONDS  How long to measure each direction. Default: 1.0."),
    (("status",), "  -f, --file FILE  The spec. Default: shoal.yaml here, else a joined cluster,\n"),
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage_line_shows_the_command_as_typed(words: tuple[str, ...], shown: str) -> None:
    assert shown in invoke(*words, "--help").output
