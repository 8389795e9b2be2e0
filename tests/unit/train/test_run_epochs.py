"""A loop over `Run.epochs` and `Run.batches`: the nested loop of most scripts, stopped and resumed at any batch."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.cases import cases
from torch import nn
from torch.utils.data import TensorDataset

from shoal.contract import EXIT_REQUEUE
from shoal.train.checkpoint import TrainState
from shoal.train.checkpoint import layout as files
from shoal.train.data import Loader
from shoal.train.errors import StopExit
from shoal.train.run import Run

EPOCHS, BATCHES = 3, 4


def _run(directory: Path, save_every: int = 0) -> Run:
    torch.manual_seed(0)
    model, inputs = nn.Linear(2, 1), torch.randn(30, 2)
    loader = Loader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), global_batch=8, seed=1)
    assert len(loader) == BATCHES
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Run(TrainState(model, optimizer, data=loader), directory, save_every=save_every, environ={})


def _train(run: Run, signal_after: int | None = None, said: Callable[[str], object] = print) -> list[str]:
    """The losses of a script with two loops; it gets a signal in the body of a step, and reports each epoch."""
    losses: list[str] = []
    assert run.state.optimizer is not None
    for epoch in run.epochs(EPOCHS):
        for x, y in run.batches():
            loss = nn.functional.mse_loss(run.state.model(x), y)
            run.state.optimizer.zero_grad()
            loss.backward()
            run.state.optimizer.step()
            losses.append(loss.item().hex())
            said(losses[-1])
            if len(losses) == signal_after:
                signal.raise_signal(signal.SIGUSR1)
        said(f"epoch {epoch}")
    return losses


@cases("steps", *range(1, EPOCHS * BATCHES))
def test_signal_at_any_step_loses_no_step_and_no_epoch_end(tmp_path: Path, steps: int) -> None:
    whole: list[str] = []
    _train(_run(tmp_path / "whole"), said=whole.append)
    cut: list[str] = []
    with pytest.raises(StopExit) as leaving:
        _train(_run(tmp_path / "cut"), steps, cut.append)
    assert (leaving.value.code, leaving.value.requeued) == (EXIT_REQUEUE, True)
    assert [path.name for path in files.committed(tmp_path / "cut")] == [f"step-{steps}"]
    _train(_run(tmp_path / "cut"), said=cut.append)
    assert cut == whole
    assert whole[BATCHES] == "epoch 0" and whole[-1] == "epoch 2" and len(whole) == EPOCHS * (BATCHES + 1)


def test_last_step_is_saved_once_and_a_second_start_does_nothing(tmp_path: Path) -> None:
    _train(_run(tmp_path, save_every=6))
    assert sorted(path.name for path in files.committed(tmp_path)) == ["step-12", "step-6"]
    assert _train(_run(tmp_path, save_every=6)) == []


def test_early_break_of_the_inner_loop_continues_with_the_next_epoch(tmp_path: Path) -> None:
    run, seen = _run(tmp_path), []
    for epoch in run.epochs(EPOCHS):
        for batch in run.batches():
            assert isinstance(run.state.data, Loader)
            seen.append((epoch, run.state.data.epoch, len(batch)))
            if epoch == 0:
                break
    assert seen == [(0, 0, 2)] + [(1, 1, 2)] * BATCHES + [(2, 2, 2)] * BATCHES


def test_data_without_epochs_is_rejected(tmp_path: Path) -> None:
    run = Run(TrainState(nn.Linear(1, 1)), tmp_path, environ={})
    with pytest.raises(TypeError, match=r"needs a shoal.train.Loader as TrainState.data, not None"):
        next(run.epochs(1))
