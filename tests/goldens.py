"""Whole-file goldens: the entire text is compared. `UPDATE_GOLDEN=1` updates them; read the diff afterwards."""

import difflib
import os
from pathlib import Path

HERE = Path(__file__).parent / "golden"


def assert_golden(name: str, text: str, unlike: str = "") -> None:
    """With `unlike`, the golden has the lines that differ from that other golden, each group with its place in it."""
    if unlike:
        lines = difflib.unified_diff((HERE / unlike).read_text().splitlines(), text.splitlines(), n=0, lineterm="")
        text = "\n".join([f"unlike {unlike}:", *list(lines)[2:]]) + "\n"
    path = HERE / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing: run with UPDATE_GOLDEN=1 and read what it writes"
    assert text == path.read_text()
