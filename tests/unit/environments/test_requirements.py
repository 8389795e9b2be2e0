"""How requirement files on the operator's machine are read."""

from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.environments.requirements import RequirementSet, read_requirements
from shoal.errors import UsageError
from shoal.spec.environments import Environment


def source(place: Path, key: str, name: str = "file") -> RequirementSet:
    return read_requirements(Environment.model_validate({key: name}), place)


def refused(place: Path, key: str, name: str = "file") -> str:
    with pytest.raises(UsageError) as error:
        source(place, key, name)
    return str(error.value)


def test_comments_and_blank_lines_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("# what it needs\nsix==1.16.0  # old\n\npackaging\n")
    assert source(tmp_path, "requirements") == RequirementSet("six==1.16.0\npackaging\n")


def test_included_file_is_part_of_the_requirements(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("-r base.txt\n-c limits.txt\nsix\n")
    (tmp_path / "base.txt").write_text("packaging\n")
    (tmp_path / "limits.txt").write_text("six<2\n")
    assert source(tmp_path, "requirements") == RequirementSet("packaging\nsix\n", "six<2\n")


def test_included_paths_are_relative_to_the_including_file(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "file").write_text("-r er/base.txt\nsix\n")
    (tmp_path / "deep" / "er" / "base.txt").write_text("-c limits.txt\npackaging\n")
    (tmp_path / "deep" / "er" / "limits.txt").write_text("six<2\n")
    assert source(tmp_path, "requirements", "deep/file") == RequirementSet("packaging\nsix\n", "six<2\n")


@cases("option", "-r", "-c")
def test_recursive_include_is_rejected(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text(f"{option} file\n")
    assert "includes itself" in refused(tmp_path, "requirements")


@cases("line", "-e .", "./mine", "../other", "/srv/mine.whl", "file:mine.whl", "mine @ file:///x.whl")
def test_local_path_is_rejected(tmp_path: Path, line: str) -> None:
    (tmp_path / "file").write_text(line + "\n")
    said = refused(tmp_path, "requirements")
    assert "which the hosts do not have" in said and "`shoal run`" in said


def test_password_is_rejected_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("--index-url https://me:hunter2@packages.example.org/simple\nsix\n")
    said = refused(tmp_path, "requirements")
    assert "a password in it" in said and "hunter2" not in said


def test_lock_contains_every_version_with_its_hashes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("six==1.16.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n")
    assert source(tmp_path, "lock") == RequirementSet("six==1.16.0  --hash=sha256:aa  --hash=sha256:bb\n", locked=True)


def test_lock_with_an_open_version_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("six==1.16.0\npackaging>=20\n")
    assert "is not a lock file: packaging>=20 has no version" in refused(tmp_path, "lock")


def test_pylock_becomes_pins_with_hashes_and_markers(tmp_path: Path) -> None:
    (tmp_path / "pylock.toml").write_text(
        'lock-version = "1.0"\n'
        '[[packages]]\nname = "six"\nversion = "1.16.0"\nmarker = "python_version > \'3\'"\n'
        'wheels = [{name = "six.whl", hashes = {sha256 = "aa"}}]\n'
        '[packages.sdist]\nname = "six.tar.gz"\nhashes = {sha256 = "bb"}\n'
    )
    found = source(tmp_path, "lock", "pylock.toml")
    assert found.requirements == "six==1.16.0 ; python_version > '3' --hash=sha256:aa --hash=sha256:bb\n"
    assert found.locked


def test_requires_python_of_a_project_or_a_lock_is_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.12"\ndependencies = ["six"]\n')
    (tmp_path / "pylock.toml").write_text(
        'requires-python = ">=3.9"\n[[packages]]\nname = "six"\nversion = "1"\nsdist = {name = "six.tar.gz"}\n'
    )
    assert source(tmp_path, "pyproject", "pyproject.toml") == RequirementSet("six\n", for_python=">=3.12")
    assert source(tmp_path, "lock", "pylock.toml") == RequirementSet("six==1\n", locked=True, for_python=">=3.9")


def test_pylock_with_a_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "pylock.toml").write_text('[[packages]]\nname = "mine"\n[packages.directory]\npath = "."\n')
    assert "names mine without a version that can be downloaded" in refused(tmp_path, "lock", "pylock.toml")
    (tmp_path / "pylock.toml").write_text("a = 1\n")
    assert "it has no [[packages]]" in refused(tmp_path, "lock", "pylock.toml")


def test_project_provides_its_dependencies(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["six>=1", "packaging"]\n')
    assert source(tmp_path, "pyproject", "pyproject.toml") == RequirementSet("packaging\nsix>=1\n")


@cases("text, words", ("[project]\nname = 'x'\n", "no list of dependencies"), ("[project\n", "is not TOML"))
def test_project_without_dependencies_is_rejected(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert words in refused(tmp_path, "pyproject", "pyproject.toml")


@cases("line", "mine @ file:///x.whl", "mine @ https://me:hunter2@packages.example.org/x.whl")
def test_project_is_checked_like_a_requirements_file(tmp_path: Path, line: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "x"\ndependencies = ["{line}"]\n')
    (tmp_path / "file").write_text(f"{line}\n")
    said = refused(tmp_path, "pyproject", "pyproject.toml")
    assert said.replace("pyproject.toml", "file") == refused(tmp_path, "requirements") and "hunter2" not in said


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert f"there is no {tmp_path / 'file'}" in refused(tmp_path, "requirements")


@cases("name, command", ("uv.lock", "uv export "), ("poetry.lock", "poetry export "))
def test_lock_of_another_tool_is_rejected_with_the_export_command(tmp_path: Path, name: str, command: str) -> None:
    (tmp_path / name).write_text("version = 1\n")
    said = refused(tmp_path, "lock", name)
    assert f"{name} is a lock that only its own tool reads" in said and f"run `{command}" in said
