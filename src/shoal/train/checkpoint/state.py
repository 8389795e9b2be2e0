"""The content of a checkpoint, captured from the live objects and applied to them.

Names are those of the plain model, without `module.`, `_orig_mod.` and other prefixes of wrappers, so that a checkpoint
written under DDP loads under FSDP, compiled or not, at another world size. The flat state dict is

    model/<name>               parameters; sharded ones as DTensors, of which each rank writes its part
    optimizer/<name>/<key>     the optimizer's tensors, each named after its parameter
    buffers/<rank>/<name>      buffers, which FSDP leaves different on every rank (DDP does not: rank 0's only)
    common                     scheduler, optimizer groups, run id and the rest that is the same everywhere
    rank/<rank>                random number generators and data position of one rank
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.nn.parallel import DistributedDataParallel

from shoal.train.checkpoint.safe_values import decode, encode
from shoal.train.errors import CheckpointError

_ADDED_BY_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")


class Stateful(Protocol):
    """Anything whose position or value can be saved: a scheduler, a loader, a GradScaler."""

    def state_dict(self) -> Any:
        """What to keep."""

    def load_state_dict(self, state: Any) -> Any:
        """Go back to what was kept."""


@dataclass
class TrainState:
    """Everything a run needs to continue exactly. The step is the Checkpointer's."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Stateful | None = None
    data: Stateful | None = None
    """The position in the data: of this rank, or the same on all ranks."""
    run_id: str = ""
    """Identifies the run over all its requeues. Restoring sets it to that of the checkpoint."""
    others: Mapping[str, Stateful] = field(default_factory=dict)
    """Further objects that are the same on every rank, by name."""


def capture_state(state: TrainState, rank: int) -> dict[str, Any]:
    """The flat state dict of this rank. Tensors in it are the live ones, not copies."""
    flat: dict[str, Any] = dict(_parameters(state.model, "model/"))
    flat |= _buffers(state.model, rank) if rank == 0 or not _shares_buffers(state.model) else {}
    common: dict[str, Any] = {
        "run_id": state.run_id,
        "extra_state": _extra_state(state.model),
        "others": {name: other.state_dict() for name, other in state.others.items()},
    }
    if state.scheduler is not None:
        common["scheduler"] = state.scheduler.state_dict()
    if state.optimizer is not None:
        tensors, common["optimizer"] = _optimizer_state(state.model, state.optimizer)
        flat |= tensors
    of_rank: dict[str, Any] = {"rng": _rng_states()}
    if state.data is not None:
        of_rank["data"] = state.data.state_dict()
    flat["common"] = encode(common, "state")
    flat[f"rank/{rank}"] = encode(of_rank, "state")
    return flat


def allocate_state(state: TrainState, metadata: Metadata, rank: int, world_size: int, saved_by: int) -> dict[str, Any]:
    """The state dict to load into: the live tensors, and allocated memory for the rest.

    CheckpointError if the checkpoint is of another model.
    """
    saved = metadata.state_dict_metadata
    flat: dict[str, Any] = dict(_parameters(state.model, "model/"))
    _check_same_tensors(flat, {name: meta for name, meta in saved.items() if name.startswith("model/")})
    saved_rank = rank if f"rank/{rank}" in saved and world_size == saved_by else 0
    of_source = f"buffers/{saved_rank if any(name.startswith(f'buffers/{saved_rank}/') for name in saved) else 0}/"
    buffers = {name.replace("buffers/0/", of_source): value for name, value in _buffers(state.model, 0).items()}
    _check_same_tensors(buffers, {name: meta for name, meta in saved.items() if name.startswith(of_source)})
    flat |= buffers
    if state.optimizer is not None:
        flat |= _allocate_optimizer(state.model, saved)
    flat["common"] = b""
    # At another world size every rank reads all of them: the data positions must agree.
    ranks = [rank] if world_size == saved_by else range(saved_by)
    return flat | {f"rank/{r}": b"" for r in ranks}


def apply_state(state: TrainState, flat: Mapping[str, Any], rank: int, world_size: int, saved_by: int) -> None:
    """Apply the loaded values to the objects. Parameters and buffers were loaded in place."""
    common = decode(flat["common"])
    state.run_id = common["run_id"]
    if common["extra_state"]:
        wrapped = {_plain_name(name): name for name in _unwrap(state.model).state_dict()}
        extra = {wrapped[name]: value for name, value in common["extra_state"].items() if name in wrapped}
        _unwrap(state.model).load_state_dict(extra, strict=False)
    if state.optimizer is not None:
        _load_optimizer(state.model, state.optimizer, flat, _require(common, "optimizer"))
    if state.scheduler is not None:
        state.scheduler.load_state_dict(_require(common, "scheduler"))
    for name, other in state.others.items():
        other.load_state_dict(_require(common["others"], name))
    by_rank = {name: decode(value) for name, value in flat.items() if name.startswith("rank/")}
    if state.data is not None:
        state.data.load_state_dict(_data_position(by_rank, rank, world_size, saved_by))
    # Last, since loading may draw random numbers. A rank without a saved state keeps its own.
    if f"rank/{rank}" in by_rank:
        _set_rng_states(by_rank[f"rank/{rank}"]["rng"])


def _require(mapping: Mapping[str, Any], name: str) -> Any:
    if name not in mapping:
        raise CheckpointError(
            f"cannot restore the {name}: the checkpoint has none",
            found=", ".join(sorted(mapping)) or "nothing of its kind",
            fix="train with the same parts as the run that wrote it, or start in another checkpoint directory",
        )
    return mapping[name]


