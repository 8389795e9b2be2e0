"""Staging: one copy per node, complete and verified or absent, and a failure never prevents training."""

import fcntl
import logging
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from shoal.train.data import DataError, ShardDataset, stage, write_shards
from shoal.train.data.staging import staged_path


@pytest.fixture
def shards(tmp_path) -> list[Path]:
    return write_shards(tmp_path / "shared", ({"__key__": str(at), "txt": "x" * 5000} for at in range(6)), per_shard=2)


@pytest.fixture
def local(tmp_path) -> Path:
    return tmp_path / "local"


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_dataset_reads_staged_copies_with_the_shard_index(shards, local):
    dataset = ShardDataset(shards, stage=local)
    assert contents(local) == sorted(staged_path(shard, local).name for shard in shards)
    for shard in shards:
        shard.unlink()
    assert dataset[5]["txt"] == b"x" * 5000 and dataset[5]["__url__"] == str(shards[2])


def test_copy_of_an_earlier_job_is_reused_and_an_outdated_copy_replaced(shards, local):
    copies = stage(shards, local)
    inodes, content = [copy.stat().st_ino for copy in copies], bytearray(shards[0].read_bytes())
    content[600] ^= 1
    shards[0].write_bytes(content)
    os.utime(shards[0], ns=(1, 1))
    assert stage(shards, local) == copies and copies[0].read_bytes() == content
    assert [copy.stat().st_ino for copy in copies[1:]] == inodes[1:]


def test_shards_of_equal_name_from_two_directories_do_not_collide(tmp_path, local):
    a, b = (write_shards(tmp_path / name, [{"__key__": "k", "txt": name}])[0] for name in ("a", "b"))
    assert len(set(stage([a, b], local))) == 2


def _stage_in_process(shards: list[Path], local: Path, started: object, results: object) -> None:
    started.wait()  # type: ignore[attr-defined]
    results.put([str(path) for path in stage(shards, local)])  # type: ignore[attr-defined]


def test_concurrent_processes_of_a_node_make_a_single_copy(shards, local):
    context = multiprocessing.get_context("fork")
    started, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_stage_in_process, args=(shards, local, started, results), daemon=True) for _ in range(3)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert found == [[str(staged_path(shard, local)) for shard in shards]] * 3
    assert contents(local) == sorted(staged_path(shard, local).name for shard in shards)


def _hold_lock(path: Path, held: object) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    held.set()  # type: ignore[attr-defined]
    time.sleep(60)


def test_killed_copier_blocks_no_process_and_its_partial_copy_is_not_used(shards, local):
    local.mkdir()
    target = staged_path(shards[0], local)
    half = target.with_name(f".{target.name}.partial")
    half.write_bytes(b"half")
    context = multiprocessing.get_context("fork")
    held, started, results = context.Event(), context.Barrier(1), context.Queue()
    copier = context.Process(target=_hold_lock, args=(target.with_name(f".{target.name}.lock"), held), daemon=True)
    copier.start()
    assert held.wait(60)
    waiter = context.Process(target=_stage_in_process, args=(shards, local, started, results), daemon=True)
    waiter.start()
    while contents(local) != sorted([half.name, *(staged_path(shard, local).name for shard in shards[1:])]):
        time.sleep(0.01)  # it has gone on to the other shards meanwhile
    copier.kill()
    assert results.get(timeout=60)[0] == str(target)
    waiter.join()
    copier.join()
    assert target.read_bytes() == shards[0].read_bytes() and not half.exists()


def test_too_little_disk_space_leaves_shards_in_place(shards, local, caplog):
    with caplog.at_level(logging.WARNING):
        assert stage(shards, local, keep_free=1 << 60) == shards
    assert contents(local) == [] and f"cannot stage {shards[0]} to {local} (" in caplog.text
    assert "MiB are needed); reading it where it is" in caplog.text


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="no /dev/full on this machine")
def test_disk_full_during_the_copy_leaves_shards_in_place(shards, local, caplog):
    local.mkdir()
    target = staged_path(shards[0], local)
    target.with_name(f".{target.name}.partial").symlink_to("/dev/full")
    assert stage(shards, local) == [shards[0], *(staged_path(shard, local) for shard in shards[1:])]
    assert "(No space left on device); reading it where it is" in caplog.text and len(contents(local)) == 2


def test_unusable_directory_leaves_shards_in_place(shards, tmp_path, caplog):
    (tmp_path / "file").touch()
    assert stage(shards, tmp_path / "file" / "local") == shards
    assert "(Not a directory); reading them where they are" in caplog.text


def test_shard_that_grows_during_the_copy_is_rejected(tmp_path, local):
    # What is read has another length than what was announced, as /proc's files do.
    with pytest.raises(DataError) as caught:
        stage([Path("/proc/self/status")], local)
    assert str(caught.value).startswith("shard /proc/self/status was changed while it was copied\n  found: ")
    assert contents(local) == []
