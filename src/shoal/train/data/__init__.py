"""Training data: tar shards and LMDB in one global order, each sample once an epoch, resumable at any batch.

`Loader` reads any map-style dataset; `ShardDataset` and `LmdbDataset` are two. `order.py` defines the order.
May import torch, lmdb, and from shoal.train errors, file_io and stop.
"""

from shoal.train.data.index import build_index
from shoal.train.data.lmdb import LmdbDataset
from shoal.train.data.loader import Loader
from shoal.train.data.order import SampleOrder
from shoal.train.data.staging import stage
from shoal.train.data.tar import ShardDataset, write_shards
from shoal.train.errors import DataError

__all__ = ["DataError", "LmdbDataset", "Loader", "SampleOrder", "ShardDataset", "build_index", "stage", "write_shards"]
