"""What of a working tree is left out, what `--include` adds, and what a job that misses a file is told."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.errors import UsageError
from shoal.jobs.bundle import working_tree
from shoal.jobs.logs import JobLogs, LogLine, RankEnd
from shoal.jobs.record import JobRecord
from shoal.jobs.tree_files import LeftOut, list_tree
from shoal.spec.loader import load_text
from shoal.verbs.context import Context
from shoal.verbs.unsent_files import explain_job, note_tree

SPEC = "cluster: reef\ncontroller: {host: {name: c1, address: 10.0.0.1}, compute: true}\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """As nanoGPT has it: its data is ignored."""
    root = tmp_path / "nano"
    (root / "data/words").mkdir(parents=True)
    (root / "train.py").write_text("")
    (root / ".gitignore").write_text("*.bin\n*.pyc\n__pycache__/\n/out/\n.venv/\n")
    for name, size in (("data/words/train.bin", 3000), ("data/words/val.bin", 300), ("out/a/ckpt.pt", 10)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * size)
    for name in ("__pycache__/a.pyc", ".venv/lib/b.py", "c.pyc"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    git(root, "init", "-q")
    return root


def git(root: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


def test_ignored_data_is_counted_without_caches(tree: Path) -> None:
    left_out = list_tree(tree).left_out
    assert left_out == LeftOut(3, 3310, ("data/words/train.bin", "data/words/val.bin", "out/a/ckpt.pt"))
    assert list_tree(tree / "data").left_out.names == ("words/train.bin", "words/val.bin", "../out/a/ckpt.pt")


@cases(
    "here, pattern, added",
    (".", "*.bin", ["data/words/train.bin", "data/words/val.bin"]),
    (".", "data", ["data/words/train.bin", "data/words/val.bin"]),
    (".", "./data/words/", ["data/words/train.bin", "data/words/val.bin"]),
    (".", "data/*/val.bin", ["data/words/val.bin"]),
    ("data", "words/train.bin", ["data/words/train.bin"]),
    ("data", "../out", ["out/a/ckpt.pt"]),
    (".", ".venv", [".venv/lib/b.py"]),
)
def test_included_files_are_sent(tree: Path, here: str, pattern: str, added: list[str]) -> None:
    before, after = list_tree(tree / here), list_tree(tree / here, [pattern])
    assert sorted(set(after.names) - set(before.names)) == added
    assert after.left_out.files == before.left_out.files - len([name for name in added if ".venv" not in name])


def test_absolute_pattern_is_taken(tree: Path) -> None:
    assert "out/a/ckpt.pt" in list_tree(tree, [str(tree / "out")]).names


def test_pattern_without_a_file_is_rejected_and_one_of_a_file_that_is_sent_is_not(tree: Path) -> None:
    with pytest.raises(UsageError, match=r"--include \*\.npy matches no file"):
        list_tree(tree, ["*.npy"])
    assert list_tree(tree, ["train.py"]).names == list_tree(tree).names


def test_hidden_directory_is_sent_without_git_when_it_is_included(tmp_path: Path) -> None:
    for name in (".data/x", "a.py", "pkg.egg-info/b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert list_tree(tmp_path).names == ("a.py", "pkg.egg-info/b") and list_tree(tmp_path).left_out == LeftOut()
    assert list_tree(tmp_path, [".data"]).names == (".data/x", "a.py", "pkg.egg-info/b")


def test_links_that_leave_the_tree_are_named(tree: Path) -> None:
    (tree / "mnt").symlink_to("/mnt/data")
    (tree / "data/up").symlink_to("../../elsewhere")
    (tree / "data/down").symlink_to("../train.py")
    assert list_tree(tree).left_out.links == ("data/up -> ../../elsewhere", "mnt -> /mnt/data")


def test_submodule_without_files_is_named_and_a_full_one_is_sent(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "lib.py").write_text("")
    (other / ".gitignore").write_text("*.npy\n")
    git(other, "init", "-q")
    git(other, "add", ".")
    git(other, "commit", "-qm", "a")
    for name in ("full", "empty"):
        git(tree, "submodule", "add", "-q", str(other), f"third/{name}")
    git(tree, "submodule", "deinit", "-q", "-f", "third/empty")
    (tree / "third/full/w.npy").write_text("12345678")
    listed = list_tree(tree)
    assert listed.left_out.submodules == ("third/empty",)
    assert "third/full/lib.py" in listed.names and "third/full/w.npy" in listed.left_out.names
    assert "third/full/w.npy" in list_tree(tree, ["*.npy"]).names


def failed(path: str, job: str = "17") -> tuple[JobRecord, JobLogs]:
    error = f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'"
    texts = ("Traceback (most recent call last):", '  File "train.py", line 1, in <module>', error)
    lines = tuple(LogLine(number, 0, 0, text) for number, text in enumerate(texts))
    end = RankEnd(0, "n1", 0, 1.0, 2.0, 1)
    return JobRecord(job, "FAILED", exit_code=1), JobLogs(lines, (end,))


@pytest.fixture
def context(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    context = Context(load_text(SPEC, "shoal.yaml"))
    note_tree(context, "17", tree, working_tree(tree, "train.py"))
    return context


@cases("path", "data/words/train.bin", "/jobs/17/tree/data/words/train.bin")
def test_missing_file_that_was_ignored_is_explained(context: Context, tree: Path, path: str) -> None:
    reason = explain_job(context, *failed(path))
    assert reason is not None and reason.kind == "script"
    assert reason.text.endswith(f"'{path}'; the file is in {tree} here: .gitignore kept it from being sent")
    assert "shoal run --include data/words/train.bin" in reason.fix


def test_task_of_an_array_is_explained_like_the_job(context: Context) -> None:
    reason = explain_job(context, *failed("/jobs/17_3/tree/out/a/ckpt.pt", "17_3"))
    assert reason is not None and "--include out/a/ckpt.pt" in reason.fix


def test_path_of_this_machine_is_explained(context: Context, tree: Path) -> None:
    reason = explain_job(context, *failed(f"{tree}/train.py"))
    assert reason is not None and "it is a path of this machine" in reason.text and "train.py" in reason.fix


def test_file_written_after_the_submission_is_explained(context: Context, tree: Path, tmp_path: Path) -> None:
    os.utime(tmp_path / "state/shoal/reef/jobs/17", (1, 1))
    (tree / "new.txt").write_text("")
    reason = explain_job(context, *failed("new.txt"))
    assert reason is not None and "it was written after the job was sent" in reason.text


@cases("path", "nowhere.bin", "/etc/passwd", "../../etc", "train.py/x")
def test_other_missing_files_are_left_as_they_are(context: Context, path: str) -> None:
    reason = explain_job(context, *failed(path))
    assert reason is not None and " here: " not in reason.text and reason.fix == ""


def test_note_of_another_code_or_machine_says_nothing(context: Context) -> None:
    record, logs = failed("data/words/train.bin")
    for other in (replace(record, id="18"), replace(record, comment="shoal:0ther/11b")):
        reason = explain_job(context, other, logs)
        assert reason is not None and " here: " not in reason.text
