"""Distributes a model over the ranks: replicated (DDP) or sharded (FSDP2), with the usual options in one call.

FSDP gathers, checkpointing recomputes and compile compiles the model's *blocks*, one at a time: the members of its
outermost ModuleLists and Sequentials that hold parameters. In a transformer these are the layers.
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
from shoal.train.proof_watch import watch_model

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
    """The model on this rank's device, as DDP or FSDP. Create the optimizer from the returned model.

    `mixed_precision` computes in the named precision and keeps parameters and reduced gradients in their own.
    `compile` may name a backend of torch.compile. Raises ParallelError if the model does not allow it.
    """
    if kind not in ("ddp", "fsdp"):
        raise ParallelError(f"parallelize knows 'ddp' and 'fsdp', not {kind!r}")
    if mixed_precision is not None and mixed_precision not in _PRECISIONS:
        raise ParallelError(f"mixed_precision is {mixed_precision!r}", fix="use 'bf16', 'fp16' or None")
    if not (dist.is_available() and dist.is_initialized()):
        raise ParallelError(
            f"cannot use {kind}: torch.distributed is not initialized", fix="call shoal.train.init() first"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ParallelError(f"cannot use {kind}: no parameter of the model requires a gradient")
    target = _device(device)
    proof = watch_model(model)  # None unless `shoal prove` runs the script
    if proof is not None:
        kind, mixed_precision, compile = proof.choose_kind(kind), None, False
    precision = _PRECISIONS[mixed_precision] if mixed_precision else None
    if activation_checkpointing:
        _recompute_blocks(model)
    parallel = _ddp(model, target, precision, compile) if kind == "ddp" else _fsdp(model, target, precision, compile)
    if proof is not None:
        proof.after_parallelize(kind)
    return parallel


def _device(device: torch.device | str | None) -> torch.device:
    """The given device; else the GPU of this rank, chosen by init(); else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _ddp(model: nn.Module, device: torch.device, precision: torch.dtype | None, compile: bool | str) -> nn.Module:
    model.to(device)
    if precision is not None:
        model.forward = torch.autocast(device.type, dtype=precision)(model.forward)
    parallel: nn.Module = DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    if dist.get_world_size() > 2:
        _fix_bucket_order(parallel, model)
    if compile:
        parallel.compile(**_backend(compile))
    return parallel


def _fix_bucket_order(parallel: nn.Module, model: nn.Module) -> None:
    """Run one backward pass of zeros before training, so that DDP's buckets have their final order.

    After the first pass DDP rearranges its buckets in the order in which gradients arrived, and more than two ranks
    then sum in another order: the first step of a resumed run would differ in the last bits.
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
    # Moved to the device before sharding: rank 0's values are then sent to all ranks, whatever their seeds.
    model.to(device)
    _broadcast_from_rank_zero(model)
    wrapped = list(blocks(model))
    for block in wrapped:
        if compile:
            block.compile(**_backend(compile))
        fully_shard(block, mesh=mesh, **options)
    if compile and not wrapped:
        model.compile(**_backend(compile))
    fully_shard(model, mesh=mesh, **options)
    return model


def _broadcast_from_rank_zero(model: nn.Module) -> None:
    """Send rank 0's parameters and buffers to every rank, as DDP does: FSDP would mix shards of different models."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, src=0)


def _backend(compile: bool | str) -> dict[str, str]:
    return {"backend": compile} if isinstance(compile, str) else {}


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The modules to gather, recompute and compile one at a time."""
    owners = Counter(parameter for part in _candidate_blocks(model) for parameter in set(part.parameters()))
    for part in _candidate_blocks(model):
        # A parameter shared with another block (tied weights) must stay with the root module.
        if all(owners[parameter] == 1 for parameter in part.parameters()):
            yield part


def _candidate_blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children() if not isinstance(module, nn.ModuleList | nn.Sequential) else (module,):
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (part for part in child if any(True for _ in part.parameters()))
        else:
            yield from _candidate_blocks(child)


def _recompute_blocks(model: nn.Module) -> None:
    """Recompute the activations of each block in the backward pass instead of storing them."""
    recomputed = set(blocks(model))
    if not recomputed:
        raise ParallelError(
            "activation_checkpointing needs blocks to recompute, but the model has none",
            fix="put its layers into an nn.ModuleList or nn.Sequential",
        )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in recomputed:
                setattr(parent, name, checkpoint_wrapper(child, checkpoint_impl=CheckpointImpl.NO_REENTRANT))
