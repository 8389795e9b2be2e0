"""The hosts of a spec that was read before, so that commands about jobs need not read it again.

Reading a spec, and loading all that it takes, is half of what such a command does until its first connection. What is
kept is a file for each spec, in the directory of the host keys, readable by its owner. It counts while the text and
Shoal itself are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import shoal
from shoal.spec import member as member_module
from shoal.spec.member import Member, Shape


@dataclass(frozen=True)
class Recalled:
    """What is known of a spec without reading it."""

    cluster: str
    members: tuple[Member, ...]
    shares: bool = False
    """It has storage that its hosts share."""


def recall(directory: Path, name: str, text: str) -> Recalled | None:
    """What was kept of the spec of that name when its text was this; None where it is to be read."""
    try:
        kept = json.loads(_place(directory, name).read_text(encoding="utf-8"))
        if kept["of"] == _of(text):
            return Recalled(kept["cluster"], tuple(_member(values) for values in kept["members"]), kept["shares"])
    except (OSError, ValueError, TypeError, KeyError):
        pass  # none yet, or one that somebody else wrote
    return None


def keep(directory: Path, name: str, text: str, known: Recalled) -> None:
    """Keep this of a spec that was found good. Where that is not possible, it is read the next time."""
    members = [_values(member) for member in known.members]
    values = {"of": _of(text), "cluster": known.cluster, "members": members, "shares": known.shares}
    place = _place(directory, name)
    fresh = place.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(values, file)
        fresh.replace(place)


def _place(directory: Path, name: str) -> Path:
    return directory / f"hosts-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def _of(text: str) -> str:
    """The text, and the Shoal that reads it: while one works on it, its files change and its version does not."""
    code = Path(member_module.__file__).parent
    stamps = sorted(f"{entry.name} {entry.stat().st_mtime_ns}" for entry in os.scandir(code) if entry.is_file())
    return hashlib.sha256("\0".join([shoal.__version__, *stamps, text]).encode()).hexdigest()


def _values(member: Member) -> dict[str, object]:
    identity = str(member.identity) if member.identity else None
    return {**asdict(member), "roles": sorted(member.roles), "identity": identity}


def _member(values: dict[str, Any]) -> Member:
    typed = {
        "identity": Path(values["identity"]) if values["identity"] else None,
        "shape": Shape(**values["shape"]),
        "roles": frozenset(values["roles"]),
        "features": tuple(values["features"]),
    }
    return Member(**{**values, **typed})
