"""What most tests of renting need."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.unit.cloud.scene import Scene, scene

from shoal.cloud.service.ledger import Ledger


@pytest.fixture
async def it(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    """A cluster that rents from a simulated Lambda, or as `with_scene` says."""
    kinds, options = getattr(request, "param", (("lambda",), {}))
    async with scene(tmp_path, *kinds, **options) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "elastic" / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger.open(path) as made:
        yield made
