"""The working tree that is sent: which files, with which hash, and what is rejected."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.jobs.bundle import Bundle, runtime, working_tree
from shoal.remote.log_reader import SENT_TIME


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "train.py").write_text("print(1)\n")
    (root / "go.sh").write_text("#!/bin/sh\n")
    (root / "go.sh").chmod(0o755)
    (root / ".gitignore").write_text("*.bin\n/out/\n")
    (root / "big.bin").write_bytes(b"x" * 5000)
    return root


def git(root: Path) -> None:
    for words in (["init", "-q"], ["add", ".gitignore", "go.sh"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)


def names(bundle: Bundle) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(bundle.data)) as tar:
        return tar.getnames()


def test_tracked_and_unignored_files_are_sent(tree: Path) -> None:
    git(tree)
    bundle = working_tree(tree, "src/train.py")
    assert names(bundle) == [".gitignore", "go.sh", "src/train.py"] and bundle.workdir == "."


def test_whole_tree_is_sent_from_a_subdirectory_and_the_job_starts_there(tree: Path) -> None:
    git(tree)
    bundle = working_tree(tree / "src", "train.py")
    assert names(bundle) == [".gitignore", "go.sh", "src/train.py"] and bundle.workdir == "src"


def test_deleted_uncommitted_file_is_skipped(tree: Path) -> None:
    git(tree)
    (tree / "go.sh").unlink()
    assert names(working_tree(tree, "src/train.py")) == [".gitignore", "src/train.py"]


def test_all_files_except_caches_and_hidden_directories_are_sent_without_git(tree: Path) -> None:
    for name in (".venv/x.py", "__pycache__/y.pyc"):
        (tree / name).parent.mkdir()
        (tree / name).write_text("")
    assert names(working_tree(tree, "src/train.py")) == [".gitignore", "big.bin", "go.sh", "src/train.py"]


def test_hash_changes_only_with_content_or_mode(tree: Path, tmp_path: Path) -> None:
    first = working_tree(tree, "src/train.py")
    (tree / "src" / "train.py").touch()
    assert working_tree(tree, "src/train.py").hash == first.hash
    (tree / "go.sh").chmod(0o644)
    other = working_tree(tree, "src/train.py")
    assert other.hash != first.hash
    (tree / "src" / "train.py").write_text("print(2)\n")
    assert working_tree(tree, "src/train.py").hash not in (first.hash, other.hash)


def test_files_have_a_time_that_every_file_system_keeps(tree: Path) -> None:
    """sshfs stores the present where it is told 0, and then `shoal fetch` would take code for results."""
    with tarfile.open(fileobj=io.BytesIO(working_tree(tree, "go.sh").data)) as tar:
        assert {member.mtime for member in tar} == {SENT_TIME}
    assert SENT_TIME > 0


def test_links_stay_links(tree: Path) -> None:
    (tree / "link.py").symlink_to("src/train.py")
    with tarfile.open(fileobj=io.BytesIO(working_tree(tree, "link.py").data)) as tar:
        assert tar.getmember("link.py").linkname == "src/train.py"


def refused(tree: Path, script: str, limit: int = 1 << 20) -> tuple[str, str]:
    with pytest.raises(UsageError) as caught:
        working_tree(tree, script, limit)
    return caught.value.message.replace(str(tree), "TREE"), caught.value.hint


def test_too_large_tree_is_rejected_with_its_largest_files(tree: Path) -> None:
    (tree / "data").mkdir()
    (tree / "data" / "a.npy").write_bytes(b"x" * 3 * 1024 * 1024)
    message, hint = refused(tree, "src/train.py", 2 * 1024 * 1024)
    assert message == (
        "the working tree TREE is 3.0 MiB, more than the 2.0 MiB that are sent with a job; the largest files:"
        " data/a.npy (3.0 MiB), big.bin (0.0 MiB), .gitignore (0.0 MiB), go.sh (0.0 MiB), src/train.py (0.0 MiB)"
    )
    assert hint == "put data into .gitignore and on the nodes' storage, or raise --max-size"


def test_script_missing_from_the_bundle_is_rejected(tree: Path, tmp_path: Path) -> None:
    git(tree)
    (tree / "x.bin").write_text("")
    (tmp_path / "outside.py").write_text("")
    assert refused(tree, "nope.py") == ("there is no nope.py in TREE", "name a script of your working tree")
    assert refused(tree, "src") == ("src is a directory", "name the script in it")
    assert refused(tree, "x.bin")[0] == "git ignores x.bin, so it would not be sent"
    assert refused(tree, "../outside.py")[0] == "../outside.py is outside of your working tree TREE"
    (tree / "plain.txt").write_text("")
    assert refused(tree, "plain.txt") == (
        "plain.txt is neither a Python script nor executable",
        "name it .py, or `chmod +x plain.txt`",
    )


def test_runtime_contains_the_runner_and_the_training_library(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(runtime().data)) as tar:
        names = set(tar.getnames())
        assert {"programs/start.py", "programs/runner/rank.py", "shoal/hostlist.py", "shoal/contract.py"} <= names
        # It is on the script's PYTHONPATH, before modules of the user's that may be called so.
        assert {name.partition("/")[0] for name in names} == {"programs", "shoal"}
        tar.extractall(tmp_path, filter="data")
    code = "import shoal, shoal.contract; print(shoal.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == (f"{tmp_path}/shoal/__init__.py\n", "")
