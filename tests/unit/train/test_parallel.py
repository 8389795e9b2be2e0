"""DDP and FSDP train the same model, with every option, and reject impossible ones."""

from typing import Any

import pytest
import torch
from tests.support.cases import cases
from tests.unit.train.procs import ranks
from tests.unit.train.training import Net
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoal.train.errors import ParallelError
from shoal.train.parallel import blocks, parallelize


class Plain(nn.Module):
    """No dropout and no batch norm: its gradients do not depend on how the batch is split."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.leave = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def _steps(model: nn.Module, x: torch.Tensor, y: torch.Tensor, count: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(count):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def _parallel_parameters(rank: int, kind: str, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(rank)  # ranks that start apart must be brought together
    model = parallelize(Plain().double(), kind, **options)  # type: ignore[arg-type]
    assert isinstance(model, DistributedDataParallel if kind == "ddp" else FSDPModule)
    x, y = _batch()
    _steps(model, x[rank * 4 : rank * 4 + 4], y[rank * 4 : rank * 4 + 4])
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


@cases("kind", "ddp", "fsdp")
@cases("options", {}, {"activation_checkpointing": True, "compile": "eager"})
def test_two_ranks_reach_the_parameters_of_a_single_process(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    alone = Plain().double()
    _steps(alone, *_batch())
    for parameters in ranks(2, _parallel_parameters, kind, options):
        for ours, theirs in zip(alone.parameters(), parameters, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-14)


def _layout(rank: int) -> Any:
    model = parallelize(Net(), "fsdp")
    local = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    return local, sum(p.numel() for p in model.parameters()), [isinstance(b, FSDPModule) for b in model.blocks]


def test_fsdp_shards_each_block_over_the_ranks() -> None:
    (first, whole, wrapped), (second, _, _) = ranks(2, _layout)
    assert wrapped == [True, True] and first + second == whole and 0.4 < first / whole < 0.6


def _precision(rank: int, kind: str) -> Any:
    seen: list[torch.dtype] = []
    plain = Plain()
    plain.blocks[1][0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model = parallelize(plain, kind, mixed_precision="bf16")  # type: ignore[arg-type]
    loss = model(torch.randn(2, 5)).float().sum()
    loss.backward()
    return seen[0], {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()}


@cases("kind", "ddp", "fsdp")
def test_mixed_precision_computes_in_bf16_and_keeps_float32_parameters(kind: str) -> None:
    for computed, parameters, gradients in ranks(2, _precision, kind):
        assert computed == torch.bfloat16 and parameters == gradients == {torch.float32}


def test_blocks_are_members_of_the_outermost_lists_without_shared_parameters() -> None:
    net = Net()
    assert list(blocks(net)) == list(net.blocks)
    row = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert list(blocks(row)) == [row[0], row[2]]
    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    tied[2].weight = tied[0].weight
    assert list(blocks(tied)) == [tied[1]] and list(blocks(nn.Linear(2, 2))) == []


def test_parallelize_before_init_names_the_missing_call() -> None:
    with pytest.raises(ParallelError, match=r"not initialized\n  fix: call shoal.train.init\(\) first"):
        parallelize(Net(), "ddp")


def test_unknown_kind_and_precision_are_named() -> None:
    with pytest.raises(ParallelError, match="knows 'ddp' and 'fsdp', not 'zero'"):
        parallelize(Net(), "zero")  # type: ignore[arg-type]
    with pytest.raises(ParallelError, match="mixed_precision is 'int3'"):
        parallelize(Net(), "ddp", mixed_precision="int3")  # type: ignore[arg-type]


def _refusals(rank: int) -> list[str]:
    said, frozen = [], Net().requires_grad_(False)
    for model, options in ((frozen, {}), (nn.Linear(2, 2), {"activation_checkpointing": True})):
        try:
            parallelize(model, "fsdp", **options)
        except ParallelError as error:
            said.append(str(error))
    return said


def test_model_without_trainable_parameters_or_blocks_is_rejected() -> None:
    (said,) = ranks(1, _refusals)
    assert "no parameter of the model requires a gradient" in said[0]
    assert "activation_checkpointing needs blocks to recompute, but the model has none" in said[1]
