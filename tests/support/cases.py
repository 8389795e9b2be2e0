"""A table of cases for a test: `@cases("text, value", ("1,5", 1.5), ("a", None))`; and cases in a file."""

import re
from pathlib import Path
from typing import Any

import pytest


def cases(names: str, *values: Any, **options: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(names, values, **options)


def read_cases(path: Path, **bases: str) -> dict[str, tuple[str, list[str]]]:
    """The cases of a file: `==== NAME`, a text whose first line may be `BASE +`, and `=>` before all that is expected.

    What follows up to the next name is a comment.
    """
    found = {}
    for block in re.split(r"^==== ", path.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = block.partition("\n")
        text, *expected = re.split(r"^=> ", body, flags=re.MULTILINE)
        base, _, rest = text.partition(" +\n")
        found[title] = (bases[base] + rest if base in bases else text, [line.partition("\n")[0] for line in expected])
    return found
