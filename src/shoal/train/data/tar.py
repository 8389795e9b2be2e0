"""Tar shards in WebDataset's layout, read sample by sample: files that share a key are a sample, extensions are fields.

>>> dataset = ShardDataset("/shared/imagenet/train-{0000..0099}.tar", fields=("jpg", "cls"))
>>> dataset[17]
{'__key__': '000017', '__url__': '/shared/imagenet/train-0000.tar', 'jpg': b'...', 'cls': b'3'}
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import tarfile
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from itertools import accumulate, islice, product
from pathlib import Path

from shoal.train.data.index import ShardIndex, load_indexes, missing_shards
from shoal.train.data.staging import stage as stage_shards
from shoal.train.errors import DataError

Sample = dict[str, object]
Piece = tuple[int, int, list[tuple[str, int, int]]]
"""A stretch of a shard to read at once: where it starts, its size, and the fields in it as (name, begin, end)."""

_OPEN_SHARDS = 64
_NEAR = 64 * 1024
"""Files of one sample with at most so many unwanted bytes between them are read at once."""


class ShardDataset:
    """The samples of a list of tar shards, as a map-style dataset: `len(dataset)`, `dataset[id]`.

    `shards` is a list of paths, or a pattern with `{0000..0099}`, `{a,b}`, `*`, `?`. With `fields`, only those are
    read, and a sample that lacks one is refused at once, not in the middle of the night. With `stage`, shards are
    first copied to that folder of the node's own disk.
    """

    def __init__(
        self,
        shards: str | Path | Iterable[str | Path],
        *,
        fields: Sequence[str] | None = None,
        stage: str | Path | None = None,
    ) -> None:
        self.shards = expand(shards)
        self._indexes = load_indexes(self.shards)
        self.lengths = [len(index) for index in self._indexes]
        self._bases = [0, *accumulate(self.lengths)]
        self._fields = None if fields is None else tuple(fields)
        self._picks = [_picks(*pair, self._fields) for pair in zip(self._indexes, self.shards, strict=True)]
        self._paths = self.shards if stage is None else stage_shards(self.shards, Path(stage))
        self._open: dict[int, int] = {}

    def __len__(self) -> int:
        return self._bases[-1]

    def __getitem__(self, id: int) -> Sample:
        return self.__getitems__([id])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[Sample]:
        """Several samples, in the order asked for; read in the order in which they lie."""
        plan: list[tuple[int, int, int, list[Piece]]] = []
        for id in sorted(set(ids)):
            if not 0 <= id < len(self):
                raise IndexError(f"sample {id} of a dataset of {len(self)} samples")
            shard, local = self._locate(id)
            pieces = self._pieces(shard, local)
            plan.append((id, shard, local, pieces))
            # Asked for all at once before any is waited for: on a disk or a network the waits then overlap.
            for start, size, _ in pieces:
                os.posix_fadvise(self._file(shard), start, size, os.POSIX_FADV_WILLNEED)
        samples = {id: self._read(shard, local, pieces) for id, shard, local, pieces in plan}
        return [dict(samples[id]) for id in ids]

    @property
    def fingerprint(self) -> str:
        """Names the content: the shards' names, sizes and counts, in their order. Where they lie does not matter."""
        entries = [
            f"{shard.name}/{index.size}/{len(index)}" for shard, index in zip(self.shards, self._indexes, strict=True)
        ]
        return f"tar-{zlib.crc32(chr(10).join(entries).encode('utf-8', 'surrogateescape')):08x}"

    def place(self, id: int) -> str:
        """Where a sample lies, for messages."""
        shard, local = self._locate(id)
        return f"sample {self._indexes[shard].key(local)!r} of {self.shards[shard]}"

    def _locate(self, id: int) -> tuple[int, int]:
        """A sample's shard, and its place there."""
        shard = bisect_right(self._bases, id) - 1
        return shard, id - self._bases[shard]

    def close(self) -> None:
        """Close the shards' files; they are opened again when needed."""
        while self._open:
            with contextlib.suppress(OSError):
                os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_open"):
            self.close()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def _read(self, shard: int, local: int, pieces: list[Piece]) -> Sample:
        sample: Sample = {"__key__": self._indexes[shard].key(local), "__url__": str(self.shards[shard])}
        for start, size, fields in pieces:
            data = self._bytes(shard, start, size)
            for field, begin, end in fields:
                sample[field] = data[begin:end]
        return sample

    def _pieces(self, shard: int, local: int) -> list[Piece]:
        """What to read for a sample: mostly one piece, as its files lie side by side."""
        index = self._indexes[shard]
        first, offsets, sizes = index.first[local], index.offsets, index.sizes
        pieces: list[Piece] = []
        end = -_NEAR - 1
        for field, at in self._picks[shard][index.layout_of[local]]:
            offset, size = offsets[first + at], sizes[first + at]
            if offset - end > _NEAR:
                pieces.append((offset, size, [(field, 0, size)]))
            else:
                start, _, fields = pieces[-1]
                fields.append((field, offset - start, offset - start + size))
                pieces[-1] = (start, offset + size - start, fields)
            end = offset + size
        return pieces

    def _bytes(self, shard: int, offset: int, size: int) -> bytes:
        data = b""
        while len(data) < size:
            # pread keeps no position, so that forked workers may share a file without a lock.
            more = os.pread(self._file(shard), size - len(data), offset + len(data))
            if not more:
                raise self._change_error(shard, f"it ends at byte {offset + len(data)}")
            data = data + more if data else more
        return data

    def _file(self, shard: int) -> int:
        file = self._open.get(shard)
        if file is not None:
            return file
        path, indexed_size = self._paths[shard], self._indexes[shard].size
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise missing_shards([path], error) from None
        size = os.fstat(file).st_size
        if size != indexed_size:
            os.close(file)
            raise self._change_error(shard, f"it has {size} bytes; its index was built when it had {indexed_size}")
        if len(self._open) >= _OPEN_SHARDS:
            os.close(self._open.pop(next(iter(self._open))))
        self._open[shard] = file
        return file

    def _change_error(self, shard: int, evidence: str) -> DataError:
        return DataError(
            f"shard {self._paths[shard]} was changed while it was in use",
            found=evidence,
            fix="write shards under new names, and start the job again; its index is then built again",
        )


