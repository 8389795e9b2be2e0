"""The index of a tar shard: the offsets of each sample's files, so that a sample is read without reading the tar.

Built once by walking the tar's headers and kept beside the shard as `<shard>.index`, or, where that folder is
read-only, under `$SHOAL_INDEX_DIR` (default `~/.cache/shoal/index`). It is used only for a shard of the size and
modification time it was built from; otherwise, or when it is damaged, it is built again.

The file: one line of JSON, then the arrays that it describes, then nothing. Offsets are of the shard's bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import sys
import tarfile
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.train.errors import DataError
from shoal.train.file_io import replace_file

log = logging.getLogger(__name__)

FORMAT = "shoal-index-1"
_ARRAYS = (("key_ends", "I"), ("layout_of", "H"), ("first", "I"), ("offsets", "Q"), ("sizes", "Q"))
# As WebDataset splits a name: the extension begins at the first dot after the last slash.
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True)
class ShardIndex:
    """The samples of one shard. Plain arrays: a million samples take some 30 MB, shared with forked workers."""

    size: int
    mtime_ns: int
    layouts: tuple[tuple[str, ...], ...]
    """The distinct lists of fields; mostly there is one."""
    keys: bytes
    key_ends: array[int]
    layout_of: array[int]
    first: array[int]
    """The sample's first file, as a place in `offsets` and `sizes`."""
    offsets: array[int]
    sizes: array[int]

    def __len__(self) -> int:
        return len(self.first)

    def key(self, sample: int) -> str:
        start = self.key_ends[sample - 1] if sample else 0
        return self.keys[start : self.key_ends[sample]].decode("utf-8", "surrogateescape")

    def fields(self, sample: int) -> tuple[str, ...]:
        return self.layouts[self.layout_of[sample]]


def load_indexes(shards: Sequence[Path]) -> list[ShardIndex]:
    """The index of every shard, building those that are missing.

    Ranks that start together share the work without communication: each begins at another shard, and checks before
    each shard whether another rank has built it meanwhile.
    """
    indexes = [_read_stored(shard) for shard in shards]
    missing = [at for at, index in enumerate(indexes) if index is None]
    turn = secrets.randbelow(len(missing)) if missing else 0
    for at in missing[turn:] + missing[:turn]:
        indexes[at] = _read_stored(shards[at]) or _build_and_store(shards[at])
    return [index for index in indexes if index is not None]


def _build_and_store(shard: Path) -> ShardIndex:
    index = build_index(shard)
    for place in index_paths(shard):
        try:
            _write(index, place)
            return index
        except OSError as error:
            log.debug("the index of %s cannot be kept at %s: %s", shard, place, error)
    hint = "set SHOAL_INDEX_DIR to a writable folder"
    log.warning("the index of %s cannot be stored and is built at every start; %s", shard, hint)
    return index


def index_paths(shard: Path) -> tuple[Path, Path]:
    """The paths for the index of a shard: beside it, or in the folder for read-only shards."""
    folder = Path(os.environ.get("SHOAL_INDEX_DIR") or Path("~/.cache/shoal/index").expanduser())
    digest = hashlib.blake2b(os.fsencode(shard.absolute()), digest_size=8).hexdigest()
    return shard.with_name(shard.name + ".index"), folder / f"{shard.name}.{digest}.index"


def build_index(shard: Path) -> ShardIndex:
    """Walk the shard's headers. A tar that is cut short, and what WebDataset's layout does not allow, is refused."""
    stat = _stat(shard)
    layouts: dict[tuple[str, ...], int] = {}
    keys = bytearray()
    key_ends, layout_of, first = array("I"), array("H"), array("I")
    offsets, sizes = array("Q"), array("Q")
    keys_in_shard: set[str] = set()
    key: str | None = None
    fields: list[str] = []

    def close_sample() -> None:
        if key is not None:
            keys.extend(key.encode("utf-8", "surrogateescape"))
            key_ends.append(len(keys))
            layout_of.append(layouts.setdefault(tuple(fields), len(layouts)))
            first.append(len(offsets) - len(fields))

    for name, offset, size in _members(shard, stat.st_size):
        matched = _NAME.match(name)
        if matched is None or _META.match(name):
            continue
        file_key, field = matched[1], matched[2].lower()
        if file_key != key:
            close_sample()
            if file_key in keys_in_shard:
                raise DataError(
                    f"shard {shard} has the key {file_key!r} twice",
                    found=f"the file {name!r} lies apart from the key's other files",
                    fix="write the files of one sample side by side (tar --sort=name), and a key once in a shard",
                )
            keys_in_shard.add(file_key)
            key, fields = file_key, []
        if field in fields:
            raise DataError(
                f"shard {shard} has the file {name!r} twice",
                found=f"sample {file_key!r} would have two fields {field!r}",
                fix="write the shard again without the repeated sample; a key must be unique in a shard",
            )
        fields.append(field)
        offsets.append(offset)
        sizes.append(size)
    close_sample()
    return ShardIndex(
        stat.st_size, stat.st_mtime_ns, tuple(layouts), bytes(keys), key_ends, layout_of, first, offsets, sizes
    )


