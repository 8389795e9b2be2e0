"""How requirement files on the operator's machine are read."""

from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.environments.requirements import RequirementSet, read_requirements
from shoal.errors import UsageError
from shoal.spec.environments import Environment


def write(place: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)


def source(place: Path, key: str, name: str = "file") -> RequirementSet:
    return read_requirements(Environment.model_validate({key: name}), place)


def refused(place: Path, key: str, name: str = "file") -> str:
    with pytest.raises(UsageError) as error:
        source(place, key, name)
    return str(error.value)


PYLOCK = (
    'requires-python = ">=3.9"\n[[packages]]\nname = "six"\nversion = "1.16.0"\nmarker = "python_version > \'3\'"\n'
    'wheels = [{name = "six.whl", hashes = {sha256 = "aa"}}]\n'
    '[packages.sdist]\nname = "six.tar.gz"\nhashes = {sha256 = "bb"}\n'
)
PROJECT = '[project]\nname = "x"\nrequires-python = ">=3.12"\ndependencies = ["six>=1", "packaging"]\n'
HASHES = "six==1.16.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
INCLUDED = {"deep/er/base.txt": "-c limits.txt\npackaging\n", "deep/er/limits.txt": "six<2\n"}


@cases(
    "files, key, found",
    (
        {"file": "# what it needs\nsix==1.16.0  # old\n\npackaging\n"},
        "requirements",
        RequirementSet("six==1.16.0\npackaging\n"),
    ),
    (
        {"file": "-r base.txt\n-c limits.txt\nsix\n", "base.txt": "packaging\n", "limits.txt": "six<2\n"},
        "requirements",
        RequirementSet("packaging\nsix\n", "six<2\n"),
    ),
    ({"deep/file": "-r er/base.txt\nsix\n", **INCLUDED}, "requirements", RequirementSet("packaging\nsix\n", "six<2\n")),
    ({"file": HASHES}, "lock", RequirementSet("six==1.16.0  --hash=sha256:aa  --hash=sha256:bb\n", locked=True)),
    (
        {"pylock.toml": PYLOCK},
        "lock",
        RequirementSet(
            "six==1.16.0 ; python_version > '3' --hash=sha256:aa --hash=sha256:bb\n", locked=True, for_python=">=3.9"
        ),
    ),
    ({"pyproject.toml": PROJECT}, "pyproject", RequirementSet("packaging\nsix>=1\n", for_python=">=3.12")),
    ids=["comments", "included", "relative to the including file", "lock with hashes", "pylock", "project"],
)
def test_requirements_are_read(tmp_path: Path, files: dict[str, str], key: str, found: RequirementSet) -> None:
    write(tmp_path, files)
    assert source(tmp_path, key, next(iter(files))) == found


@cases(
    "name, text, key, words",
    ("file", "-r file\n", "requirements", "includes itself"),
    ("file", "-c file\n", "requirements", "includes itself"),
    ("file", None, "requirements", "there is no {place}/file"),
    ("file", "six==1.16.0\npackaging>=20\n", "lock", "is not a lock file: packaging>=20 has no version"),
    (
        "pylock.toml",
        '[[packages]]\nname = "mine"\n[packages.directory]\npath = "."\n',
        "lock",
        "names mine without a version that can be downloaded",
    ),
    ("pylock.toml", "a = 1\n", "lock", "it has no [[packages]]"),
    ("uv.lock", "version = 1\n", "lock", "uv.lock is a lock that only its own tool reads"),
    ("uv.lock", "version = 1\n", "lock", "run `uv export "),
    ("poetry.lock", "version = 1\n", "lock", "run `poetry export "),
    ("pyproject.toml", "[project]\nname = 'x'\n", "pyproject", "no list of dependencies"),
    ("pyproject.toml", "[project\n", "pyproject", "is not TOML"),
)
def test_unusable_file_is_rejected(tmp_path: Path, name: str, text: str | None, key: str, words: str) -> None:
    write(tmp_path, {} if text is None else {name: text})
    assert words.format(place=tmp_path) in refused(tmp_path, key, name)


@cases("line", "-e .", "./mine", "../other", "/srv/mine.whl", "file:mine.whl", "mine @ file:///x.whl")
def test_local_path_is_rejected(tmp_path: Path, line: str) -> None:
    (tmp_path / "file").write_text(line + "\n")
    said = refused(tmp_path, "requirements")
    assert "which the hosts do not have" in said and "`shoal run`" in said


def test_password_is_rejected_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("--index-url https://me:hunter2@packages.example.org/simple\nsix\n")
    said = refused(tmp_path, "requirements")
    assert "a password in it" in said and "hunter2" not in said


@cases("line", "mine @ file:///x.whl", "mine @ https://me:hunter2@packages.example.org/x.whl")
def test_project_is_checked_like_a_requirements_file(tmp_path: Path, line: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "x"\ndependencies = ["{line}"]\n')
    (tmp_path / "file").write_text(f"{line}\n")
    said = refused(tmp_path, "pyproject", "pyproject.toml")
    assert said.replace("pyproject.toml", "file") == refused(tmp_path, "requirements") and "hunter2" not in said
