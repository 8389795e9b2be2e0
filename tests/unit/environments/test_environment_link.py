"""An environment by its name: a link that moves to the next environment, and programs that stay in theirs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.small_wheels import small_wheel
from tests.support.cases import cases
from tests.unit.environments.test_environment_builder import Place

from shoal.contract import VERSION
from shoal.environments.store import (
    BuiltEnvironment,
    list_command,
    locate,
    parse_listing,
    read_names_command,
    remove_command,
    remove_name_command,
    write_link_command,
)

LATE = """\
import sys
print(sys.prefix, flush=True)
sys.stdin.readline()
import herring
print(herring.VERSION, sys.argv[1:])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, local: Path) -> Place:
    return Place(tmp_path_factory.mktemp("links"), local)


def publish(place: Place, made: dict[str, Any]) -> BuiltEnvironment:
    environment = locate(BuiltEnvironment.of({**made, "name": "sea"}), str(place.shared))
    place.run(write_link_command(environment))
    return environment


def output_of(*line: str) -> str:
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=300).stdout.strip()


def test_program_that_started_by_the_name_stays_in_its_environment(place: Place) -> None:
    old = publish(place, place.build("herring==1.0"))
    assert old.link == f"{place.shared}/sea"
    line = [f"{old.link}/bin/python", "-c", LATE, "a b", ""]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == f"{old.path}\n"
        new = publish(place, place.build("herring==1.1"))
        # `env clean` sees that it is in use, though it began by the name.
        assert {entry.id: entry.busy for entry in parse_listing(place.run(list_command(str(place.shared))))} == {
            old.id: True,
            new.id: False,
        }
        running.stdin.write("\n")
        running.stdin.flush()
        assert running.stdout.read() == "1.0 ['a b', '']\n"
    query = "import herring, sys; print(herring.VERSION, sys.prefix)"
    assert output_of(f"{new.link}/bin/python", "-c", query) == f"1.1 {new.path}"
    assert output_of(f"{new.link}/bin/herring-says") == "herring 1.1"


def test_training_library_can_be_imported_with_isolation_too(place: Place) -> None:
    made = publish(place, place.build("herring==1.0"))
    query = (
        "import shoal, shoal.contract, importlib.util as u; print(shoal.__version__, u.find_spec('shoal.train').origin)"
    )
    version, origin = output_of(f"{made.link}/bin/python", "-I", "-c", query).split()
    assert version == VERSION == made.shoal and origin.startswith(f"{made.path}/lib/")
    assert list(Path(origin).parent.glob("__pycache__/*.pyc")), "users cannot write compiled files there"


def test_package_that_is_called_shoal_is_not_replaced(place: Place) -> None:
    small_wheel(place.index, "shoal", "9.0", {"shoal/__init__.py": "__version__ = '9.0'\n"})
    made = place.build("shoal==9.0")
    assert output_of(f"{made['path']}/bin/python", "-c", "import shoal; print(shoal.__version__)") == "9.0"
    assert not list(Path(made["path"]).glob("lib/python*/site-packages/shoal/train"))


def test_directory_in_the_place_of_a_name_is_left_alone(place: Place, tmp_path: Path) -> None:
    made = locate(BuiltEnvironment("sea", "0123456789abcdef", ""), str(tmp_path))
    Path(made.link).mkdir()
    done = subprocess.run(write_link_command(made), capture_output=True, text=True)
    assert done.returncode == 1 and "sea exists and is no link" in done.stderr and Path(made.link).is_dir()


def test_name_of_a_removed_environment_goes_too(place: Place, tmp_path: Path) -> None:
    for name, number in (("sea", "aaaa"), ("lake", "bbbb")):
        (tmp_path / number).mkdir()
        (tmp_path / name).symlink_to(number)
    (tmp_path / "names").mkdir()
    (tmp_path / "names/lake.json").touch()
    place.run(remove_command(str(tmp_path), ["aaaa"]))
    assert not (tmp_path / "sea").is_symlink() and (tmp_path / "lake").exists()
    place.run(remove_name_command(str(tmp_path), "lake"))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bbbb", "names"]


def test_missing_git_is_named_before_anything_is_built(place: Place, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(sys.executable)
    line = "perch @ git+https://git.example.org/perch.git@v1"
    event = place.build(line, env={"PATH": str(programs)})
    assert event["what"] == "a requirement comes from a git repository, and this host has no git"
    assert event["fix"] == "install it"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory to another user")
@cases("fault", "", "owner", "link")
def test_names_are_read_below_directories_of_root_only(tmp_path: Path, fault: str) -> None:
    middle = tmp_path / "share" / "middle"
    (middle / "environments" / "names").mkdir(parents=True)
    (middle / "environments" / "names" / "lake.json").write_text('{"name": "lake"}\n')
    directory = middle / "environments"
    if fault == "owner":
        os.chown(middle, 2001, 2001)
    elif fault == "link":
        link = tmp_path / "link"
        link.symlink_to(middle)
        os.lchown(link, 2001, 2001)
        directory = link / "environments"
    done = subprocess.run(read_names_command(str(directory)), capture_output=True, text=True)
    causes = {
        "owner": f"{middle} belongs to UNKNOWN, who could change what jobs run from it\n",
        "link": f"{tmp_path}/link belongs to UNKNOWN, who could change what jobs run from it\n",
    }
    assert (done.returncode, done.stderr) == ((1, causes[fault]) if fault else (0, ""))
    assert done.stdout == ("" if fault else '{"name": "lake"}\n')
