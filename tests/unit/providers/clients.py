"""A client of an API without a provider, for what all providers share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shoal.cloud.providers.api import ProviderLogin
from shoal.cloud.providers.http import ApiClient
from shoal.cloud.providers.responses import ApiError

KEY = "sk-very-secret"


@asynccontextmanager
async def client_of(url: str, key: str = KEY, timeout: str = "60", **more: Any) -> AsyncIterator[ApiClient]:
    api = ApiClient(ProviderLogin("acme", "example", key, settings={"timeout": timeout}), url, **more)
    try:
        yield api
    finally:
        await api.close()


async def failure_of(
    url: str, method: str = "GET", *, creates: bool = False, timeout: str = "60", **more: Any
) -> ApiError:
    """The error that a request leads to."""
    async with client_of(url, timeout=timeout, **more) as api:
        with pytest.raises(ApiError) as caught:
            await api.request(method, "/machines", creates=creates)
    return caught.value
