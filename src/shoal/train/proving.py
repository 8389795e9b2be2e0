"""The part of a proof that knows torch: makes a run exact, watches its model and its optimizer.

`init()` and `parallelize()` call this; nothing of it happens unless `shoal prove` runs the script (see proof.py).
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shoal.train.proof import Part, Recorder, recorder

_DTYPES = {"float64": torch.float64, "float32": torch.float32}


def begin(environ: Mapping[str, str] = os.environ) -> None:
    """The first thing a proof does in a process: whatever makes two runs of the same arithmetic differ is taken away.

    Random numbers of a script that sets no seed are the same in every run, and differ from rank to rank as they would
    without: a seed of ours must not hide that ranks draw what they should share.
    """
    found = recorder(environ)
    if found is None:
        return
    atexit.register(_leave, found, os.getpid())  # as the first, so that it runs after all that others register
    torch.manual_seed(found.rank)
    random.seed(found.rank)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(found.rank)
    torch.set_default_dtype(_DTYPES[found.settings.dtype])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def _leave(found: Recorder, process: int) -> None:
    """End a process that was stopped in the middle of its script, once all else is put away.

    Threads of its process group may still be at the end of a collective. Python's own end would stop one that comes
    back from it where C++ does not allow that, and abort.
    """
    if found.left and os.getpid() == process and getattr(sys, "last_value", None) is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class Watch:
    """Watches one model from before it is spread over the ranks until the proof has seen enough."""

    def __init__(self, found: Recorder, model: nn.Module) -> None:
        """The model is brought to the proof's precision, and so will be all that it is given."""
        self._recorder = found
        self._dtype = _DTYPES[found.settings.dtype]
        # Wrappers rename what they wrap or change it in place; this object's own names stay.
        self._model = model.to(self._dtype)
        self._handles: list[Any] = [model.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True)]
        self._optimizer: torch.optim.Optimizer | None = None
        self._ended = False
        found.begins(self._parts())

    def kind(self, asked: Literal["ddp", "fsdp"]) -> Literal["ddp", "fsdp"]:
        """How to spread the model: as the proof wants it, else as the script does."""
        wanted = self._recorder.settings.parallel
        return "ddp" if wanted == "ddp" else "fsdp" if wanted == "fsdp" else asked

    def parallelized(self, kind: str) -> None:
        """The model has been spread: what follows is training."""
        named = list(self._model.named_modules())
        norms = [name for name, part in named if type(part) in _BATCH_NORMS]
        drops = [name for name, part in named if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0]
        self._recorder.model(kind, norms, drops)
        self._handles += [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        atexit.register(self.end)

    def end(self) -> None:
        """Keep the parameters as they are now, unless that is done."""
        if not self._ended:
            self._ended = True
            self._recorder.ends(self._parts())

    def close(self) -> None:
        """Let go of torch. A script never calls this; its process ends."""
        atexit.unregister(self.end)
        for handle in self._handles:
            handle.remove()

    def _forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if model.training and torch.is_grad_enabled():
            if self._recorder.enough:
                self._recorder.left = True
                raise SystemExit(0)  # every rank has taken as many steps, and comes here
            self._recorder.saw(digests((args, kwargs)))
        return _cast(args, self._dtype), _cast(kwargs, self._dtype)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None:
            ours = {id(parameter) for parameter in self._model.parameters()}
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            if not any(id(parameter) in ours for parameter in held):
                return
            self._optimizer = optimizer
        if optimizer is self._optimizer:
            whole, sharded = self._squared_gradients()
            self._recorder.step(float(optimizer.param_groups[0]["lr"]), whole, sharded)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._optimizer and self._recorder.enough:
            self.end()

    def _squared_gradients(self) -> tuple[float, float]:
        """The sum of all gradients' squares: of those this rank has whole, and of its shards of the others."""
        sums = {False: 0.0, True: 0.0}
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                local, sharded = _local(parameter.grad)
                sums[sharded] += float(local.double().square().sum())
        return sums[False], sums[True]

    def _parts(self) -> Iterator[Part]:
        for name, parameter in self._model.named_parameters():
            local, sharded = _local(parameter)
            plain = name.replace("_checkpoint_wrapped_module.", "")
            yield Part(plain, sharded, _bytes(local.to(self._dtype)))


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""The layers that look at the other samples of the batch. SyncBatchNorm looks at those of all ranks, as it should."""


def watch(model: nn.Module, environ: Mapping[str, str] = os.environ) -> Watch | None:
    """Begin to watch a model that is about to be spread over the ranks; None where this is no proof."""
    found = recorder(environ)
    return Watch(found, model) if found is not None else None


def digests(value: Any) -> list[str]:
    """A short name for each sample of a batch, from its bytes: that of the first tensor in there. Empty without one."""
    batch = next(_tensors(value), None)
    if batch is None or batch.dim() == 0:
        return []
    rows = batch.detach().cpu()
    return [hashlib.blake2b(_bytes(row), digest_size=6).hexdigest() for row in rows]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The same with its floating-point tensors in this precision."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """What this rank holds of a tensor, and whether that is a shard of it."""
    # By attribute: DTensor's module takes long to import, and a script that only calls init() does not need it.
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        return tensor.detach().to_local(), any(placement.is_shard() for placement in placements)
    return tensor.detach(), False


def _bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor. Not by way of numpy, which need not be there."""
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""
