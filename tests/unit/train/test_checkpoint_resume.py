"""A resumed run equals one that was never interrupted, and loads at another world size."""

from pathlib import Path
from typing import Any

import torch
from tests.support.cases import cases
from tests.unit.train.procs import ranks
from tests.unit.train.training import Position, build, digest, full_parameters, train_step
from torch import nn

from shoal.train.checkpoint import Checkpointer, TrainState
from shoal.train.parallel import parallelize


def _uninterrupted(rank: int, kind: str, optimizer: str, steps: int) -> tuple[list[str], str]:
    state = build(kind, optimizer=optimizer)
    return [train_step(state) for _ in range(steps)], digest(state)


def _save_and_go_on(rank: int, directory: str, kind: str, optimizer: str, at: int, asynchronous: bool) -> Any:
    state = build(kind, optimizer=optimizer)
    losses = [train_step(state) for _ in range(at)]
    checkpointer = Checkpointer(directory, asynchronous=asynchronous)
    checkpointer.save(at, state)
    losses += [train_step(state) for _ in range(6 - at)]
    assert checkpointer.wait().committed, checkpointer.last
    checkpointer.close()
    return losses, digest(state)


def _resume(rank: int, directory: str, kind: str, optimizer: str) -> Any:
    state = build(kind, seed=77, optimizer=optimizer)  # another start: everything must come from the checkpoint
    state.run_id = ""
    step = Checkpointer(directory).restore(state)
    losses = [train_step(state) for _ in range(6 - step)]
    return step, state.run_id, losses, digest(state)


@cases(
    "kind, optimizer, at, asynchronous",
    ("ddp", "adamw", 3, False),
    ("ddp", "sgd", 0, True),  # before the first step the optimizer has no state, and must not be given any
    ("fsdp", "adamw", 3, True),
    ("fsdp", "sgd", 0, False),
)
def test_resumed_run_equals_an_uninterrupted_run(
    tmp_path: Path, kind: str, optimizer: str, at: int, asynchronous: bool
) -> None:
    plain = ranks(2, _uninterrupted, kind, optimizer, 6)
    saved = ranks(2, _save_and_go_on, str(tmp_path), kind, optimizer, at, asynchronous)
    resumed = ranks(2, _resume, str(tmp_path), kind, optimizer)
    for rank in range(2):
        losses, final = plain[rank]
        assert saved[rank] == (losses, final) and resumed[rank] == (at, "run-1", losses[at:], final)
    assert plain[0][0] != plain[1][0]  # the ranks see different data, or the test proves little


class _OutOfOrder(nn.Module):
    """Uses its layers in another order than it defines them, so that DDP would rearrange its buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.leave, self.enter, self.middle = nn.Linear(32, 1), nn.Linear(4, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.middle(torch.tanh(self.enter(x)))))


def _out_of_order(rank: int, directory: str, resume: bool) -> Any:
    torch.manual_seed(0)
    model = parallelize(_OutOfOrder(), "ddp")
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), Position())
    checkpointer = Checkpointer(directory)
    first = checkpointer.restore(state) if resume else 0
    for step in range(first, 5):
        if step == 2 and not resume:
            assert checkpointer.save(2, state).committed
        train_step(state)
    return digest(state)


def test_sums_over_more_than_two_ranks_keep_their_order_after_a_resume(tmp_path: Path) -> None:
    assert ranks(4, _out_of_order, str(tmp_path), False) == ranks(4, _out_of_order, str(tmp_path), True)


def _write(rank: int, directory: str, kind: str) -> dict[str, torch.Tensor]:
    state = build(kind)
    for _ in range(2):
        train_step(state)
    assert Checkpointer(directory).save(2, state).committed
    return full_parameters(state)


def _read(rank: int, directory: str, kind: str) -> Any:
    state = build(kind, seed=77)
    step, parameters = Checkpointer(directory).restore(state), full_parameters(state)
    momenta = sorted(float(_whole(v["exp_avg"]).abs().sum()) for v in state.optimizer.state.values())
    assert min(momenta) > 0
    train_step(state)
    return step, state.data.at, parameters, momenta


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@cases(
    "before, after",
    (("ddp", 2), ("ddp", 1)),
    (("ddp", 1), ("fsdp", 2)),
    (("fsdp", 2), ("fsdp", 1)),
    (("fsdp", 1), ("ddp", 2)),
)
def test_checkpoint_loads_at_another_world_size_and_parallelism(
    tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    written = ranks(before[1], _write, str(tmp_path), before[0])[0]
    momenta = []
    for step, position, parameters, of_rank in ranks(after[1], _read, str(tmp_path), after[0]):
        assert (step, position) == (2, 3) and parameters.keys() == written.keys()
        assert all(torch.equal(parameters[name], written[name]) for name in written)
        momenta.append(of_rank)
    assert all(of_rank == momenta[0] for of_rank in momenta)