def read_index(path: Path) -> ShardIndex:
    """An index from its file, or why it cannot be used."""
    head, _, body = path.read_bytes().partition(b"\n")
    fix = f"remove {path}; it is built again at the next start"
    try:
        header = json.loads(head)
        if header["format"] != FORMAT or header["byteorder"] != sys.byteorder:
            description = f"format {header['format']}, {header['byteorder']}-endian"
            raise DataError(f"index {path} is of another format", found=description, fix=fix)
        if zlib.crc32(body) != header["crc32"]:
            raise DataError(f"index {path} is damaged", found="its checksum is not the one it states", fix=fix)
        at = header["keys"]
        arrays: dict[str, array[int]] = {}
        for name, kind in _ARRAYS:
            arrays[name] = array(kind)
            end = at + header[name] * arrays[name].itemsize
            arrays[name].frombytes(body[at:end])
            at = end
        layouts = tuple(tuple(layout) for layout in header["layouts"])
        return ShardIndex(header["size"], header["mtime_ns"], layouts, body[: header["keys"]], **arrays)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"index {path} is damaged", found=f"{type(error).__name__}: {error}", fix=fix) from None


def _read_stored(shard: Path) -> ShardIndex | None:
    """The stored index, if it is that of the shard as it is now."""
    stat = _stat(shard)
    for place in index_paths(shard):
        try:
            index = read_index(place)
        except OSError:
            continue
        except DataError as error:
            log.warning("%s (%s); building it again", error.what, error.found)
            continue
        if (index.size, index.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            return index
    return None


def _write(index: ShardIndex, place: Path) -> None:
    body = index.keys + b"".join(getattr(index, name).tobytes() for name, _ in _ARRAYS)
    header = {
        "format": FORMAT,
        "byteorder": sys.byteorder,
        "size": index.size,
        "mtime_ns": index.mtime_ns,
        "layouts": index.layouts,
        "keys": len(index.keys),
        **{name: len(getattr(index, name)) for name, _ in _ARRAYS},
        "crc32": zlib.crc32(body),
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    # Many ranks may write the same index at once: the last one wins, with the same content.
    replace_file(place, json.dumps(header).encode() + b"\n" + body)


def _members(shard: Path, size: int) -> list[tuple[str, int, int]]:
    """Name, offset and size of every regular file in the tar."""
    members: list[tuple[str, int, int]] = []
    cut = DataError(
        f"shard {shard} is cut short",
        found=f"its {size} bytes do not end with the mark that ends a tar",
        fix="copy or write it again, and compare the size with the original's",
    )
    with shard.open("rb") as raw:
        start = raw.read(6)
        compression = next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), "")
        if compression:
            raise DataError(
                f"shard {shard} cannot be read sample by sample",
                found=f"it is compressed with {compression}",
                fix="decompress the shard; compress the files in it (jpg, png, npz) instead",
            )
        raw.seek(0)
        try:
            with tarfile.open(fileobj=raw, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # or the whole listing stays in memory
                    if member.issparse():
                        raise DataError(
                            f"shard {shard} cannot be read in place",
                            found=f"{member.name!r} is stored as a sparse file",
                            fix="write the shard again without tar's --sparse",
                        )
                    if member.isreg():
                        members.append((member.name, member.offset_data, member.size))
                end = tar.offset
        except tarfile.ReadError as error:
            if "unexpected end" in str(error):
                raise cut from None
            fix = "name tar files only, written whole"
            raise DataError(f"shard {shard} is not a tar", found=str(error), fix=fix) from None
        # tarfile takes a damaged or missing header for the end, and would silently skip the rest.
        raw.seek(end)
        if raw.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise cut
    return members


def _stat(shard: Path) -> os.stat_result:
    try:
        return shard.stat()
    except OSError as error:
        raise missing_shards([shard], error) from None


def missing_shards(shards: Sequence[Path], error: OSError | None = None) -> DataError:
    """The error for missing shards."""
    names = ", ".join(str(shard) for shard in shards[:3]) + (f" and {len(shards) - 3} more" if len(shards) > 3 else "")
    return DataError(
        f"cannot read {'shard' if len(shards) == 1 else f'{len(shards)} shards'} {names}",
        found=(error.strerror or str(error)) if error is not None else "no such file",
        fix="check the path from this node (is the shared folder mounted?), or leave the shard out of the list",
    )
