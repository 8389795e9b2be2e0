"""scripts/environment and scripts/setup.sh: packages for hosts and checkouts, installed once, complete or absent."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.documents import ROOT


def wheel(directory: Path) -> Path:
    """A minimal package."""
    place = directory / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("tiny.py", "answer = 42\n")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    return place


class Machine:
    """A cache with the shared directories of two clusters."""

    def __init__(self, directory: Path) -> None:
        self.cache = directory / "cache"
        for name in ("one", "two"):
            self.shared(name).mkdir(parents=True)
        self.requirements = directory / "requirements.txt"
        self.requirements.write_text(f"# a comment\ntiny @ file://{wheel(directory)}\n")

    def shared(self, cluster: str) -> Path:
        return self.cache / "sandbox" / cluster / "shared"

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, ROOT / "scripts/environment", *arguments]
        env = {**os.environ, "SHOAL_CACHE": str(self.cache), "PIP_NO_INDEX": "1", **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=env, text=True, **pipes)  # type: ignore[call-overload,no-any-return]

    def provide(self, cluster: str) -> None:
        process = self.start(cluster, str(self.requirements))
        output = process.communicate(timeout=120)
        assert process.returncode == 0, output


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_concurrent_runs_for_two_clusters_install_once_and_link_the_same_files(machine: Machine) -> None:
    processes = [machine.start(name, str(machine.requirements)) for name in ("one", "two")]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sum("Successfully installed tiny" in out for out, _ in outputs) == 1
    one, two = (machine.shared(name) / "env/tiny.py" for name in ("one", "two"))
    assert one.samefile(two) and one.read_text() == "answer = 42\n"
    assert sorted(os.listdir(machine.shared("one"))) == ["env"]


def test_cluster_without_a_name_is_that_of_the_file_or_of_the_variable(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "shoal.yaml"
    file.write_text("# lab\ncluster: filed  # ours\n")
    for given, expected in (((str(file), "named"), "filed"), (("", "named"), "named"), (("", ""), "sandbox")):
        variables = dict(zip(("SHOAL_FILE", "SHOAL_CLUSTER"), given, strict=True))
        said = machine.start(**variables).communicate(timeout=120)[1]
        assert said == f"no sandbox cluster {expected}: create it with `shoal up`\n"


def test_partial_environment_is_rebuilt_and_other_requirements_replace_the_packages(machine: Machine) -> None:
    machine.provide("one")
    [environment] = [path for path in (machine.cache / "environments").iterdir() if path.is_dir()]
    environment.rename(environment.with_suffix(".new"))  # as if killed during the installation
    (environment.with_suffix(".new") / "tiny.py").unlink()
    machine.provide("two")
    assert (machine.shared("two") / "env/tiny.py").exists()
    machine.requirements.write_text(machine.requirements.read_text() + "# and more\n--prefer-binary\n")
    before = (machine.shared("two") / "env/tiny.py").stat().st_ino
    machine.provide("two")
    assert (machine.shared("two") / "env/tiny.py").stat().st_ino != before


def test_cache_keeps_the_three_latest_environments_and_clusters_keep_theirs(machine: Machine) -> None:
    first = machine.requirements.read_text()
    machine.provide("one")
    for more in ("--prefer-binary\n", "--no-binary=x\n", "--no-binary=y\n"):
        machine.requirements.write_text(first + more)
        machine.provide("two")
    environments = [path for path in (machine.cache / "environments").iterdir() if path.is_dir()]
    assert len(environments) == 3
    assert (machine.shared("one") / "env/tiny.py").read_text() == "answer = 42\n"
    machine.requirements.write_text(first)
    machine.provide("one")  # rebuilt


def test_second_list_goes_to_a_directory_of_its_own(machine: Machine) -> None:
    machine.provide("one")
    process = machine.start("one", str(machine.requirements), "more")
    output = process.communicate(timeout=120)
    assert process.returncode == 0, output
    env, more = (machine.shared("one") / name / "tiny.py" for name in ("env", "more"))
    assert env.samefile(more) and sorted(os.listdir(machine.shared("one"))) == ["env", "more"]


def test_missing_cluster_is_reported(machine: Machine) -> None:
    process = machine.start("three", str(machine.requirements))
    assert process.communicate(timeout=60)[1] == "no sandbox cluster three: create it with `shoal up`\n"
    assert process.returncode == 1


def test_failed_installation_is_reported_and_leaves_nothing(machine: Machine) -> None:
    machine.requirements.write_text("no-such-package-anywhere\n")
    process = machine.start("one", str(machine.requirements))
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and "No matching distribution" in errors and "Traceback" not in errors
    assert errors.endswith(f"cannot install the packages of {machine.requirements}: see above\n")
    assert os.listdir(machine.shared("one")) == []


INSTALL = """\
install_packages() {
    [ ! -e "$FAKE/killed" ] || { mkdir -p "$1/half"; rm "$FAKE/killed"; kill -KILL $BASHPID; }
    rm -rf "$1" && mkdir -p "$1/bin" "$1/lib/python3.11/site-packages/shoal-1.dist-info"
    echo "$2" >>"$FAKE/installed"
    site=$1/lib/python3.11/site-packages
    echo package >"$site/package.py"
    echo "$root/src" >"$site/_editable_impl_shoal.pth"
    echo "file://$root" >"$site/shoal-1.dist-info/direct_url.json"
    printf '#!%s/bin/python\\n' "$1" >"$1/bin/pytest"
    echo "command = venv $1" >"$1/pyvenv.cfg"
    printf '%s\\n%s\\n' "$1" "$root" >"$1/.made-for"
}
"""
"""What installs packages, without an index."""


class Checkouts:
    """Checkouts of the project that share a cache."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cache = directory / "cache"

    def set_up(self, name: str, extra: str = "", project: str = "", status: int = 0) -> Path:
        """Make the virtual environment of a checkout."""
        root = self.directory / name
        (root / "scripts").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "scripts/setup.sh", root / "scripts")
        (root / "pyproject.toml").write_text(project)
        script = f"set -euo pipefail; . {root}/scripts/setup.sh\n{INSTALL}\nvirtual_environment '{extra}'"
        env = {**os.environ, "SHOAL_CACHE": str(self.cache), "FAKE": str(self.directory)}
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done
        return root / ".venv"

    @property
    def installed(self) -> list[str]:
        return (self.directory / "installed").read_text().splitlines()


