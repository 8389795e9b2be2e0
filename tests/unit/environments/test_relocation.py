"""An environment that is moved: built in one directory, used in another, both with long names and spaces."""

import base64
import csv
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.small_wheels import small_wheel
from tests.support.cases import cases
from tests.unit.environments.test_environment_builder import Place

LONG = "a directory whose name is so long that no kernel reads a first line with it to the end, which is 127 bytes"
OLD_SCRIPT = """\
#!python
# coding: latin-1
'''A docstring.'''
from __future__ import annotations
import sys
print(sys.prefix, len("é"))
"""
FOREIGN_SCRIPT = "#!/opt/ci/venv/bin/python3\nprint(1)\n"


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory, local: Path) -> dict[str, Any]:
    """The builder's description of an environment, and as `to` where it is now. Nothing is left where it was built."""
    root = tmp_path_factory.mktemp("moving")
    place = Place(root, local)
    small_wheel(
        place.index,
        "roach",
        "1.0",
        {
            "roach/__init__.py": "def main():\n    raise SystemExit('roach failed')\n",
            "roach-1.0.data/scripts/roach-old": OLD_SCRIPT,
            "roach-1.0.data/scripts/roach-foreign": FOREIGN_SCRIPT,
            "roach-1.0.data/scripts/roach-shell": "#!/bin/sh\necho shell\n",
            "roach-elsewhere.pth": "# a comment\nimport sys\n/opt/ci/src\nroach\n",
        },
    )
    made = place.build("herring==1.0", "roach", directory=str(root / f"{LONG} 1"))
    assert made["event"] == "done", made
    to = root / f"{LONG} 2" / "copy"
    shutil.copytree(made["path"], to, symlinks=True)
    shutil.rmtree(root / f"{LONG} 1")
    return {**made, "to": to}


def output_of(*line: str | Path, **more: Any) -> str:
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_python_and_programs_run_after_relocation(moved: dict[str, Any], tmp_path: Path) -> None:
    to = moved["to"]
    assert len(str(to)) > 127 and " " in str(to)
    assert output_of(to / "bin/python", "-c", "import sys, herring; print(sys.prefix)") == str(to)
    assert output_of(to / "bin/herring-says") == "herring 1.0"
    assert output_of("herring-says", env={"PATH": f"{to}/bin:/usr/bin:/bin"}) == "herring 1.0"
    assert output_of(to / "bin/roach-shell") == "shell"
    (tmp_path / "says").symlink_to(to / "bin/herring-says")
    assert output_of(tmp_path / "says") == "herring 1.0"
    links = [os.readlink(path) for path in (to / "bin").iterdir() if path.is_symlink()]
    [out] = [link for link in links if link.startswith("/")]
    assert Path(out).name == f"python{moved['python']}"


def test_program_keeps_its_encoding_docstring_and_future_imports(moved: dict[str, Any]) -> None:
    """A declared encoding, a docstring, imports from the future."""
    assert output_of(moved["to"] / "bin/roach-old") == f"{moved['to']} 2"  # two bytes, each a letter in Latin-1


def test_failed_program_shows_the_new_path(moved: dict[str, Any]) -> None:
    done = subprocess.run([moved["to"] / "bin/roach-says", "a b"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (1, "roach failed\n")
    line = [moved["to"] / "bin/python", "-c", "import roach, traceback; print(roach.main.__code__.co_filename)"]
    assert output_of(*line).startswith(f"{moved['to']}/lib/")


@cases("shell", "bash", "dash")
def test_activate_uses_the_new_path_where_the_shell_permits(moved: dict[str, Any], shell: str) -> None:
    directory = output_of(shell, "-c", '. "$0/bin/activate"; echo "$VIRTUAL_ENV"', moved["to"])
    assert directory == str(moved["to"] if shell == "bash" else moved["path"])


def test_compiled_files_stay_valid_in_a_copy_that_keeps_mtimes(moved: dict[str, Any]) -> None:
    [source] = moved["to"].glob("lib/python*/site-packages/herring.py")
    [compiled] = source.parent.glob("__pycache__/herring.*.pyc")
    flags, time, size = (int.from_bytes(compiled.read_bytes()[at : at + 4], "little") for at in (4, 8, 12))
    assert (flags, time, size) == (0, int(source.stat().st_mtime), source.stat().st_size)


def test_package_records_are_correct_and_name_no_outside_file(moved: dict[str, Any]) -> None:
    [site] = moved["to"].glob("lib/python*/site-packages")
    assert not list(site.glob("*.dist-info/direct_url.json"))
    with (site / "herring-1.0.dist-info" / "RECORD").open(newline="") as record:
        rows = {name: digest for name, digest, _ in csv.reader(record)}
    assert "../../../bin/herring-says" in rows
    for name, digest in rows.items():
        assert (site / name).exists()
        found = base64.urlsafe_b64encode(hashlib.sha256((site / name).read_bytes()).digest()).rstrip(b"=").decode()
        assert digest in ("", f"sha256={found}")


def test_only_activate_contains_the_build_directory(moved: dict[str, Any]) -> None:
    old, to = moved["path"].encode(), moved["to"]
    files = [path for path in to.rglob("*") if path.is_file() and not path.is_symlink()]
    named = [path for path in files if old in path.read_bytes() and path.suffix != ".pyc"]
    assert [str(path.relative_to(to)) for path in named] == ["bin/activate"]


def test_files_bound_to_another_path_are_reported(moved: dict[str, Any]) -> None:
    files = {Path(file).name: place for file, place in moved["bound"]}
    assert files == {"roach-foreign": "/opt/ci/venv/bin/python3", "roach-elsewhere.pth": "/opt/ci/src"}