def expand(shards: str | Path | Iterable[str | Path]) -> list[Path]:
    """The paths that a pattern or a list of patterns stands for. A pattern that finds nothing is an error."""
    patterns = [shards] if isinstance(shards, str | Path) else list(shards)
    paths: list[Path] = []
    for pattern in patterns:
        for text in _braces(str(pattern)):
            if not glob.has_magic(text) or Path(text).exists():
                paths.append(Path(text))
                continue
            matches = sorted(glob.glob(text))  # noqa: PTH207  # Path.glob takes no absolute pattern
            if not matches:
                fix = "check the pattern, and the path from this node"
                raise DataError(f"no shard matches {text}", found="no such file", fix=fix)
            paths += map(Path, matches)
    if not paths:
        fix = "name the shards, e.g. data/*.tar"
        raise DataError("a dataset needs at least one shard", found="an empty list", fix=fix)
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise missing_shards(missing)
    return paths


def write_shards(
    folder: str | Path,
    samples: Iterable[Mapping[str, object]],
    *,
    per_shard: int = 1000,
    prefix: str = "shard",
) -> list[Path]:
    """Write samples as tar shards `<prefix>-0000.tar ...` and return their paths.

    A sample is a mapping with `__key__` and its fields by extension; values are bytes, or text and numbers, which are
    written as text. The same samples give the same bytes. A shard appears under its name once it is whole.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    remaining = iter(samples)
    while shard_samples := list(islice(remaining, per_shard)):
        written.append(_write_shard(folder / f"{prefix}-{len(written):04d}.tar", shard_samples))
    return written


def _write_shard(path: Path, samples: Sequence[Mapping[str, object]]) -> Path:
    draft = path.with_name(f".{path.name}.partial")
    with tarfile.open(draft, "w") as tar:
        for sample in samples:
            key = str(sample["__key__"])
            if "." in key.rpartition("/")[2]:
                raise DataError(
                    f"a sample cannot have the key {key!r}",
                    found="a dot, at which the field's name begins",
                    fix="use another character in keys",
                )
            for field, value in sample.items():
                if field.startswith("__"):
                    continue
                data = value if isinstance(value, bytes) else str(value).encode()
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size = len(data)
                tar.addfile(member, BytesIO(data))
    draft.replace(path)
    return path


def _picks(index: ShardIndex, shard: Path, fields: tuple[str, ...] | None) -> list[list[tuple[str, int]]]:
    """For each layout of a shard, which files to read: (field, place in the sample), in the order they lie."""
    picks = []
    for number, layout in enumerate(index.layouts):
        missing = [field for field in fields or () if field not in layout]
        if missing:
            first = index.layout_of.index(number)
            raise DataError(
                f"sample {index.key(first)!r} of {shard} lacks the field {missing[0]!r}",
                found=f"only {', '.join(layout)} ({index.layout_of.count(number)} of {len(index)} samples there)",
                fix=f"write the shard again with .{missing[0]} files, or leave {missing[0]!r} out of fields=",
            )
        picks.append([(field, at) for at, field in enumerate(layout) if fields is None or field in fields])
    return picks


def _braces(pattern: str) -> list[str]:
    """`{00..03}` and `{a,b}` written out, as a shell does."""
    pieces = re.split(r"\{([^{}]*)\}", pattern)
    choices: list[list[str]] = []
    for at, part in enumerate(pieces):
        numbers = re.fullmatch(r"(\d+)\.\.(\d+)", part) if at % 2 else None
        if numbers:
            low, high = int(numbers[1]), int(numbers[2])
            choices.append([str(number).zfill(len(numbers[1])) for number in range(low, high + 1)])
        elif at % 2:
            choices.append(part.split(",") if "," in part else [f"{{{part}}}"])
        else:
            choices.append([part])
    return ["".join(choice) for choice in product(*choices)]
