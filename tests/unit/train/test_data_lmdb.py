"""LMDB as a dataset: read-only, without locks, opened again in every process."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest
from tests.support.cases import cases

from shoal.train.data import DataError, LmdbDataset, Loader


@pytest.fixture
def path(tmp_path) -> Path:
    environment = lmdb.open(str(tmp_path / "data"), map_size=1 << 24)
    with environment.begin(write=True) as transaction:
        transaction.put(b"__len__", b"40")
        for at in range(40):
            transaction.put(b"%04d" % at, b"value %d" % at)
    environment.close()
    (tmp_path / "data" / "lock.mdb").unlink()
    return tmp_path / "data"


def test_entries_are_samples_in_key_order(path):
    dataset = LmdbDataset(path)
    assert len(dataset) == 40 and dataset[7] == {"__key__": "0007", "value": b"value 7"}
    assert [sample["__key__"] for sample in dataset.__getitems__([39, 0])] == ["0039", "0000"]
    assert LmdbDataset(path, value="jpg")[0]["jpg"] == b"value 0"
    with pytest.raises(IndexError, match="sample 40 of a dataset of 40 samples"):
        dataset[40]


def test_reading_creates_no_lock_file(path):
    LmdbDataset(path)[0]
    assert os.listdir(path) == ["data.mdb"]


@cases("workers", 0, 2)
def test_workers_open_the_environment_themselves(path, workers):
    dataset = LmdbDataset(path)
    assert dataset[0]["value"] == b"value 0"
    loader = Loader(dataset, global_batch=8, workers=workers, collate=list)
    keys = [sample["__key__"] for batch in loader for sample in batch]
    loader.close()
    assert sorted(keys) == [f"{at:04d}" for at in range(40)]


def test_dataset_can_be_pickled(path):
    dataset = LmdbDataset(path)
    again = pickle.loads(pickle.dumps(dataset))
    assert again[3] == dataset[3] and again.fingerprint == dataset.fingerprint


def test_missing_environment_is_explained(tmp_path):
    with pytest.raises(DataError) as caught:
        LmdbDataset(tmp_path / "nothing")
    text = str(caught.value)
    assert text.startswith(f"cannot open the LMDB environment {tmp_path / 'nothing'}\n  found: ")
    assert "fix: name the folder that holds data.mdb" in text


def test_missing_lmdb_package_is_explained_and_tar_shards_work_without(tmp_path):
    script = (
        "import sys; sys.modules['lmdb'] = None\n"
        "from shoal.train.data import LmdbDataset, write_shards\n"
        f"write_shards({str(tmp_path)!r}, [])\n"
        f"try: LmdbDataset({str(tmp_path)!r})\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"reading {tmp_path} needs the package lmdb\n  found: it is not installed here\n  fix: pip install lmdb\n"
    )
