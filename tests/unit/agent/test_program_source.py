"""The agent is a few files that an old Python on a bare host runs as one program and starts quickly."""

import ast
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

from tests.support.cases import cases

from shoal.agent import loader
from shoal.remote import agent as program
from shoal.remote import program_text

FOLDER = Path(program.__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
SOURCE = {name: (FOLDER / f"{name}.py").read_text() for name in FILES}
REMOTE = FOLDER.parent
ALL = {str(path.relative_to(REMOTE)): path.read_text() for path in sorted(REMOTE.rglob("*.py"))}
"""Every program that runs on another machine; the package's own `__init__` runs on the operator's."""
del ALL["__init__.py"]
# What came to the standard library after 3.8, among the names one reaches for.
TOO_NEW = re.compile(
    r"\.(?:removeprefix|removesuffix|bit_count|pairwise|is_relative_to|with_stem|hardlink_to)\b"
    r"|functools\.cache\b|\bmath\.lcm\b|\bstrict=|\bzoneinfo\b|\btomllib\b|\bgraphlib\b|\bExceptionGroup\b"
    r"|os\.(?:pidfd_open|waitstatus_to_exitcode|eventfd|splice|unshare|setns)\b|signal\.pidfd_send_signal"
)
BESIDE = {"runner"}
"""What `start.py` finds in its own directory."""
MEASURED = {"validation/collectives.py": {"torch"}, "validation/gpus.py": {"torch"}}
"""What some programs measure where it is installed. They say so where it is not."""
# Inner names of some versions of CPython; each is tried, with a public one to fall back to.
INNER = {"_json", "_sha2", "_sha256", "_signal", "_socket"}


@cases("name", *ALL)
def test_syntax_is_python_3_8(name: str) -> None:
    ast.parse(ALL[name], feature_version=(3, 8))


def test_loader_syntax_is_python_3_4() -> None:
    ast.parse(program_text("agent_loader"), feature_version=(3, 4))


@cases("name", *ALL)
def test_nothing_newer_than_python_3_8_is_used(name: str) -> None:
    assert TOO_NEW.findall(ALL[name]) == []


@cases("name", *FILES)
def test_annotations_are_not_evaluated(name: str) -> None:
    assert "from __future__ import annotations" in SOURCE[name]


def test_modules_are_sent_after_their_imports() -> None:
    assert sorted(loader.MODULES) == FILES
    for at, name in enumerate(loader.MODULES):
        needed = {module.split(".")[-1] for module in imported(ast.walk(ast.parse(SOURCE[name]))) if "." in module}
        assert needed <= set(loader.MODULES[:at]), name


@cases("name", *ALL)
def test_only_the_standard_library_and_own_modules_are_imported(name: str) -> None:
    modules = imported(ast.walk(ast.parse(ALL[name])))
    outside = {module for module in modules if not module.startswith("shoal.remote.")}
    allowed = sys.stdlib_module_names | INNER | BESIDE | MEASURED.get(name, set())
    assert {module.partition(".")[0] for module in outside} <= allowed
    loaded = imported(ast.parse(ALL[name]).body)
    assert not loaded & MEASURED.get(name, set()), "without it the program still loads"


def test_supervisor_imports_no_other_module() -> None:
    assert not [module for module in imported(ast.walk(ast.parse(SOURCE["supervise"]))) if "." in module]


def test_command_line_is_constant_and_has_no_secret() -> None:
    assert ("python3", "-I", "-S", "-B", "-c", program_text("agent_loader")) == loader.COMMAND


def run(tmp_path: Path, request: bytes, *, after: str = "", payload: bytes | None = None) -> tuple[int, str, str]:
    """Run the program as a host does, with nothing around it; `after` is Python that runs when it has ended."""
    command = [sys.executable, *loader.COMMAND[1:-1], loader.COMMAND[-1] + after]
    whole = (loader.payload(str(tmp_path)) if payload is None else payload) + request
    done = subprocess.run(command, input=whole, capture_output=True, cwd="/", env={}, timeout=60)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_program_runs_alone_from_source_and_from_its_cache(tmp_path: Path) -> None:
    for _ in range(2):
        status, said, complaint = run(tmp_path, b'{"op":"facts"}\n{"op":"exit"}\n')
        assert (status, complaint) == (0, "") and json.loads(said)["facts"]["hostname"] == os.uname().nodename


def test_run_without_changes_loads_little_of_the_standard_library(tmp_path: Path) -> None:
    """Each of these costs as much as all that the agent does itself on such a host."""
    request = b'{"op":"facts","services":["x"],"users":["root"]}\n{"op":"check","items":[]}\n{"op":"exit"}\n'
    run(tmp_path, b"")
    _, said, _ = run(tmp_path, request, after='\nprint(" ".join(sys.modules))')
    loaded = set(said.splitlines()[-1].split())
    assert "os" in loaded
    slow = {"re", "enum", "json", "socket", "signal", "typing", "hashlib", "subprocess", "zlib", "collections"}
    assert not slow & loaded


def test_traceback_names_source_file_and_line(tmp_path: Path) -> None:
    status, _, complaint = run(tmp_path, b"not JSON\n")
    assert status == 1
    places = re.findall(r'File "shoal/remote/agent/(\w+)\.py", line (\d+), in (\w+)', complaint)
    assert [(file, function) for file, _, function in places] == [
        ("main", "main"),
        ("context", "request"),
        ("fast_stdlib", "loads"),
    ]
    for file, line, _ in places:
        assert SOURCE[file].splitlines()[int(line) - 1].strip()


def test_truncated_program_is_not_run(tmp_path: Path) -> None:
    assert run(tmp_path, b"", payload=loader.payload(str(tmp_path))[:-100]) == (4, "", "")


def test_payload_is_small() -> None:
    header, _, packed = loader.payload().partition(b"\n")
    assert len(packed) == int(header.split()[0]) < 40_000
    assert len(json.loads(zlib.decompress(packed[:-1]))) == len(FILES)


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules that are imported: full names of the agent's own, the top-level package of others."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"shoal.remote.{node.module}" if node.level else node.module or ""
            names.add(module if module.startswith("shoal.") else module.split(".")[0])
    return names
