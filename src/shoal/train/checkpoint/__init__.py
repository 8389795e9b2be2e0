"""Checkpoints that are there whole or not at all, on torch.distributed.checkpoint. `files` shows what lies on disk."""

from shoal.train.checkpoint.checkpointer import Checkpointer
from shoal.train.checkpoint.outcome import SaveResult
from shoal.train.checkpoint.state import Stateful, TrainState

__all__ = ["Checkpointer", "SaveResult", "Stateful", "TrainState"]
