"""Text that others chose (logs, job names, providers, hosts) never acts on the terminal that shows it."""

import ast
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from tests.support.cases import cases

import shoal.cli
from shoal.cli.host_commands import show_exec
from shoal.cli.job_screens import show_line
from shoal.cli.output import dump, escape_controls, make_console, neutralize
from shoal.cli.session import Session
from shoal.errors import ProviderError
from shoal.hosts.api import Result
from shoal.jobs.logs import LogLine
from shoal.verbs.exec import ExecResult

ATTACKS = {
    "clipboard": "\x1b]52;c;cm0gLXJmIC8=\x07",
    "clear screen": "\x1b[2J\x1b[H",
    "title": "\x1b]0;owned\x1b\\",
    "C1 CSI": "\u009b2J",
    "C1 OSC": "\u009d52;c;eA==\u009c",
    "device report": "\x1b[6n",
    "shift out": "\x0e\x05",
    "backspace": "ok\x08\x08no",
    "delete": "\x7f",
    "bidi override": "\u202egnp.exe\u202c",
    "bidi isolate": "\u2066x\u2069",
    "marks": "\u200e\u200f\u061c",
    "separators": "\u2028\u2029",
    "invisible tags": "\U000e0041",
    "byte that is no UTF-8": b"\xff\x9b".decode("utf-8", "surrogateescape"),
}
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)


def console(terminal: bool) -> Any:
    made = make_console()
    made.file = io.StringIO()
    made._force_terminal = terminal
    made.no_color = True
    return made


def printed(made: Any) -> str:
    """What reached the terminal, without the colours that are rich's own."""
    return re.sub(r"\x1b\[[0-9;]*m", "", made.file.getvalue())


@cases("terminal", True, False)
@cases("attack", *ATTACKS.values(), ids=ATTACKS.keys())
def test_no_screen_and_no_error_passes_controls_on(attack: str, terminal: bool) -> None:
    made = console(terminal)
    show_line(made, LogLine(1.0, 0, 0, f"before {attack} after"), timestamps=True)
    show_line(made, LogLine(1.0, 0, 0, attack))
    outcome = Result(1, f"out {attack}\n".encode("utf-8", "surrogateescape"), attack.encode("utf-8", "surrogateescape"))
    show_exec(made, ExecResult(groups=((("n1",), outcome),)))
    made.print(f"[red]markup[/] {attack}")
    made.print(attack, markup=False, soft_wrap=True)
    table = Table("name")
    table.add_row(attack)
    made.print(table)
    made.out(attack)
    text = printed(made)
    assert not FORBIDDEN.search(text), ascii(FORBIDDEN.search(text))
    assert "before" in text and "after" in text
    session = Session(json=False)
    session.errors = console(terminal)
    session._report(ProviderError(f"acme: 500: {attack}", hint=f"do {attack}"))
    session._report_bug(ValueError(attack))
    assert not FORBIDDEN.search(printed(session.errors))


@cases("attack", *ATTACKS.values(), ids=ATTACKS.keys())
def test_json_has_no_controls_and_means_the_same(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("utf-8", "ascii"):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        text = dump({"message": attack, attack: ["ä ✓ \n\t"]})
        assert not FORBIDDEN.search(text), ascii(text)
        assert json.loads(text) == {"message": attack, attack: ["ä ✓ \n\t"]}
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert "ä ✓" in dump("ä ✓"), "letters stay letters"


def test_colours_are_dropped_and_a_progress_bar_shows_its_last_state() -> None:
    assert neutralize("\x1b[1;31merror\x1b[0m: x") == "error: x"
    assert neutralize("\r 10%|#   |\r100%|####|\nnext\r\n") == "100%|####|\nnext\n"
    assert neutralize("a\tb\nä ✓ 👩‍🔬") == "a\tb\nä ✓ 👩‍🔬"
    assert neutralize("\x1b[2J") == "\\x1b[2J"
    assert escape_controls("\u202e \u009b \x1b[1m \U000e0041") == "\\u202e \\x9b \\x1b[1m \\U000e0041"


def test_commands_write_through_the_boundary_only() -> None:
    """`print` and `.write` of other modules would pass controls on."""
    allowed = {("app.py", "print"), ("cluster_commands.py", "print")}  # our own version and schema
    for path in sorted(Path(next(iter(shoal.cli.__path__))).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name not in ("print", "write", "echo", "secho") or (
                name == "print" and isinstance(node.func, ast.Attribute)
            ):
                continue
            if path.name == "output.py" or (path.name, name) in allowed:
                continue
            assert re.search(r"dump\(|neutralize\(|escape_controls\(", ast.unparse(node)), f"{path.name}:{node.lineno}"
