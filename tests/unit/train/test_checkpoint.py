"""What a Checkpointer keeps, rejects and reports."""

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cases import cases
from tests.unit.train.procs import fresh_ranks, ranks
from tests.unit.train.training import build, digest, train_step

from shoal.train.checkpoint import Checkpointer, TrainState
from shoal.train.checkpoint import layout as files
from shoal.train.errors import CheckpointError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")


def _saved(directory: Path, *steps: int, keep_last: int = 3) -> tuple[Checkpointer, dict[int, str]]:
    """A checkpointer that has saved these steps, and the digests of what it saved."""
    state, checkpointer, digests = build("plain"), Checkpointer(directory, keep_last=keep_last), {}
    for step in steps:
        train_step(state)
        digests[step] = digest(state)
        assert checkpointer.save(step, state).committed
    return checkpointer, digests


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_new_directory_has_nothing_to_restore(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path / "none").restore(build("plain")) is None


def test_last_checkpoints_are_kept_and_older_checkpoints_deleted(tmp_path: Path) -> None:
    _saved(tmp_path, 1, 2, 3, 10, keep_last=2)
    assert _names(tmp_path) == ["step-10", "step-3"]


def test_manifest_lists_every_file_with_size_and_digest(tmp_path: Path) -> None:
    _saved(tmp_path, 4)
    manifest = files.read_manifest(tmp_path / "step-4")
    assert (manifest.step, manifest.world_size, manifest.run_id, manifest.reason) == (4, 1, "run-1", "periodic")
    assert {record.name for record in manifest.files} | {"MANIFEST.json"} == set(_names(tmp_path / "step-4"))


def test_files_are_synced_before_the_rename_and_the_rename_before_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power failure leaves, from the order of fsync and rename."""
    happened: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def noting_fsync(descriptor: int) -> None:
        fsync(descriptor)
        happened.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def noting_rename(source: Path, target: Path) -> None:
        rename(source, target)
        happened.append(("rename", str(target)))

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    _saved(tmp_path, 1)
    named = happened.index(("rename", str(tmp_path / "step-1")))
    synced = [Path(name).name for what, name in happened[:named] if what == "fsync"]
    assert {name.removesuffix(".tmp") for name in synced} >= set(_names(tmp_path / "step-1"))
    assert synced[-2] == "MANIFEST.json" and synced[-1].startswith("step-1.tmp-"), "its directory last"
    assert ("fsync", str(tmp_path)) in happened[named:]


@cases("harm", "flip", "truncate", "remove", "manifest")
def test_damaged_checkpoint_is_logged_and_the_previous_checkpoint_used(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, digests = _saved(tmp_path, 1, 2)
    victim = tmp_path / "step-2" / ("MANIFEST.json" if harm == "manifest" else "__0_0.distcp")
    content = bytearray(victim.read_bytes())
    if harm == "remove":
        victim.unlink()
    else:
        content[len(content) // 2] ^= 1
        victim.write_bytes(content[:-7] if harm in ("truncate", "manifest") else content)
    state, checkpointer = build("plain", seed=5), Checkpointer(tmp_path, keep_last=1)
    assert checkpointer.restore(state) == 1 and digest(state) == digests[1]
    said = {
        "flip": "__0_0.distcp has changed since it was written (SHA-256 differs)",
        "truncate": f"__0_0.distcp has {len(content) - 7} bytes instead of {len(content)}",
        "remove": "__0_0.distcp cannot be read: No such file or directory",
        "manifest": "MANIFEST.json: it is not a manifest",
    }[harm]
    assert f"step-2 is damaged and will not be used: {said}" in caplog.text
    # The step is reached again: its new checkpoint takes another name, and the damaged one goes after it is in.
    assert checkpointer.save(2, state).committed and _names(tmp_path) == ["step-2.1"]


def test_damaged_checkpoint_does_not_count_for_keep_last(tmp_path: Path) -> None:
    _saved(tmp_path, 1, 2)
    (tmp_path / "step-2" / ".metadata").write_bytes(b"")
    state, checkpointer = build("plain"), Checkpointer(tmp_path, keep_last=2)
    assert checkpointer.restore(state) == 1 and checkpointer.save(3, state).committed
    assert _names(tmp_path) == ["step-1", "step-3"]


def test_restore_fails_when_no_checkpoint_is_whole(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    (tmp_path / "step-1" / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* is whole") as caught:
        Checkpointer(tmp_path).restore(build("plain"))
    assert ".metadata has 0 bytes instead of" in str(caught.value)
    assert "move the directory away" in str(caught.value)


def test_manifest_of_a_newer_format_is_rejected_with_both_numbers(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    path = tmp_path / "step-1" / "MANIFEST.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 9}))
    with pytest.raises(CheckpointError, match="its format is 9, this version of shoal reads 1"):
        Checkpointer(tmp_path).latest()


def test_saved_step_is_not_saved_again(tmp_path: Path) -> None:
    state, checkpointer = build("plain"), Checkpointer(tmp_path)
    assert checkpointer.save(3, state) == checkpointer.save(3, state, reason="SIGTERM")
    assert Checkpointer(tmp_path).restore(state) == 3 and _names(tmp_path) == ["step-3"]


def test_only_leftovers_of_dead_attempts_are_deleted(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    for name in ("step-2.tmp-0a1b", "step-1.old-77", "notes", "step-3.tmp-mine"):
        (tmp_path / name).mkdir()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.claim()
    checkpointer.close()
    assert _names(tmp_path) == ["notes", "step-1", "step-3.tmp-mine"]


def test_checkpoint_of_another_model_is_rejected_with_the_different_tensors(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path).restore(build("plain", width=6))
    assert "the checkpoint is of another model" in str(caught.value)
    assert "model/blocks.0.0.weight: [8, 8] in the checkpoint, [6, 6] in the model" in str(caught.value)
    assert "and 6 more" in str(caught.value)


def test_missing_part_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    whole = build("plain")
    Checkpointer(tmp_path).save(1, TrainState(whole.model, whole.optimizer))
    with pytest.raises(CheckpointError, match="the scheduler: the checkpoint has none"):
        Checkpointer(tmp_path).restore(whole)


def test_keep_last_zero_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one checkpoint is kept"):
        Checkpointer(tmp_path, keep_last=0)


def _unreadable_for_one(rank: int, directory: str) -> str:
    # To rank 0 the directory is a file, as it may be where a mount is missing on one node.
    checkpointer = Checkpointer(Path(directory) / ("file" if rank == 0 else "folder"))
    try:
        checkpointer.restore(build("ddp"))
    except (CheckpointError, OSError) as error:
        return str(error)
    return "restored"


def test_all_ranks_fail_when_a_rank_cannot_read_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = ranks(2, _unreadable_for_one, str(tmp_path))
    assert "Not a directory" in first
    assert "rank 0 cannot load the checkpoint" in second and "NotADirectoryError" in second


class _Torn:
    """A data position that cannot be read on one rank."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def state_dict(self) -> Any:
        if self.broken:
            raise RuntimeError("the loader is gone")
        return 1

    def load_state_dict(self, state: Any) -> None:
        pass


