"""What a screen prints without a terminal."""

from collections.abc import Callable
from io import StringIO
from typing import Any

from rich.console import Console


def screen_text(show: Callable[..., object], *values: Any, width: int = 200, **options: Any) -> str:
    out = StringIO()
    show(Console(file=out, width=width), *values, **options)
    return out.getvalue()
