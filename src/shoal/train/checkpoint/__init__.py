"""Checkpoints that are complete or absent, on torch.distributed.checkpoint. `layout.py` documents the files.

May import torch, and from shoal.train dist, env, errors, file_io and proof_record.
"""

from shoal.train.checkpoint.checkpointer import Checkpointer
from shoal.train.checkpoint.state import Stateful, TrainState
from shoal.train.checkpoint.writer import SaveResult

__all__ = ["Checkpointer", "SaveResult", "Stateful", "TrainState"]
