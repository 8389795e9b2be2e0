"""The environments that a user may use: nobody but root and the user can change what is in them."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.environments.store import user_names_command

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can have files of two users")
ALICE, BOB = 65534, 65533
ID = "0123456789abcdef"


@pytest.fixture
def share() -> Iterator[Path]:
    """A directory that everybody may write to, as a share is; not below pytest's, which root alone may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def plant(directory: Path, uid: int, name: str = "torch", **more: Any) -> Path:
    """A directory with one environment, all of it of one user."""
    (directory / "names").mkdir(parents=True)
    (directory / ID).mkdir()
    (directory / f"names/{name}.json").write_text(json.dumps({"name": name, "id": ID, "path": "/evil", **more}))
    for path in (directory, *directory.rglob("*")):
        os.chown(path, uid, uid)
    return directory


def ask(share: Path, *directories: Path) -> dict[str, Any]:
    command = user_names_command("reef", str(share / "jobs"), [str(path) for path in directories])
    done = subprocess.run(
        ["/usr/bin/python3", *command[1:]], capture_output=True, user=ALICE, group=ALICE, extra_groups=[], check=True
    )
    return dict(json.loads(done.stdout))


def names(answer: dict[str, Any], directory: Path) -> list[str]:
    return [entry["name"] for entry in answer["directories"][str(directory)]["environments"]]


def test_environments_of_the_cluster_and_of_the_user_are_read(share: Path) -> None:
    cluster = plant(share / "environments", 0)
    (share / "jobs").mkdir(mode=0o755)
    own = plant(share / "jobs/nobody/environments", ALICE, "mine")
    os.chown(own.parent, ALICE, ALICE)
    answer = ask(share, cluster)
    assert (answer["user"], answer["own"], answer["unsafe"]) == ("nobody", str(own), {})
    assert names(answer, cluster) == ["torch"] and names(answer, own) == ["mine"]


def test_user_and_cluster_without_environments_have_none(share: Path) -> None:
    answer = ask(share, share / "environments")
    assert answer["unsafe"] == {} and names(answer, share / "environments") == []


@cases("kind", "directory", "names", "tree", "open directory", "link")
def test_environment_that_another_user_could_change_is_not_used(share: Path, kind: str) -> None:
    place = share / "environments"
    if kind == "directory":
        plant(place, BOB)
    elif kind == "link":
        place.symlink_to(plant(share / "theirs", BOB))
    else:
        plant(place, 0)
        if kind == "open directory":
            place.chmod(0o777)
        else:
            os.chown(place / ("names" if kind == "names" else ID), BOB, BOB)
    answer = ask(share, place)
    assert str(place) not in answer["directories"]
    cause = answer["unsafe"][str(place)]
    assert ("others may write to" if kind == "open directory" else "belongs to") in cause


def test_path_without_links_is_reported_so_that_a_link_cannot_change_later(share: Path) -> None:
    plant(share / "real", 0)
    (share / "environments").symlink_to(share / "real")
    answer = ask(share, share / "environments")
    assert answer["directories"][str(share / "environments")]["real"] == str(share / "real")


def test_name_that_is_no_description_of_root_or_the_user_is_ignored(share: Path) -> None:
    place = plant(share / "environments", 0)
    good = (place / "names/torch.json").read_text()
    (place / "names/link.json").symlink_to(place / "names/torch.json")
    os.mkfifo(place / "names/fifo.json")
    for name, text in {
        "broken": "{",
        "number": "17",
        "other": good,  # it says `torch`
        "up": json.dumps({"name": "up", "id": "../../etc"}),
        "gone": json.dumps({"name": "gone", "id": "f" * 16}),
        "large": json.dumps({"name": "large", "id": ID, "packages": ["x" * (1 << 20)]}),
        "theirs": json.dumps({"name": "theirs", "id": ID}),
    }.items():
        (place / f"names/{name}.json").write_text(text)
    os.chown(place / "names/theirs.json", BOB, BOB)
    assert names(ask(share, place), place) == ["torch"]
