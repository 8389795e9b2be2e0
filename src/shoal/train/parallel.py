"""Spreads a model over the ranks: replicated (DDP) or sharded (FSDP2), with the usual options in one call.

The model's *blocks* are what FSDP gathers, checkpointing recomputes and compile compiles, one at a time: the members of
its outermost ModuleLists and Sequentials that hold parameters. In a transformer these are the layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.train.errors import ParallelError
from shoal.train.proving import watch

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parallelize(
    model: nn.Module,
    kind: Literal["ddp", "fsdp"],
    *,
    mixed_precision: Literal["bf16", "fp16"] | None = None,
    activation_checkpointing: bool = False,
    compile: bool | str = False,
    device: torch.device | str | None = None,
) -> nn.Module:
    """The model on this rank's device, as DDP or FSDP. Make the optimizer from what this returns.

    `mixed_precision` keeps parameters and gradients' sums in their own precision and computes in the named one.
    `compile` may name a backend of torch.compile. ParallelError where it cannot be done as asked.
    """
    if kind not in ("ddp", "fsdp"):
        raise ParallelError(f"parallelize knows 'ddp' and 'fsdp', not {kind!r}")
    if mixed_precision is not None and mixed_precision not in _PRECISIONS:
        raise ParallelError(f"mixed_precision is {mixed_precision!r}", fix="use 'bf16', 'fp16' or None")
    if not (dist.is_available() and dist.is_initialized()):
        raise ParallelError(
            f"the model cannot be spread with {kind}: the ranks have not met", fix="call shoal.train.init() first"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ParallelError(f"the model cannot be spread with {kind}: none of its parameters is trained")
    place = _device(device)
    proof = watch(model)  # None unless `shoal prove` runs the script
    if proof is not None:
        kind, mixed_precision, compile = proof.kind(kind), None, False
    precision = _PRECISIONS[mixed_precision] if mixed_precision else None
    if activation_checkpointing:
        _recompute_blocks(model)
    parallel = _ddp(model, place, precision, compile) if kind == "ddp" else _fsdp(model, place, precision, compile)
    if proof is not None:
        proof.parallelized(kind)
    return parallel


def _device(asked: torch.device | str | None) -> torch.device:
    """The device asked for; else the GPU that init() bound this rank to; else the CPU."""
    if asked is not None:
        return torch.device(asked)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _ddp(model: nn.Module, device: torch.device, precision: torch.dtype | None, compile: bool | str) -> nn.Module:
    model.to(device)
    if precision is not None:
        model.forward = torch.autocast(device.type, dtype=precision)(model.forward)
    parallel: nn.Module = DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    if dist.get_world_size() > 2:
        _settle_buckets(parallel, model)
    if compile:
        parallel.compile(**_backend(compile))
    return parallel


def _settle_buckets(parallel: nn.Module, model: nn.Module) -> None:
    """One backward pass of zeros, before the training.

    After the first pass DDP rearranges its buckets in the order in which gradients came, and more than two ranks
    then sum in another order: the first step of a resumed run would differ from that of an uninterrupted one in the
    last bits. Here the first pass is always this one.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    forward = model.__dict__.get("forward")
    model.forward = lambda: sum(
        (parameter.sum() * 0 for parameter in trained), torch.zeros((), device=trained[0].device)
    )
    try:
        parallel().backward()
    finally:
        del model.forward
        if forward is not None:
            model.forward = forward
    for parameter in trained:
        parameter.grad = None


def _fsdp(model: nn.Module, device: torch.device, precision: torch.dtype | None, compile: bool | str) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32) if precision else None
    options: dict[str, Any] = {"mp_policy": policy} if policy else {}
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
    # Parameters go to the device before they are split: otherwise every rank must start from the same seed.
    model.to(device)
    _same_start(model)
    wrapped = list(blocks(model))
    for block in wrapped:
        if compile:
            block.compile(**_backend(compile))
        fully_shard(block, mesh=mesh, **options)
    if compile and not wrapped:
        model.compile(**_backend(compile))
    fully_shard(model, mesh=mesh, **options)
    return model


def _same_start(model: nn.Module) -> None:
    """Rank 0's parameters and buffers on every rank, as DDP does it: FSDP would join pieces of different models."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, src=0)


def _backend(compile: bool | str) -> dict[str, str]:
    return {"backend": compile} if isinstance(compile, str) else {}


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The parts of a model that are worth gathering, recomputing and compiling one at a time."""
    owners = Counter(parameter for part in _members(model) for parameter in set(part.parameters()))
    for part in _members(model):
        # A parameter shared with another block (tied weights) must stay with the root, which owns both uses.
        if all(owners[parameter] == 1 for parameter in part.parameters()):
            yield part


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children() if not isinstance(module, nn.ModuleList | nn.Sequential) else (module,):
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (part for part in child if any(True for _ in part.parameters()))
        else:
            yield from _members(child)


def _recompute_blocks(model: nn.Module) -> None:
    """Drop the activations inside each block and compute them again on the way back: memory for time."""
    chosen = set(blocks(model))
    if not chosen:
        raise ParallelError(
            "activation_checkpointing needs blocks to recompute, and the model has none",
            fix="hold its layers in an nn.ModuleList or nn.Sequential",
        )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in chosen:
                setattr(parent, name, checkpoint_wrapper(child, checkpoint_impl=CheckpointImpl.NO_REENTRANT))
