"""The scene of most tests: a cluster that rents from a simulated Lambda."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.cloud.scene import Scene, scene


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Scene]:
    async with scene(tmp_path, "lambda") as made:
        yield made
