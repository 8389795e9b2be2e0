"""The one error of the data package, a leaf of the training library's tree."""

from __future__ import annotations

from ..errors import TrainError


class DataError(TrainError):
    """The data cannot be read as asked."""
