"""What machines cost and what is in them, as far as is known without asking: a table that comes with Shoal.

Providers that tell their prices are believed over the table. What they told last is kept in the cache directory and
read with the table; of two prices for the same thing, the newer one counts.
"""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import get_args

from shoal.providers.rental import Market, Offer
from shoal.providers.sandbox.layout import cache_dir

COLUMNS = (
    *("provider", "type", "region", "market", "usd_hour"),
    *("gpu", "gpus", "gpu_memory_gb", "cpus", "memory_gb", "arch", "as_of"),
)
_NUMBERS = ("gpus", "gpu_memory_gb", "cpus", "memory_gb")
MEMORY_SEEN = 0.92
"""The part of the memory that a provider names which its machine then shows: firmware and kernel take the rest."""


@dataclass(frozen=True)
class Price:
    """One line of the table."""

    kind: str
    """Which provider: `lambda`, `gcp` …"""
    type: str
    region: str
    """Empty: the same in all regions."""
    market: Market
    usd_hour: float | None
    """None: only the shape is known."""
    gpu: str = ""
    gpus: int = 0
    gpu_memory_gb: int = 0
    cpus: int = 0
    memory_gb: int = 0
    arch: str = "x86_64"
    as_of: str = ""
    """The day: 2026-08-22."""


@dataclass(frozen=True)
class Shape:
    """What a machine has, as a node of Slurm's says it."""

    cpus: int
    memory_mb: int
    """A little less than the provider says: Slurm takes no node that has less than its line promises."""
    gpus: int = 0
    gpu: str = ""
    gpu_memory_gb: int = 0
    arch: str = "x86_64"


class Prices:
    """A table of prices."""

    def __init__(self, rows: Iterable[Price]) -> None:
        self._rows: dict[tuple[str, str, str, str], Price] = {}
        for row in rows:
            key = (row.kind, row.type, row.region, row.market)
            if key not in self._rows or self._rows[key].as_of <= row.as_of:
                self._rows[key] = row
        self._shapes = {(row.kind, row.type): row for row in self._rows.values() if row.cpus and row.memory_gb}

    def __iter__(self) -> Iterator[Price]:
        return iter(self._rows.values())

    def find(self, kind: str, type: str, region: str, market: Market) -> Price | None:
        """What a machine costs there. A spot price that nobody told is taken for the whole one: it is never more."""
        for wanted in dict.fromkeys((market, "on-demand")):
            for place in dict.fromkeys((region, "")):
                row = self._rows.get((kind, type, place, wanted))
                if row is not None and row.usd_hour is not None:
                    return row
        return None

    def shape(self, kind: str, type: str) -> Shape | None:
        """What is in a machine of that type; None where that is not known."""
        row = self._shapes.get((kind, type))
        if row is None:
            return None
        memory = int(row.memory_gb * 1024 * MEMORY_SEEN)
        return Shape(row.cpus, memory, row.gpus, row.gpu, row.gpu_memory_gb, row.arch)

    def fill(self, kind: str, offers: Iterable[Offer]) -> list[Offer]:
        """Offers with what the provider did not tell: the price, with its day, and the shape."""
        return [self._filled(kind, offer) for offer in offers]

    def _filled(self, kind: str, offer: Offer) -> Offer:
        row = self._shapes.get((kind, offer.type))
        if row is not None:
            offer = replace(offer, **{name: getattr(offer, name) or getattr(row, name) for name in ("gpu", *_NUMBERS)})
        price = self.find(kind, offer.type, offer.region, offer.market) if offer.usd_hour is None else None
        return replace(offer, usd_hour=price.usd_hour, as_of=price.as_of) if price else offer


def prices(directory: Path | None = None) -> Prices:
    """The table, with what providers told since; `directory` is the cache."""
    kept = _kept(directory)
    return Prices((*shipped(), *kept)) if kept else _shipped_table()


def shape_of(kind: str, type: str) -> Shape | None:
    """What is in a machine of that type; None where our table does not know.

    Only the table that comes with Shoal counts: Slurm's lines must not depend on what was asked on which machine.
    """
    return _shipped_table().shape(kind, type)


def known_types(kind: str) -> frozenset[str]:
    """The types of a provider's machines that the table which comes with Shoal has; none of one that it does not."""
    return frozenset(row.type for row in shipped() if row.kind == kind)


def refreshed(kind: str, offers: Iterable[Offer], today: str, directory: Path | None = None) -> int:
    """Keep the prices that a provider told itself, for when it cannot be asked. Returns how many there were.

    `today` is their day. A cache that cannot be written is no reason to stop.
    """
    told = [_of_offer(kind, offer, today) for offer in offers if offer.usd_hour is not None and not offer.as_of]
    if not told:
        return 0
    path = _path(directory)
    rows = {(row.kind, row.type, row.region, row.market): row for row in (*_kept(directory), *told)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(_cells(row) for row in rows.values())
        Path(beside).replace(path)
    except OSError:
        return 0
    return len(told)


@cache
def shipped() -> tuple[Price, ...]:
    """The table that comes with Shoal."""
    text = files("shoal.providers").joinpath("prices.csv").read_text(encoding="utf-8")
    return tuple(_price(row) for row in csv.DictReader(text.splitlines()))


@cache
def _shipped_table() -> Prices:
    return Prices(shipped())


def _kept(directory: Path | None) -> list[Price]:
    """What providers told before. A file that is broken is as good as none."""
    try:
        with _path(directory).open(encoding="utf-8", newline="") as file:
            return [_price(row) for row in csv.DictReader(file)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _path(directory: Path | None) -> Path:
    return (directory or cache_dir()) / "prices.csv"


def _price(row: dict[str, str]) -> Price:
    if row["market"] not in get_args(Market):
        raise ValueError(f"no market is called {row['market']!r}")
    return Price(
        kind=row["provider"],
        type=row["type"],
        region=row["region"],
        market="spot" if row["market"] == "spot" else "on-demand",
        usd_hour=float(row["usd_hour"]) if row["usd_hour"] else None,
        gpu=row["gpu"],
        gpus=int(row["gpus"]),
        gpu_memory_gb=int(row["gpu_memory_gb"]),
        cpus=int(row["cpus"]),
        memory_gb=int(row["memory_gb"]),
        arch=row["arch"],
        as_of=row["as_of"],
    )


def _of_offer(kind: str, offer: Offer, today: str) -> Price:
    return Price(
        kind,
        offer.type,
        offer.region,
        offer.market,
        offer.usd_hour,
        offer.gpu,
        offer.gpus,
        offer.gpu_memory_gb,
        offer.cpus,
        offer.memory_gb,
        offer.arch,
        today,
    )


def _cells(row: Price) -> list[str]:
    values = {**vars(row), "provider": row.kind, "usd_hour": "" if row.usd_hour is None else repr(row.usd_hour)}
    return [str(values[name]) for name in COLUMNS]
