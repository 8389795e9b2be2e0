"""The values in a checkpoint as bytes that can be read without running code from them.

Whoever can write into a checkpoint directory must not run code in the job that resumes from it. So values are written
by `torch.save` and read by `torch.load(weights_only=True)`: tensors, numbers, text and containers of them. Arrays of
numpy and a few more containers are written as such. A class of the user's own is allowed where the script registers it
with `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch

from shoal.train.errors import CheckpointError

TAG = "__shoal__"
"""The first item of a tuple that stands for a value of another type."""
MAX_NESTING = 100
MAX_INT_BITS = 2000
"""torch reads no longer ones with weights_only; longer ones are written as text."""
_PYTHON_LEAVES = (type(None), bool, int, float, complex, str, bytes, bytearray)
_LEAVES = (*_PYTHON_LEAVES, torch.Size, torch.dtype, torch.device, torch.Tensor, torch.nn.Parameter)
_FACTORIES: Mapping[str, Any] = {kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple)}
_ARRAY_KINDS = "biufcmMSU"
"""numpy's: numbers, times and text. Not objects."""
FIX = (
    "return tensors, numbers, text, lists and dicts from state_dict(), or allow the class in the script: "
    "torch.serialization.add_safe_globals([TheClass])"
)


def encode(value: Any, name: str) -> bytes:
    """The bytes of a value. `name` is its place in the messages. CheckpointError if it could not be read again."""
    encoder = _Encoder()
    stream = io.BytesIO()
    torch.save(encoder.encode(value, name), stream)
    data = stream.getvalue()
    if encoder.registered:  # what is inside such an object is only known by reading it
        load(data)
    return data


def decode(data: bytes) -> Any:
    """The value of some bytes. CheckpointError if it is of a type that only code from the checkpoint could make."""
    try:
        if not data.startswith(b"PK"):  # torch would unpickle it
            raise unsafe("a pickle")
        return _decode(load(data))
    except CheckpointError:
        raise
    except Exception as error:  # a broken value raises anything
        raise CheckpointError("the checkpoint cannot be loaded", found=f"{type(error).__name__}: {error}") from None


class _Encoder:
    def __init__(self) -> None:
        self.registered = False
        """Whether there is an object of a class that the script registered."""
        self._registered_types = tuple(one for one in torch.serialization.get_safe_globals() if isinstance(one, type))

    def encode(self, value: Any, place: str, depth: int = 0) -> Any:
        kind: Any = type(value)
        if kind is int and value.bit_length() > MAX_INT_BITS:
            return TAG, "int", hex(value)
        if kind in _LEAVES:
            return value
        if depth > MAX_NESTING:
            raise CheckpointError(f"cannot save {place}: it is nested more than {MAX_NESTING} deep", fix=FIX)

        def inner(item: Any, key: Any) -> Any:
            return self.encode(item, f"{place}[{key!r}]", depth + 1)

        if kind in (dict, OrderedDict, Counter, defaultdict):
            items = {inner(key, key): inner(item, key) for key, item in value.items()}
            if kind is defaultdict:
                return self._encode_defaultdict(value, items, place)
            made: Any = items if kind is dict else kind(items)
            if attributes := getattr(value, "__dict__", None):  # a module's state_dict() has some
                made.__dict__.update(inner(attributes, "__dict__"))
            return made
        if kind in (list, tuple, set, frozenset, deque):
            values = [inner(item, number) for number, item in enumerate(value)]
            if kind is list:
                return values
            if kind is set:
                return set(values)
            if kind is tuple and values[:1] != [TAG]:
                return tuple(values)
            return TAG, kind.__name__, values, value.maxlen if kind is deque else None
        if isinstance(value, PurePath):
            return TAG, "path", str(value)
        if kind is range:
            return TAG, "range", (value.start, value.stop, value.step)
        if kind is io.BytesIO:  # extra state of some modules
            return TAG, "BytesIO", value.getvalue()
        numpy = sys.modules.get("numpy")
        if numpy is not None and kind is not numpy.ndarray and isinstance(value, numpy.generic):
            return (TAG, "scalar", *_array_parts(numpy.asarray(value), place))
        if numpy is not None and kind is numpy.ndarray:
            return (TAG, "array", *_array_parts(value, place))
        if kind in self._registered_types:
            self.registered = True
            return value
        raise CheckpointError(
            f"cannot save {place}: a checkpoint holds no {kind.__module__}.{kind.__qualname__}", fix=FIX
        )

    def _encode_defaultdict(self, value: Any, items: dict[Any, Any], place: str) -> Any:
        factory = value.default_factory
        if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
            raise CheckpointError(f"cannot save {place}: a defaultdict of {factory!r}", fix="save it as a plain dict")
        return TAG, "defaultdict", items, factory and factory.__name__


def _array_parts(array: Any, place: str) -> tuple[str, tuple[int, ...], bytes]:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise CheckpointError(f"cannot save {place}: an array of {array.dtype}", fix="save numbers, text or a list")
    return array.dtype.str, array.shape, array.tobytes()


def load(data: bytes) -> Any:
    """What `torch.save` wrote. CheckpointError if there is more than data in it."""
    try:
        return torch.load(io.BytesIO(data), map_location=_place, weights_only=True)
    except pickle.UnpicklingError as error:
        raise map_unpickling_error(error) from None


def map_unpickling_error(error: pickle.UnpicklingError) -> CheckpointError:
    """torch's error without its advice to load the file all the same."""
    match = re.search(r"GLOBAL ([\w.]+)", str(error))
    return unsafe(match[1] if match else "what is not in torch's format")


def _place(storage: Any, location: str) -> Any:
    """Tensors of a GPU go to the one of this rank, or to memory where there is none."""
    return storage.cuda() if location.startswith("cuda") and torch.cuda.is_available() else storage


def unsafe(name: str) -> CheckpointError:
    """The error for what only code that the checkpoint names could make."""
    return CheckpointError(
        "the checkpoint holds more than data, and is not loaded",
        found=f"{name}; whoever can write into the directory could run code in this job with it",
        fix=f"if it is yours: {FIX}; else start in another checkpoint directory",
    )


def _decode(value: Any) -> Any:
    """The value with its tagged tuples replaced by what they stand for."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        made = kind({_decode(key): _decode(item) for key, item in value.items()})
        if attributes := getattr(value, "__dict__", None):
            made.__dict__.update(_decode(attributes))
        return made
    if kind in (list, set):
        return kind(map(_decode, value))
    if kind is tuple:
        return _DECODERS[value[1]](*value[2:]) if value[:1] == (TAG,) else tuple(map(_decode, value))
    return value


def _decode_defaultdict(items: dict[Any, Any], factory: str | None) -> Any:
    return defaultdict(_FACTORIES[factory] if factory else None, _decode(items))


def _decode_array(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    import numpy

    kind: Any = numpy.dtype(dtype)
    if kind.kind not in _ARRAY_KINDS:
        raise unsafe(f"an array of {kind}")
    array: Any = numpy.frombuffer(data, kind)
    return array.reshape(shape).copy()


_DECODERS: Mapping[str, Callable[..., Any]] = {
    "tuple": lambda items, _: tuple(map(_decode, items)),
    "frozenset": lambda items, _: frozenset(map(_decode, items)),
    "deque": lambda items, length: deque(map(_decode, items), length),
    "defaultdict": _decode_defaultdict,
    "int": lambda text: int(text, 16),
    "path": Path,
    "range": lambda bounds: range(*bounds),
    "BytesIO": io.BytesIO,
    "array": _decode_array,
    "scalar": lambda dtype, shape, data: _decode_array(dtype, shape, data)[()],
}
