"""The program is one file that an old Python on a bare host can run, and that starts quickly."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from shoal.agent import client, program

SOURCE = Path(program.__file__).read_text()
# What came to the standard library after 3.8, among the names one reaches for.
TOO_NEW = re.compile(
    r"\.(?:removeprefix|removesuffix|bit_count|pairwise|is_relative_to|with_stem|hardlink_to)\b"
    r"|functools\.cache\b|\bmath\.lcm\b|\bstrict=|\bzoneinfo\b|\btomllib\b|\bgraphlib\b|\bExceptionGroup\b"
    r"|os\.(?:pidfd_open|waitstatus_to_exitcode|eventfd|splice|unshare|setns)\b|signal\.pidfd_send_signal"
)


def test_the_syntax_is_that_of_python_3_8() -> None:
    ast.parse(SOURCE, feature_version=(3, 8))


def test_the_loader_is_the_syntax_of_any_python_3() -> None:
    ast.parse(client.LOADER, feature_version=(3, 4))


def test_nothing_newer_than_python_3_8_is_used() -> None:
    assert TOO_NEW.findall(SOURCE) == []


def test_annotations_are_not_evaluated() -> None:
    assert "from __future__ import annotations" in SOURCE


def test_only_the_standard_library_is_imported() -> None:
    assert imported(ast.walk(ast.parse(SOURCE))) <= sys.stdlib_module_names | {"_sha2", "_sha256"}


def test_what_every_run_imports_is_little() -> None:
    quick = {"__future__", "errno", "fcntl", "json", "os", "select", "signal", "stat", "struct", "sys", "time"}
    assert imported(iter(ast.parse(SOURCE).body)) == quick


def test_the_command_line_is_constant_and_carries_no_secret() -> None:
    assert client.COMMAND == ("python3", "-I", "-S", "-B", "-c", client.LOADER)


def imported(nodes: object) -> set[str]:
    names: set[str] = set()
    for node in nodes:  # type: ignore[attr-defined]
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names - {"typing"}
