"""What most tests of GPUs need."""

from pathlib import Path

import pytest
from tests import nvml


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated NVML."""
    return nvml.build(tmp_path_factory.mktemp("nvml"))
