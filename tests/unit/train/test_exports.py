"""The public names of the training library: the whole list, and no import before the first use."""

import subprocess
import sys

import pytest
from tests.support.cases import cases

import shoal.train

PUBLIC = [
    *("LmdbDataset", "Loader", "Progress", "Run", "ShardDataset", "TrainError", "TrainState"),
    *("init", "parallelize", "shutdown", "spawn", "tracker", "worker_signals"),
]
"""What scripts may import from shoal.train. A new name here is documented in docs/training.md."""


def test_public_names_are_complete() -> None:
    assert shoal.train.__all__ == PUBLIC and dir(shoal.train) == sorted(PUBLIC)


@cases("name", *PUBLIC)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(shoal.train, name).__name__ == name


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'shoal\.train' has no attribute 'Lodaer'"):
        shoal.train.Lodaer  # noqa: B018


def test_parts_without_torch_do_not_import_torch() -> None:
    program = "import sys; from shoal.train import Progress, TrainError, tracker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
