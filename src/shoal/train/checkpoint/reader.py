"""Reads a checkpoint through torch.distributed.checkpoint, and runs no code from it.

torch itself reads its index with `pickle.load`, and values that are no tensors with `weights_only=False`.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from shoal.train.checkpoint.layout import Manifest
from shoal.train.checkpoint.safe_values import load, map_unpickling_error, unsafe
from shoal.train.checkpoint.writer import describe_failure
from shoal.train.errors import CheckpointError

INDEX = ".metadata"


def _memory_format(kind: Any, name: str) -> Any:
    """What `getattr` means in an index: Python 3.11 writes members of an enumeration so in some of its releases."""
    if kind is not metadata._MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise unsafe("builtins.getattr")
    return kind[name]


_INDEX_NAMES = {
    **{
        f"{kind.__module__}.{kind.__qualname__}": kind
        for kind in (
            metadata.Metadata,
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
        )
    },
    **{f"{module}.PosixPath": pathlib.PosixPath for module in ("pathlib", "pathlib._local")},
    "builtins.getattr": _memory_format,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "collections.OrderedDict": dict,
}
"""What torch's index of a checkpoint is made of."""


class _IndexUnpickler(pickle.Unpickler):
    """Reads a pickle in which only names of torch's index mean something."""

    def find_class(self, module: str, name: str) -> Any:
        known: Any = _INDEX_NAMES.get(f"{module}.{name}")
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = getattr(torch, name)
        if known is None:
            raise unsafe(f"{module}.{name}")
        return known


class SafeReader(FileSystemReader):  # type: ignore[misc]
    """Reads the files that the manifest lists, and no others."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        super().__init__(checkpoint)
        self._index = checkpoint / INDEX
        self._files = {record.name for record in manifest.files}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """torch's index of the checkpoint. CheckpointError if it has more than that."""
        try:
            index = _IndexUnpickler(io.BytesIO(self._index.read_bytes())).load()
            places = {info.relative_path for info in index.storage_data.values()}
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # a broken pickle raises anything
            found = f"{INDEX}: {type(error).__name__}: {error}"
            raise CheckpointError("the checkpoint cannot be loaded", found=found) from None
        if outside := sorted(str(place) for place in places - self._files):
            raise CheckpointError(
                "the checkpoint refers to files that its manifest does not list",
                found=", ".join(outside[:3]),
                fix="use another checkpoint, or start in another checkpoint directory",
            )
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


class SafePlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """Loads tensors in place, and other values as bytes; `safe_values.decode` reads those."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = load(value.getvalue())


def map_load_failure(problem: CheckpointException) -> CheckpointError:
    """The first rank's error, where it says what to do; else the errors of all."""
    for error, _ in problem.failures.values():
        if isinstance(error, CheckpointError):
            return error
        if isinstance(error, pickle.UnpicklingError):
            return map_unpickling_error(error)
    return CheckpointError("the checkpoint cannot be loaded", found=describe_failure(problem))
