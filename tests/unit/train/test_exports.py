"""The public names of the training library: all there, each from its home, and none read before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import shoal.train


@pytest.mark.parametrize("name", shoal.train.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(shoal.train, name).__name__ == name


def test_there_is_no_other_name() -> None:
    with pytest.raises(AttributeError, match=r"module 'shoal\.train' has no attribute 'Lodaer'"):
        shoal.train.Lodaer  # noqa: B018
    assert dir(shoal.train) == sorted(shoal.train.__all__)


def test_what_needs_no_torch_does_not_wait_for_it() -> None:
    program = "import sys; from shoal.train import Progress, read_env, tracker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