def _one_rank_cannot_capture(rank: int, directory: str, asynchronous: bool) -> Any:
    state = build("fsdp")
    state.data = _Torn(rank == 1)
    checkpointer = Checkpointer(directory, asynchronous=asynchronous)
    checkpointer.save(1, state)
    result = checkpointer.wait()
    return result.outcome, result.error, checkpointer.failures


@cases("asynchronous", False, True)
def test_all_ranks_report_when_a_rank_cannot_save(tmp_path: Path, asynchronous: bool) -> None:
    said = ranks(2, _one_rank_cannot_capture, str(tmp_path), asynchronous)
    assert said == [("failed", "rank 1: RuntimeError: the loader is gone", 1)] * 2


class _OfRank:
    """A data position that differs from rank to rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> Any:
        return {"at": torch.tensor([self.rank])}

    def load_state_dict(self, state: Any) -> None:
        assert int(state["at"]) == self.rank


def _with_positions(rank: int, directory: str, save: bool) -> Any:
    state = build("ddp")
    state.data = _OfRank(rank)
    checkpointer = Checkpointer(directory)
    if save:
        return checkpointer.save(1, state).outcome
    try:
        return checkpointer.restore(state)
    except CheckpointError as error:
        return str(error)


def test_data_positions_are_per_rank_and_rejected_at_another_world_size(tmp_path: Path) -> None:
    assert ranks(2, _with_positions, str(tmp_path), True) == ["committed"] * 2
    assert ranks(2, _with_positions, str(tmp_path), False) == [1, 1]
    (said,) = ranks(1, _with_positions, str(tmp_path), False)
    assert "cannot restore the data position of 2 ranks on 1" in said and "or resume with 2 ranks" in said


# Disks that fail


@contextmanager
def _mounted(*arguments: str) -> Iterator[Path]:
    target = Path(arguments[-1])
    subprocess.run(["mount", *arguments], check=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


def _train_on_a_bad_disk(rank: int, directory: str, asynchronous: bool) -> Any:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal.train.checkpoint").addHandler(handler)
    state = build("fsdp", width=64)
    checkpointer = Checkpointer(directory, asynchronous=asynchronous)
    outcomes = []
    for step in (1, 2):
        train_step(state)
        checkpointer.save(step, state)
        outcomes.append(checkpointer.wait().outcome)
    train_step(state)
    return outcomes, checkpointer.failures, checkpointer.last.error, "\n".join(lines)


def _all_ranks_failed_alike_and_loudly(results: list[Any], cause: str) -> None:
    for rank, (outcomes, failures, error, log) in enumerate(results):
        assert outcomes == ["failed", "failed"] and failures == 2 and cause in error and error == results[0][2]
        told = "the checkpoint of step 2 (periodic) FAILED, training goes on without it"
        assert (told in log, cause in log) == (rank == 0, rank == 0), "said once, not by every rank"


@needs_root
@cases("asynchronous", False, True)
def test_training_continues_on_a_full_disk_and_all_ranks_report(tmp_path: Path, asynchronous: bool) -> None:
    (tmp_path / "disk").mkdir()
    with _mounted("-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "disk")) as disk:
        results = fresh_ranks(2, _train_on_a_bad_disk, str(disk), asynchronous)
        _all_ranks_failed_alike_and_loudly(results, "No space left on device")
        assert _names(disk) == []  # a failed attempt does not keep what little space there is


@needs_root
def test_training_continues_in_a_read_only_directory_and_all_ranks_report(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with _mounted("--bind", str(tmp_path / "disk"), str(tmp_path / "disk")) as disk:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(disk)], check=True)
        _all_ranks_failed_alike_and_loudly(
            fresh_ranks(2, _train_on_a_bad_disk, str(disk), False), "Read-only file system"
        )


def _on_private_disks(rank: int, directory: str) -> Any:
    result = Checkpointer(Path(directory) / str(rank)).save(1, build("ddp"))
    return result.outcome, result.error


def test_directory_not_shared_by_the_nodes_is_explained(tmp_path: Path) -> None:
    for outcome, error in ranks(2, _on_private_disks, str(tmp_path)):
        assert outcome == "failed" and "rank 0 does not see" in error
        assert "must be on storage that all nodes share" in error
