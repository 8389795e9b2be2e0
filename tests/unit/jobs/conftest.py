"""What tests of jobs begin with."""

from pathlib import Path

import pytest


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A working tree with one script."""
    (tmp_path / "train.py").write_text("print(1)\n")
    return tmp_path
