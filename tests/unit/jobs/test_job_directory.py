"""A user's directory for jobs: nobody else can change what is in it, or it is not used."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.jobs.bundle import runtime
from shoal.remote import job_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can have files of two users")
ALICE, BOB = 65534, 65533
"""The first has a name on every system; her name is what the directory is called."""


@pytest.fixture
def share() -> Iterator[Path]:
    """A directory that everybody may write to, as a share is; not below pytest's, which root alone may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def ask(directory: str | Path = "", jobs: str | Path = "", code: str = "c0de") -> subprocess.CompletedProcess[str]:
    line = ["/usr/bin/python3", "-I", "-S", "-c", Path(job_directory.__file__).read_text()]
    words = ["make", "reef", str(jobs), str(directory), code, "11b"]
    return subprocess.run([*line, *words], capture_output=True, text=True, user=ALICE, group=ALICE, extra_groups=[])


def own(path: Path, uid: int, mode: int = 0o755) -> Path:
    path.mkdir()
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


def test_directory_is_made_for_the_user_alone(share: Path) -> None:
    answer = json.loads(ask(share / "mine").stdout)
    assert answer == {"root": str(share / "mine"), "user": "nobody", "code": False, "runtime": False, "marked": False}
    for place in (share / "mine", share / "mine/code", share / "mine/lib"):
        assert (place.stat().st_uid, place.stat().st_mode & 0o777) == (ALICE, 0o700)


def test_directory_of_all_users_has_one_for_each(share: Path) -> None:
    jobs = own(share / "shoal-jobs", 0)
    own(jobs / "nobody", ALICE, 0o755)
    for words in ({"jobs": jobs}, {"directory": jobs}):
        assert json.loads(ask(**words).stdout)["root"] == str(jobs / "nobody")
    assert (jobs / "nobody").stat().st_mode & 0o777 == 0o700


@cases("kind", "directory", "parent", "link", "open parent")
def test_place_that_somebody_else_made_first_is_rejected(share: Path, kind: str) -> None:
    if kind == "directory":
        own(own(share / "jobs", 0) / "nobody", BOB, 0o777)
        asked = share / "jobs"
    elif kind == "parent":
        own(share / "jobs", BOB, 0o777)
        asked = share / "jobs/mine"
    elif kind == "link":
        own(share / "theirs", BOB, 0o777)
        (share / "jobs").symlink_to(share / "theirs")
        asked = share / "jobs"
    else:
        own(share / "jobs", 0, 0o777)
        asked = share / "jobs/mine"
    done = ask(asked)
    assert done.returncode == job_directory.EXIT_WITH_CAUSE and done.stdout == ""
    assert "others may write to" in done.stderr if kind == "open parent" else "belongs to" in done.stderr


def test_code_that_is_there_counts_only_with_its_content(share: Path) -> None:
    bundle = runtime()
    ask(share / "mine")
    place = share / "mine/code" / f"{bundle.hash}.tar"
    place.write_bytes(bundle.data)
    os.chown(place, ALICE, ALICE)
    assert json.loads(ask(share / "mine", code=bundle.hash).stdout)["code"] is True
    place.write_bytes(bundle.data + b"#")
    assert json.loads(ask(share / "mine", code=bundle.hash).stdout)["code"] is False and not place.exists()
    (share / "whole").write_bytes(bundle.data)
    os.chown(share / "whole", ALICE, ALICE)
    for target in ("/dev/zero", share / "whole"):
        place.symlink_to(target)
        assert json.loads(ask(share / "mine", code=bundle.hash).stdout)["code"] is False


@cases("name", "code", "lib")
def test_link_in_the_directory_is_not_followed(share: Path, name: str) -> None:
    own(share / "mine", ALICE, 0o700)
    (share / "mine" / name).symlink_to(own(share / "elsewhere", ALICE))
    done = ask(share / "mine")
    assert (done.returncode, done.stdout) == (job_directory.EXIT_WITH_CAUSE, "")
    assert done.stderr == f"{share}/mine/{name}: Not a directory\n"
