"""Tar shards and their index: the samples that webdataset reads, random access, and clear errors for broken ones."""

import io
import logging
import os
import pickle
import tarfile
from pathlib import Path

import pytest
from tests.support.cases import cases
from webdataset.tariterators import group_by_keys, tar_file_expander

from shoal.train.data import DataError, ShardDataset, build_index, write_shards
from shoal.train.data import index as index_module


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_INDEX_DIR", str(tmp_path / "cache"))


def samples(count: int) -> list[dict[str, object]]:
    return [{"__key__": f"{at:04d}", "txt": f"text {at}" * (at % 5), "cls": at} for at in range(count)]


def tar_of(path: Path, names: list[str], **options) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    return path


def refusal(call) -> str:
    with pytest.raises(DataError) as caught:
        call()
    return str(caught.value)


def test_samples_equal_those_of_webdataset(tmp_path):
    names = [
        "a/1.jpg",
        "a/1.seg.PNG",
        "a/2.jpg",
        "__meta__/x.json",
        "noextension",
        "b/1.jpg",
        "b.d/1.x.y",
        f"{'n' * 200}.txt",
    ]
    shard = tar_of(tmp_path / "one.tar", names)
    with shard.open("rb") as stream:
        files = tar_file_expander([{"url": str(shard), "stream": stream}])
        theirs = list(group_by_keys(files))
    dataset = ShardDataset([shard])
    assert [dataset[at] for at in range(len(dataset))] == theirs and len(theirs) == 5


def test_samples_are_returned_in_the_requested_order_from_any_shard(tmp_path):
    written = samples(25)
    dataset = ShardDataset(write_shards(tmp_path, written, per_shard=10))
    assert dataset.lengths == [10, 10, 5]
    ids = [24, 0, 13, 9, 10, 13]
    found = dataset.__getitems__(ids)
    assert [sample["__key__"] for sample in found] == [written[id]["__key__"] for id in ids]
    assert found[2]["txt"] == str(written[13]["txt"]).encode()
    with pytest.raises(IndexError, match="sample 25 of a dataset of 25 samples"):
        dataset[25]


def test_only_the_requested_fields_are_read(tmp_path):
    written = [{"__key__": f"{at}", "a": f"a{at}", "big": "x" * 100_000, "b": f"b{at}"} for at in range(3)]
    dataset = ShardDataset(write_shards(tmp_path, written), fields=("b", "a"))
    assert dataset[2] == {"__key__": "2", "__url__": str(tmp_path / "shard-0000.tar"), "a": b"a2", "b": b"b2"}
    assert ShardDataset(tmp_path / "shard-0000.tar", fields=())[1].keys() == {"__key__", "__url__"}


