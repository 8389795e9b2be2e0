"""A uv that all tests of environments share: installing it takes seconds."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a host keeps its local environments."""
    return tmp_path_factory.mktemp("host") / "local"
