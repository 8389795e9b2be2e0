"""A client of a file's provider against its simulated cloud."""

from collections.abc import AsyncIterator

import pytest
from tests.contract.rental_providers import Trial, trial


@pytest.fixture
async def it(request: pytest.FixtureRequest) -> AsyncIterator[Trial]:
    """The provider is the file's `CASE`."""
    async with trial(request.module.CASE) as made:
        yield made
