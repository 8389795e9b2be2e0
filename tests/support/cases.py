"""A table of cases for a test: `@cases("text, value", ("1,5", 1.5), ("a", None))`."""

from typing import Any

import pytest


def cases(names: str, *values: Any, **options: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(names, values, **options)
