"""scripts/environment: packages for sandbox hosts, installed once, there whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.documents import ROOT


def wheel(directory: Path) -> Path:
    """A package as small as can be."""
    place = directory / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("tiny.py", "answer = 42\n")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    return place


class Machine:
    """A cache with two clusters in it, that are nothing but their shared directories."""

    def __init__(self, directory: Path) -> None:
        self.cache = directory / "cache"
        for name in ("one", "two"):
            self.shared(name).mkdir(parents=True)
        self.requirements = directory / "requirements.txt"
        self.requirements.write_text(f"# a comment\ntiny @ file://{wheel(directory)}\n")

    def shared(self, cluster: str) -> Path:
        return self.cache / "sandbox" / cluster / "shared"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, ROOT / "scripts/environment", *arguments]
        mine = {**os.environ, "SHOAL_CACHE": str(self.cache), "PIP_NO_INDEX": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=mine, text=True, **pipes)  # type: ignore[call-overload,no-any-return]

    def give(self, cluster: str) -> None:
        process = self.start(cluster, str(self.requirements))
        said = process.communicate(timeout=120)
        assert process.returncode == 0, said


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_two_clusters_that_ask_at_once_get_links_to_the_same_files(machine: Machine) -> None:
    both = [machine.start(name, str(machine.requirements)) for name in ("one", "two")]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("Successfully installed tiny" in out for out, _ in said) == 1
    one, two = (machine.shared(name) / "env/tiny.py" for name in ("one", "two"))
    assert one.samefile(two) and one.read_text() == "answer = 42\n"
    assert sorted(os.listdir(machine.shared("one"))) == ["env"]


def test_what_a_killed_one_left_is_made_anew_and_another_list_replaces_the_old_packages(machine: Machine) -> None:
    machine.give("one")
    [made] = [path for path in (machine.cache / "environments").iterdir() if path.is_dir()]
    made.rename(made.with_suffix(".new"))  # killed before it was whole
    (made.with_suffix(".new") / "tiny.py").unlink()
    machine.give("two")
    assert (machine.shared("two") / "env/tiny.py").exists()
    machine.requirements.write_text(machine.requirements.read_text() + "# and more\n--prefer-binary\n")
    before = (machine.shared("two") / "env/tiny.py").stat().st_ino
    machine.give("two")
    assert (machine.shared("two") / "env/tiny.py").stat().st_ino != before


def test_the_two_environments_used_last_stay_in_the_cache_and_clusters_keep_theirs(machine: Machine) -> None:
    first = machine.requirements.read_text()
    machine.give("one")
    for more in ("--prefer-binary\n", "--no-binary=x\n"):
        machine.requirements.write_text(first + more)
        machine.give("two")
    made = [path for path in (machine.cache / "environments").iterdir() if path.is_dir()]
    assert len(made) == 2
    assert (machine.shared("one") / "env/tiny.py").read_text() == "answer = 42\n"
    machine.requirements.write_text(first)
    machine.give("one")  # rebuilt


def test_a_cluster_that_is_not_there_is_told(machine: Machine) -> None:
    process = machine.start("three", str(machine.requirements))
    assert process.communicate(timeout=60)[1] == "there is no sandbox cluster three: `shoal up` makes it\n"
    assert process.returncode == 1


def test_what_pip_cannot_install_is_told_and_leaves_nothing(machine: Machine) -> None:
    machine.requirements.write_text("no-such-package-anywhere\n")
    process = machine.start("one", str(machine.requirements))
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and "No matching distribution" in said and "Traceback" not in said
    assert said.endswith(f"could not install what {machine.requirements} lists: see above\n")
    assert os.listdir(machine.shared("one")) == []