def _data_position(by_rank: Mapping[str, Any], rank: int, world_size: int, saved_by: int) -> Any:
    positions = [_require(of_rank, "data") for of_rank in by_rank.values()]
    if world_size == saved_by:  # only the one of this rank was loaded
        return positions[0]
    if not all(_equal(position, positions[0]) for position in positions):
        raise CheckpointError(
            f"cannot restore the data position of {saved_by} ranks on {world_size}",
            found="each rank saved its own position",
            fix="use a loader whose position is that of the whole run (shoal.train.data), "
            f"or resume with {saved_by} ranks",
        )
    return positions[0]


def _equal(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except (RuntimeError, ValueError):  # tensors and arrays compare element by element
        return encode(first, "") == encode(second, "")


# Model


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP and torch.compile."""
    model = _unwrap_compiled(model)
    return _unwrap_compiled(model.module) if isinstance(model, DistributedDataParallel) else model


def _unwrap_compiled(model: torch.nn.Module) -> torch.nn.Module:
    # By attribute: the class is in torch._dynamo, which takes most of a second to import.
    inside = getattr(model, "_orig_mod", None)
    return inside if isinstance(inside, torch.nn.Module) else model


def _plain_name(name: str) -> str:
    return _ADDED_BY_WRAPPERS.sub("", name)


def _parameters(model: torch.nn.Module, prefix: str) -> Iterable[tuple[str, torch.Tensor]]:
    return ((prefix + _plain_name(name), parameter.detach()) for name, parameter in _unwrap(model).named_parameters())


def _buffers(model: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
    parameters = {_plain_name(name) for name, _ in _unwrap(model).named_parameters(remove_duplicate=False)}
    return {
        f"buffers/{rank}/{_plain_name(name)}": value.detach()
        for name, value in _unwrap(model).state_dict().items()
        if isinstance(value, torch.Tensor) and _plain_name(name) not in parameters
    }


def _shares_buffers(model: torch.nn.Module) -> bool:
    """Whether DDP sends rank 0's buffers to the other ranks before each forward pass."""
    model = _unwrap_compiled(model)
    return isinstance(model, DistributedDataParallel) and bool(model.broadcast_buffers)


def _extra_state(model: torch.nn.Module) -> dict[str, Any]:
    values = _unwrap(model).state_dict().items()
    return {_plain_name(name): value for name, value in values if not isinstance(value, torch.Tensor)}


def _check_same_tensors(live: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint is of another model, with the tensors that differ."""
    differences = [f"{name}: not in the checkpoint" for name in live if name not in saved]
    differences += [f"{name}: only in the checkpoint" for name in saved if name not in live]
    for name in live.keys() & saved.keys():
        live_shape, saved_shape = tuple(live[name].shape), tuple(getattr(saved[name], "size", ()))
        if live_shape != saved_shape:
            differences.append(f"{name}: {list(saved_shape)} in the checkpoint, {list(live_shape)} in the model")
    if differences:
        listed = sorted(differences)[:5]
        more = f"\nand {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(
            "the checkpoint is of another model",
            found="\n".join(listed) + more,
            fix="train the model that wrote it, or start in another checkpoint directory",
        )


# Optimizer


def _parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    names = {parameter: _plain_name(name) for name, parameter in _unwrap(model).named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    "the optimizer has a parameter that is not in the model",
                    found=f"a tensor of shape {list(parameter.shape)}",
                    fix="make the optimizer after parallelize(), from its model's parameters()",
                )
    return names


def _optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The optimizer's tensors by parameter name; and its groups and other values.

    Not torch's get_optimizer_state_dict: before the first step it takes an extra one, and the run then differs from one
    that was never saved.
    """
    names = _parameter_names(model, optimizer)
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer/{names[parameter]}/{key}"] = value.detach()
            else:
                rest.setdefault(names[parameter], {})[key] = value
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return tensors, {"groups": groups, "rest": rest}


def _allocate_optimizer(model: torch.nn.Module, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    parameters = {_plain_name(name): parameter.detach() for name, parameter in _unwrap(model).named_parameters()}
    room: dict[str, torch.Tensor] = {}
    for name, meta in saved.items():
        if not name.startswith("optimizer/") or not isinstance(meta, TensorStorageMetadata):
            continue
        parameter = parameters.get(name.split("/")[1])
        if parameter is None:
            continue  # frozen or removed since; apply_state compares the groups
        if meta.size == parameter.shape and meta.size:
            # Shaped like its parameter, so sharded like it.
            room[name] = torch.zeros_like(parameter, dtype=meta.properties.dtype)
        else:
            room[name] = torch.zeros(meta.size, dtype=meta.properties.dtype)
    return room


def _load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, flat: Mapping[str, Any], saved: Mapping[str, Any]
) -> None:
    names = _parameter_names(model, optimizer)
    live = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if live != [group["params"] for group in saved["groups"]]:
        raise CheckpointError(
            "the optimizer's parameter groups differ from those in the checkpoint",
            found=f"{[len(g) for g in live]} parameters in its groups, "
            f"{[len(g['params']) for g in saved['groups']]} in the checkpoint's, or another order",
            fix="build the optimizer as the run that wrote the checkpoint did",
        )
    number = {name: index for index, name in enumerate(name for group in live for name in group)}
    entries: dict[int, dict[str, Any]] = {number[name]: dict(values) for name, values in saved["rest"].items()}
    for name, value in flat.items():
        if name.startswith("optimizer/"):
            _, parameter, key = name.split("/")
            entries.setdefault(number[parameter], {})[key] = value
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in saved["groups"]]
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


# Random number generators


def _rng_states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()  # of the one GPU this rank works on
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def _set_rng_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
