"""Training data: tar shards and LMDB in one global order, every sample exactly once, resumable anywhere.

`Loader` feeds a rank from any map-style dataset; `ShardDataset` and `LmdbDataset` are two. See `order.py` first.
"""

from .errors import DataError
from .index import build_index
from .lmdb import LmdbDataset
from .loader import Loader
from .order import Order
from .staging import stage
from .tar import ShardDataset, write_shards

__all__ = ["DataError", "LmdbDataset", "Loader", "Order", "ShardDataset", "build_index", "stage", "write_shards"]
