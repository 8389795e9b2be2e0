"""What a simulated cloud can be told to do wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal[
    "stockout", "quota", "rate", "error-after-create", "error-before-create", "slow-boot", "never-reachable", "dies",
    "preempt", "lagging-list", "duplicate-name", "price-change", "bad-gpu", "list-fails", "balance", "auth",
]  # fmt: skip
KINDS: tuple[str, ...] = get_args(Kind)
SECONDS = {"slow-boot": 600.0, "dies": 5.0, "preempt": 5.0, "lagging-list": 30.0}
"""How long, where a fault does not say: more until it is up, after it is up, after it is up, out of sight."""


@dataclass(frozen=True)
class Fault:
    """A misbehaviour that is wanted."""

    kind: str
    times: int = 1
    """So often; -1 is always."""
    type: str = ""
    region: str = ""
    seconds: float | None = None

    @property
    def after(self) -> float:
        return SECONDS.get(self.kind, 0.0) if self.seconds is None else self.seconds

    def concerns(self, type: str, place: Iterable[str]) -> bool:
        return self.type in ("", type) and (not self.region or self.region in set(place))


def read_faults(data: Any) -> list[Fault]:
    """Faults from JSON. Raises ValueError that says what is wrong with which of them."""
    if not isinstance(data, list):
        raise ValueError("faults are a list of objects")
    found = []
    for count, one in enumerate(data):
        unknown = set(one) - set(Fault.__dataclass_fields__) if isinstance(one, dict) else {"?"}
        if unknown or one.get("kind") not in KINDS:
            known = ", ".join(KINDS)
            raise ValueError(f"fault {count}: kind is one of {known}; beside it are times, type, region, seconds")
        if not isinstance(one.get("times", 1), int) or not isinstance(one.get("seconds", 0), int | float):
            raise ValueError(f"fault {count}: times is a whole number, -1 for always; seconds a number")
        found.append(Fault(**one))
    return found