@pytest.fixture
def checkouts(tmp_path: Path) -> Checkouts:
    return Checkouts(tmp_path)


def test_checkouts_share_packages_and_each_has_its_own_source(checkouts: Checkouts) -> None:
    one, two = checkouts.set_up("one"), checkouts.set_up("two")
    checkouts.set_up("two")
    assert checkouts.installed == [""]
    site = "lib/python3.11/site-packages"
    assert (one / site / "package.py").samefile(two / site / "package.py")
    for venv in (one, two):
        assert (venv / site / "_editable_impl_shoal.pth").read_text() == f"{venv.parent}/src\n"
        assert (venv / site / "shoal-1.dist-info/direct_url.json").read_text() == f"file://{venv.parent}\n"
        assert (venv / "bin/pytest").read_text() == f"#!{venv}/bin/python\n"
        assert (venv / "pyvenv.cfg").read_text() == f"command = venv {venv}\n"
        assert sorted(os.listdir(venv.parent)) == [".venv", "pyproject.toml", "scripts"]


def test_developers_packages_serve_who_needs_fewer(checkouts: Checkouts) -> None:
    checkouts.set_up("one", "[dev]")
    checkouts.set_up("two")
    checkouts.set_up("one")
    assert checkouts.installed == ["[dev]"]


def test_changed_project_has_other_packages_and_three_are_kept(checkouts: Checkouts) -> None:
    for at in range(5):
        checkouts.set_up("one", project=f"# {at}")
    assert len(checkouts.installed) == 5
    assert len([path for path in (checkouts.cache / "python").iterdir() if path.is_dir()]) == 3


def test_killed_set_up_is_begun_again(checkouts: Checkouts) -> None:
    (checkouts.directory / "killed").touch()
    checkouts.set_up("one", status=1)
    assert not (checkouts.directory / "one/.venv").exists()
    assert (checkouts.set_up("one") / "bin/pytest").exists()
    assert [path.name for path in (checkouts.cache / "python").iterdir() if path.suffix == ".new"] == []


def test_packages_are_installed_into_the_checkout_where_no_cache_can_be(checkouts: Checkouts) -> None:
    checkouts.cache.write_text("a file")
    venv = checkouts.set_up("one")
    assert (venv / "bin/pytest").read_text() == f"#!{venv}/bin/python\n"