def test_written_shards_are_reproducible_and_leave_no_temporary_file(tmp_path):
    first, again = (write_shards(tmp_path / name, samples(5), per_shard=2) for name in ("one", "two"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [f"shard-000{at}.tar" for at in range(3)]


def test_key_with_a_dot_is_rejected_when_written(tmp_path):
    text = refusal(lambda: write_shards(tmp_path, [{"__key__": "a.b", "txt": ""}]))
    assert text == (
        "a sample cannot have the key 'a.b'\n"
        "  found: a dot, at which the field's name begins\n"
        "  fix: use another character in keys"
    )


def test_patterns_match_shards(tmp_path):
    paths = write_shards(tmp_path, samples(4), per_shard=1)
    assert ShardDataset(f"{tmp_path}/shard-{{0001..0002}}.tar").shards == paths[1:3]
    assert ShardDataset(f"{tmp_path}/shard-000{{0,3}}.tar").shards == [paths[0], paths[3]]
    assert ShardDataset(f"{tmp_path}/*.tar").shards == paths
    assert refusal(lambda: ShardDataset(f"{tmp_path}/*.zip")).startswith(f"no shard matches {tmp_path}/*.zip\n")
    assert refusal(lambda: ShardDataset([])).startswith("a dataset needs at least one shard\n")


def test_missing_shards_are_named(tmp_path):
    write_shards(tmp_path, samples(2), per_shard=1)
    text = refusal(lambda: ShardDataset(f"{tmp_path}/shard-{{0000..0009}}.tar"))
    assert text == (
        f"cannot read 8 shards {', '.join(f'{tmp_path}/shard-000{at}.tar' for at in (2, 3, 4))} and 5 more\n"
        "  found: no such file\n"
        "  fix: check the path from this node (is the shared folder mounted?), or leave the shard out of the list"
    )


@cases("keep", 512 + 100, 1024, 1024 + 200, 3 * 1024)
def test_truncated_tar_is_rejected_at_any_length(tmp_path, keep):
    # Within the data, between two files, within a header, and before the mark at the end.
    shard = tar_of(tmp_path / "one.tar", ["a.txt", "b.txt", "c.txt"])
    os.truncate(shard, keep)
    assert refusal(lambda: ShardDataset([shard])) == (
        f"shard {shard} is cut short\n"
        f"  found: its {keep} bytes do not end with the mark that ends a tar\n"
        "  fix: copy or write it again, and compare the size with the original's"
    )


def test_damaged_header_is_not_read_as_the_end(tmp_path):
    shard = tar_of(tmp_path / "one.tar", ["a.txt", "b.txt", "c.txt"])
    with shard.open("r+b") as file:
        file.seek(1024)
        file.write(b"\xff" * 512)
    assert refusal(lambda: ShardDataset([shard])).startswith(f"shard {shard} is cut short\n")


def test_file_that_is_not_a_tar_or_compressed_is_rejected(tmp_path):
    other = tmp_path / "one.tar"
    other.write_bytes(b"hello" * 300)
    assert f"shard {other} is not a tar\n  found: " in refusal(lambda: ShardDataset([other]))
    with tarfile.open(tmp_path / "two.tar", "w:gz"):
        pass
    assert "  found: it is compressed with gzip\n  fix: decompress the shard" in refusal(
        lambda: ShardDataset([tmp_path / "two.tar"])
    )


def test_duplicate_key_is_rejected(tmp_path):
    shard = tar_of(tmp_path / "one.tar", ["a.txt", "b.txt", "a.cls"])
    assert refusal(lambda: ShardDataset([shard])) == (
        f"shard {shard} has the key 'a' twice\n"
        "  found: the file 'a.cls' lies apart from the key's other files\n"
        "  fix: write the files of one sample side by side (tar --sort=name), and a key once in a shard"
    )
    shard = tar_of(tmp_path / "two.tar", ["a.txt", "a.TXT"])
    assert refusal(lambda: ShardDataset([shard])).startswith(
        f"shard {shard} has the file 'a.TXT' twice\n  found: sample 'a' would have two fields 'txt'\n"
    )


def test_sample_without_a_field_is_rejected_at_the_start(tmp_path):
    shard = tar_of(tmp_path / "one.tar", ["a.jpg", "a.cls", "b.jpg", "c.jpg"])
    assert refusal(lambda: ShardDataset([shard], fields=("jpg", "cls"))) == (
        f"sample 'b' of {shard} lacks the field 'cls'\n"
        "  found: only jpg (2 of 3 samples there)\n"
        "  fix: write the shard again with .cls files, or leave 'cls' out of fields="
    )


def test_index_is_built_once_and_stored_beside_the_shard(tmp_path, monkeypatch):
    (shard,) = write_shards(tmp_path, samples(3))
    built = ShardDataset([shard])
    assert (tmp_path / "shard-0000.tar.index").is_file()
    monkeypatch.setattr(index_module, "build_index", lambda shard: pytest.fail("built again"))
    assert ShardDataset([shard])[2] == built[2]


def test_rewritten_shard_gets_a_new_index(tmp_path):
    (shard,) = write_shards(tmp_path, samples(3))
    assert len(ShardDataset([shard])) == 3
    write_shards(tmp_path, samples(4))
    assert len(ShardDataset([shard])) == 4


@cases("damage", b"", b"not json\n", b"{}\n", b'{"format": "shoal-index-0", "byteorder": "little"}\n')
def test_damaged_index_is_explained_and_rebuilt(tmp_path, caplog, damage):
    (shard,) = write_shards(tmp_path, samples(3))
    kept = tmp_path / "shard-0000.tar.index"
    ShardDataset([shard])
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    text = refusal(lambda: index_module.read_index(kept))
    assert text.startswith(f"index {kept} is ")
    assert text.endswith(f"\n  fix: remove {kept}; it is built again at the next start")
    with caplog.at_level(logging.WARNING):
        assert len(ShardDataset([shard])) == 3
    assert "building it again" in caplog.text and kept.read_bytes() == whole


def test_flipped_bit_in_an_index_is_detected(tmp_path):
    (shard,) = write_shards(tmp_path, samples(3))
    ShardDataset([shard])
    kept = tmp_path / "shard-0000.tar.index"
    content = bytearray(kept.read_bytes())
    content[-3] ^= 1
    kept.write_bytes(content)
    assert "found: its checksum is not the one it states" in refusal(lambda: index_module.read_index(kept))


def test_indexes_of_shards_in_an_unwritable_directory_are_stored_elsewhere(tmp_path, monkeypatch):
    (shard,) = write_shards(tmp_path / "data", samples(3))
    # Root may write anywhere, so a directory in place of the index makes the write fail.
    (tmp_path / "data" / "shard-0000.tar.index").mkdir()
    assert len(ShardDataset([shard])) == 3 and len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setattr(index_module, "build_index", lambda shard: pytest.fail("built again"))
    assert len(ShardDataset([shard])) == 3


def test_index_that_cannot_be_stored_is_rebuilt_with_a_warning(tmp_path, monkeypatch, caplog):
    (shard,) = write_shards(tmp_path / "data", samples(3))
    (tmp_path / "data" / "shard-0000.tar.index").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHOAL_INDEX_DIR", str(tmp_path / "file" / "sub"))
    assert len(ShardDataset([shard])) == 3 and "set SHOAL_INDEX_DIR to a writable folder" in caplog.text


def test_shard_changed_while_in_use_is_detected(tmp_path):
    shards = write_shards(tmp_path, samples(4), per_shard=2)
    dataset, size = ShardDataset(shards), shards[0].stat().st_size
    assert dataset[0]["cls"] == b"0"
    os.truncate(shards[0], 1100)
    text = refusal(lambda: dataset[1])
    assert text.startswith(f"shard {shards[0]} was changed while it was in use\n  found: it ends at byte ")
    dataset.close()
    assert f"found: it has 1100 bytes; its index was built when it had {size}\n" in refusal(lambda: dataset[1])
    shards[1].unlink()
    assert refusal(lambda: dataset[2]).startswith(
        f"cannot read shard {shards[1]}\n  found: No such file or directory\n"
    )


def test_many_shards_do_not_exhaust_open_files(tmp_path):
    dataset = ShardDataset(write_shards(tmp_path, samples(70), per_shard=1))
    before = len(os.listdir("/proc/self/fd"))
    assert [sample["cls"] for sample in dataset.__getitems__(range(70))] == [str(at).encode() for at in range(70)]
    assert len(os.listdir("/proc/self/fd")) - before == 64
    dataset.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_dataset_can_be_pickled(tmp_path):
    dataset = ShardDataset(write_shards(tmp_path, samples(3)))
    dataset[0]
    again = pickle.loads(pickle.dumps(dataset))
    assert again[2] == dataset[2] and again.fingerprint == dataset.fingerprint


def test_fingerprint_depends_on_the_data_and_not_on_its_path(tmp_path):
    here, there = (ShardDataset(write_shards(tmp_path / name, samples(4), per_shard=2)) for name in ("here", "there"))
    assert here.fingerprint == there.fingerprint and ShardDataset(here.shards[::-1]).fingerprint != here.fingerprint
    assert ShardDataset(here.shards[:1]).fingerprint != here.fingerprint


def test_index_supports_offsets_beyond_four_gigabytes(tmp_path):
    # A sparse file stands for five gigabytes of data.
    shard = tmp_path / "large.tar"
    with shard.open("wb") as file:
        large = tarfile.TarInfo("a.bin")
        large.size = 5 << 30
        file.write(large.tobuf(tarfile.GNU_FORMAT))
        file.seek(large.size, os.SEEK_CUR)
        small = tarfile.TarInfo("b.txt")
        small.size = 5
        file.write(small.tobuf() + b"hello".ljust(512, b"\0") + bytes(1024))
    assert build_index(shard).offsets[1] > 5 << 30 and ShardDataset([shard])[1]["txt"] == b"hello"
