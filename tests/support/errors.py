"""The text of an error, for tests that compare the whole of it."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest


def error_text(kind: type[BaseException], call: Callable[..., object], *values: Any, **options: Any) -> str:
    """What the error says that the call raises."""
    with pytest.raises(kind) as caught:
        call(*values, **options)
    return str(caught.value)


async def error_of(kind: type[BaseException], work: Awaitable[object]) -> str:
    """What the error says that the work ends with."""
    with pytest.raises(kind) as caught:
        await work
    return str(caught.value)
