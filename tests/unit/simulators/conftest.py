"""A simulated cloud, and requests to it."""

from collections.abc import AsyncIterator

import httpx
import pytest
from tests.contract.rental_providers import CASES, Trial, trial


@pytest.fixture
async def it(request: pytest.FixtureRequest) -> AsyncIterator[Trial]:
    """The one of the file's `KIND`, with its rate limits."""
    async with trial(CASES[request.module.KIND], limited=True) as made:
        yield made


@pytest.fixture
async def client(it: Trial) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=it.url, headers={"Authorization": "Bearer k"}) as made:
        yield made
