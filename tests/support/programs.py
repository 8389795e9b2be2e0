"""Programs that stand in for others."""

from pathlib import Path


def stand_in(path: Path, script: str) -> Path:
    """A shell script that can be executed, in a directory that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path
