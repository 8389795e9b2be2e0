"""The part of a proof that needs torch: makes a run deterministic, watches its model and optimizer.

Called by `init()` and `parallelize()`; does nothing unless `shoal prove` runs the script (see proof_record.py).
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
from torch.utils.data.distributed import DistributedSampler

from shoal.train.proof_record import ParameterPart, ProofRecorder, proof_recorder

_DTYPES = {"float64": torch.float64, "float32": torch.float32}


def begin_proof(environ: Mapping[str, str] = os.environ) -> None:
    """Make the process deterministic, at the start of a proof.

    Without a seed of the script, random numbers are the same in every run but differ between ranks: a common seed would
    hide that ranks draw numbers which they should share.
    """
    recorder = proof_recorder(environ)
    if recorder is None:
        return
    atexit.register(_leave, recorder, os.getpid())  # registered first, so that it runs last
    _watch_samplers()
    torch.manual_seed(recorder.rank)
    random.seed(recorder.rank)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(recorder.rank)
    torch.set_default_dtype(_DTYPES[recorder.dtype])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def _leave(recorder: ProofRecorder, process: int) -> None:
    """End a process whose script was stopped early, after all other exit handlers.

    Threads of its process group may still be in a collective, and the end of the interpreter would abort them.
    """
    if recorder.stopped_early and os.getpid() == process and getattr(sys, "last_value", None) is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class ModelWatch:
    """Watches one model from before it is distributed until the proof is complete."""

    def __init__(self, recorder: ProofRecorder, model: nn.Module) -> None:
        """Converts the model to the proof's precision, and later all its inputs."""
        self._recorder = recorder
        self._dtype = _DTYPES[recorder.dtype]
        # Wrappers rename parameters; the names of this object stay.
        self._model = model.to(self._dtype)
        model.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True)
        self._optimizer: torch.optim.Optimizer | None = None
        self._ended = self._has_run = False
        recorder.record_start(self._parameter_parts())

    def choose_kind(self, script_kind: Literal["ddp", "fsdp"]) -> Literal["ddp", "fsdp"]:
        """The parallelism: that of the proof, else that of the script."""
        proof_kind = self._recorder.parallel
        return "ddp" if proof_kind == "ddp" else "fsdp" if proof_kind == "fsdp" else script_kind

    def after_parallelize(self, kind: str) -> None:
        """The model is distributed: training follows."""
        modules = list(self._model.named_modules())
        norms = [name for name, part in modules if type(part) in _BATCH_NORMS]
        drops = [name for name, part in modules if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0]
        self._recorder.model(kind, norms, drops)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        atexit.register(self.end)

    def end(self) -> None:
        """Record the final parameters, once."""
        if not self._ended:
            self._ended = True
            self._recorder.record_end(self._parameter_parts())

    def _forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if model.training and torch.is_grad_enabled():
            if self._recorder.complete:
                self._recorder.stopped_early = True
                for sampler in _SAMPLERS:  # training would go on, with an order that nothing ever changed
                    if sampler.shuffle and not getattr(sampler, _EPOCHS)[0]:
                        self._recorder.repeated_order(type(sampler).__name__)
                raise SystemExit(0)  # every rank has taken equally many steps
            if not self._has_run:
                self._has_run = True
                self._recorder.random(_random_state())
            self._recorder.add_samples(digests((args, kwargs)))
        return _cast(args, self._dtype), _cast(kwargs, self._dtype)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None:
            optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if not any(id(parameter) in optimized for parameter in self._model.parameters()):
                return
            self._optimizer = optimizer
        if optimizer is self._optimizer:
            whole_sum, sharded_sum = self._sum_squared_gradients()
            self._recorder.step(float(optimizer.param_groups[0]["lr"]), whole_sum, sharded_sum)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._optimizer and self._recorder.complete:
            self.end()

    def _sum_squared_gradients(self) -> tuple[float, float]:
        """The sums of squared gradients: of those that this rank has whole, and of its shards of the others."""
        sums = {False: 0.0, True: 0.0}
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                local, sharded = _local(parameter.grad)
                sums[sharded] += float(local.double().square().sum())
        return sums[False], sums[True]

    def _parameter_parts(self) -> Iterator[ParameterPart]:
        for name, parameter in self._model.named_parameters():
            local, sharded = _local(parameter)
            plain = name.replace("_checkpoint_wrapped_module.", "")
            yield ParameterPart(plain, sharded, _bytes(local.to(self._dtype)))


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Layers that depend on the rank's other samples. SyncBatchNorm uses those of all ranks, as it should."""


def watch_model(model: nn.Module, environ: Mapping[str, str] = os.environ) -> ModelWatch | None:
    """Watch a model before it is distributed; None if this is not a proof."""
    recorder = proof_recorder(environ)
    return ModelWatch(recorder, model) if recorder is not None else None


_EPOCHS = "_shoal_epochs"
_SAMPLERS: list[DistributedSampler[Any]] = []
"""Those that this process has read from."""


def _watch_samplers() -> None:
    """Note which epochs samplers are set to: without set_epoch() they shuffle every epoch alike."""
    _SAMPLERS.clear()
    if getattr(DistributedSampler, _EPOCHS, None) is not None:
        return
    iterate, set_epoch = DistributedSampler.__iter__, DistributedSampler.set_epoch
    setattr(DistributedSampler, _EPOCHS, (False, ()))  # whether set_epoch() was called, and the epochs that were read

    def watched_iter(self: DistributedSampler[Any]) -> Iterator[Any]:
        was_set, epochs = getattr(self, _EPOCHS)
        recorder = proof_recorder()
        if self.shuffle and self.epoch in epochs and recorder is not None:
            recorder.repeated_order(type(self).__name__)
        setattr(self, _EPOCHS, (was_set, (*epochs, self.epoch)))
        if not any(sampler is self for sampler in _SAMPLERS):
            _SAMPLERS.append(self)
        order: Iterator[Any] = iterate(self)
        return order

    def watched_set_epoch(self: DistributedSampler[Any], epoch: int) -> None:
        setattr(self, _EPOCHS, (True, getattr(self, _EPOCHS)[1]))
        set_epoch(self, epoch)

    DistributedSampler.__iter__ = watched_iter
    DistributedSampler.set_epoch = watched_set_epoch


def _random_state() -> str:
    """A digest of the state of torch's generators: ranks with equal ones draw the same numbers."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return hashlib.blake2b(b"".join(map(_bytes, states)), digest_size=8).hexdigest()


def digests(value: Any) -> list[str]:
    """A digest of each sample of a batch, from its first tensor. Empty without a tensor."""
    batch = next(_tensors(value), None)
    if batch is None or batch.dim() == 0:
        return []
    rows = batch.detach().cpu()
    return [hashlib.blake2b(_bytes(row), digest_size=6).hexdigest() for row in rows]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
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
    # By attribute: DTensor's module takes long to import.
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        return tensor.detach().to_local(), any(placement.is_shard() for placement in placements)
    return tensor.detach(), False


def _bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor. Not by way of numpy, which need not be there."""
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""
