"""Whole-file goldens: the entire text is compared. `UPDATE_GOLDEN=1` updates them; read the diff afterwards."""

import os
from pathlib import Path

HERE = Path(__file__).parent / "golden"


def assert_golden(name: str, text: str) -> None:
    path = HERE / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing: run with UPDATE_GOLDEN=1 and read what it writes"
    assert text == path.read_text()
