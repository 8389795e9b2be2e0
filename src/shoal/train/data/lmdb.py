"""An LMDB environment as a map-style dataset: one entry is one sample.

LMDB does not survive a fork and its locks do not survive NFS. So the environment is opened read-only, without locks,
in each process on first use, and a worker lets go of what it inherited.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.train.data.order import BLOCK
from shoal.train.errors import DataError

Sample = dict[str, object]

# LMDB allows an environment to be opened once in a process; two datasets on one path share it.
_environments: dict[str, tuple[int, Any]] = {}


class LmdbDataset:
    """The entries of an LMDB environment, in the order of their keys, as a map-style dataset.

    A sample is `{"__key__": "000017", "value": b"..."}`; `value` gives its second field another name.

    `path` is the folder with `data.mdb`, or a single file. Entries named like `__len__` are not samples.
    """

    def __init__(self, path: str | Path, *, value: str = "value") -> None:
        self.path = Path(path)
        self._value = value
        keys = bytearray()
        ends = array("Q")
        with self._environment().begin() as transaction:
            for key in transaction.cursor().iternext(keys=True, values=False):
                if not (key.startswith(b"__") and key.endswith(b"__")):
                    keys += key
                    ends.append(len(keys))
        self._keys, self._ends = bytes(keys), ends
        # LMDB keeps neighbours together as a shard does: blocks of neighbours are what the order shuffles.
        self.lengths = [min(BLOCK, len(ends) - at) for at in range(0, len(ends), BLOCK)]

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, id: int) -> Sample:
        return self.__getitems__([id])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[Sample]:
        """Several samples in one read transaction."""
        samples: list[Sample] = []
        with self._environment().begin() as transaction:
            for id in ids:
                key = self._key(id)
                value = transaction.get(key)
                if value is None:
                    raise DataError(
                        f"{self.path} has no entry {key!r} any more",
                        found="the entry was there when the dataset was opened",
                        fix="do not write to an LMDB environment that a job reads; start the job again",
                    )
                samples.append({"__key__": key.decode("utf-8", "surrogateescape"), self._value: value})
        return samples

    @property
    def fingerprint(self) -> str:
        """Names the content: all keys, in order."""
        return f"lmdb-{len(self._ends)}-{zlib.crc32(self._keys, zlib.crc32(self._ends.tobytes())):08x}"

    def place(self, id: int) -> str:
        """Where a sample lies, for messages."""
        return f"entry {self._key(id)!r} of {self.path}"

    def _key(self, id: int) -> bytes:
        if not 0 <= id < len(self._ends):
            raise IndexError(f"sample {id} of a dataset of {len(self._ends)} samples")
        return self._keys[self._ends[id - 1] if id else 0 : self._ends[id]]

    def _environment(self) -> Any:
        place = os.path.realpath(self.path)
        process, environment = _environments.get(place, (0, None))
        if process != os.getpid():
            if environment is not None:
                environment.close()  # of our parent, before the fork; open there, it may not be opened here
            environment = _open_environment(self.path)
            _environments[place] = (os.getpid(), environment)
        return environment


def _open_environment(path: Path) -> Any:
    try:
        import lmdb
    except ImportError:
        reason = "it is not installed here"
        raise DataError(f"reading {path} needs the package lmdb", found=reason, fix="pip install lmdb") from None
    # Without readahead: samples are read in random order, and neighbours beyond a block are not needed.
    options = {"readonly": True, "lock": False, "readahead": False, "create": False}
    try:
        return lmdb.open(os.fspath(path), subdir=path.is_dir(), **options)
    except lmdb.Error as error:
        raise DataError(
            f"cannot open the LMDB environment {path}",
            found=str(error),
            fix="name the folder that holds data.mdb, or the file itself; was it copied whole?",
        ) from None
