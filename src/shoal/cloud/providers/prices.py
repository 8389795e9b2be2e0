"""Prices and shapes of machine types, from a table that ships with Shoal, and the usual names of GPUs.

Prices that a provider's API tells are preferred. The last ones are stored in the cache directory and read with the
table; of two prices for the same thing, the newer one counts. Table and cache have the date of each price, and its
source; `price_catalog` updates either from catalogs.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from shoal.cloud.providers.api import Market, Offer
from shoal.local_files import cache_dir, write_atomic

MEMORY_GB = {
    "P4": 8,
    "P100": 16,
    "V100": 16,
    "T4": 16,
    "A10": 24,
    "A10G": 24,
    "L4": 24,
    "A100": 40,
    "L40S": 48,
    "H100": 80,
    "GH200": 96,
    "RTX PRO 4500": 32,
    "RTX PRO 6000": 96,
    "H200": 141,
    "B200": 180,
    "B300": 288,
}
"""Memory by GPU model, where the name does not include it."""


def gpu_model(name: str) -> tuple[str, int]:
    """A GPU's model and its memory in GB: `nvidia-h100-mega-80gb` and `H100 (80 GB SXM5)` are H100 with 80.

    An unknown GPU keeps its name; its memory is 0 if the name does not include it.
    """
    words = " ".join(re.findall(r"[A-Z0-9]+", name.upper()))
    model = next((model for model in MEMORY_GB if re.search(rf"\b{model}\b", words)), "")
    memory = re.search(r"\b(\d+) ?GB\b", words)
    return model or name.partition(" (")[0], int(memory[1]) if memory else MEMORY_GB.get(model, 0)


COLUMNS = (
    *("provider", "type", "region", "market", "usd_hour"),
    *("gpu", "gpus", "gpu_memory_gb", "cpus", "memory_gb", "arch", "as_of"),
)
_NUMBERS = ("gpus", "gpu_memory_gb", "cpus", "memory_gb")
MEMORY_SEEN = 0.92
"""The share of the advertised memory that the system sees; firmware and kernel take the rest."""


@dataclass(frozen=True)
class InstanceShape:
    """The resources of a machine, as Slurm counts them."""

    cpus: int
    memory_mb: int
    """A little less than advertised: Slurm rejects a node that has less than its configuration."""
    gpus: int = 0
    gpu: str = ""
    gpu_memory_gb: int = 0
    arch: str = "x86_64"


class Prices:
    """A table of offers. Their `provider` is the kind of provider, and an empty region stands for all."""

    def __init__(self, rows: Iterable[Offer]) -> None:
        self._rows: dict[tuple[str, str, str, str], Offer] = {}
        for row in rows:
            key = (row.provider, row.type, row.region, row.market)
            if key not in self._rows or self._rows[key].as_of <= row.as_of:
                self._rows[key] = row
        self._shapes = {(row.provider, row.type): row for row in self._rows.values() if row.cpus and row.memory_gb}

    def __iter__(self) -> Iterator[Offer]:
        return iter(self._rows.values())

    def find(self, kind: str, type: str, region: str, market: Market) -> Offer | None:
        """The price of a type in a region. A missing spot price falls back to on-demand, which is never less."""
        for fallback in dict.fromkeys((market, "on-demand")):
            for place in dict.fromkeys((region, "")):
                row = self._rows.get((kind, type, place, fallback))
                if row is not None and row.usd_hour is not None:
                    return row
        return None

    def shape(self, kind: str, type: str) -> InstanceShape | None:
        """The shape of a machine type; None if unknown."""
        row = self._shapes.get((kind, type))
        if row is None:
            return None
        memory = int(row.memory_gb * 1024 * MEMORY_SEEN)
        return InstanceShape(row.cpus, memory, row.gpus, row.gpu, row.gpu_memory_gb, row.arch)

    def fill(self, kind: str, offers: Iterable[Offer]) -> list[Offer]:
        """Add what the provider did not tell to offers: the price, with its date, and the shape."""
        filled: list[Offer] = []
        for offer in offers:
            row = self._shapes.get((kind, offer.type), offer)
            offer = replace(offer, **{name: getattr(offer, name) or getattr(row, name) for name in ("gpu", *_NUMBERS)})
            price = self.find(kind, offer.type, offer.region, offer.market) if offer.usd_hour is None else None
            filled.append(replace(offer, usd_hour=price.usd_hour, as_of=price.as_of) if price else offer)
        return filled


def prices(directory: Path | None = None) -> Prices:
    """The shipped table with the prices that providers told since; `directory` is the cache."""
    cached = [row for row, _ in _cached(directory)]
    return Prices((*shipped(), *cached)) if cached else _shipped_table()


def shape_of(kind: str, type: str) -> InstanceShape | None:
    """The shape of a machine type; None if the shipped table does not have it.

    Only the shipped table counts: slurm.conf must not depend on the cache of the machine that writes it.
    """
    return _shipped_table().shape(kind, type)


def known_types(kind: str) -> frozenset[str]:
    """The machine types of a provider that the shipped table has."""
    return frozenset(row.type for row in shipped() if row.provider == kind)


def catalog_prices(types: Collection[tuple[str, str]], directory: Path | None = None) -> str:
    """The cache for a machine that rents these types, by kind and type: prices from catalogs that our table has not.

    What a provider told is left out: that machine asks it too. Empty without any price.
    """
    news: list[tuple[Offer, str]] = []
    for row, source in _cached(directory):
        shipped_row = _shipped_table().find(row.provider, row.type, row.region, row.market)
        is_news = shipped_row is None or shipped_row.usd_hour != row.usd_hour
        if source and (row.provider, row.type) in types and is_news:
            news.append((row, source))
    return table_text(sorted(news, key=lambda entry: entry[0].identity)) if news else ""


def store_prices(
    kind: str, offers: Iterable[Offer], today: str, directory: Path | None = None, *, catalog: str = ""
) -> int:
    """Store the prices that a provider told, for when it does not answer, or those of a catalog. Returns their number.

    `today` is their date, `catalog` their source where that is not the provider. A cache that cannot be written is
    ignored.
    """
    fresh = [
        replace(offer, provider=kind, as_of=today) for offer in offers if offer.usd_hour is not None and not offer.as_of
    ]
    if not fresh:
        return 0
    stored = [*_cached(directory), *((offer, catalog) for offer in fresh)]
    rows = {(row.provider, row.type, row.region, row.market): (row, source) for row, source in stored}
    try:
        _path(directory).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(_path(directory), table_text(rows.values()), 0o600)
    except OSError:
        return 0
    return len(fresh)


@cache
def shipped() -> tuple[Offer, ...]:
    """The table that ships with Shoal."""
    text = files("shoal.cloud.providers").joinpath("prices.csv").read_text(encoding="utf-8")
    return tuple(table_row(row) for row in csv.DictReader(text.splitlines()))


@cache
def _shipped_table() -> Prices:
    return Prices(shipped())


def _cached(directory: Path | None) -> list[tuple[Offer, str]]:
    """The stored prices, each with the catalog it is from, if any. A broken file counts as empty."""
    try:
        with _path(directory).open(encoding="utf-8", newline="") as file:
            return [(table_row(row), row.get("source") or "") for row in csv.DictReader(file)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _path(directory: Path | None) -> Path:
    return (directory or cache_dir()) / "prices.csv"


def table_row(row: Mapping[str, str]) -> Offer:
    """A row of the table, whose source is not part of the offer. Raises ValueError or KeyError for a broken one."""
    row = {name: row[name] for name in COLUMNS}
    if row["market"] not in get_args(Market):
        raise ValueError(f"no market is called {row['market']!r}")
    values: dict[str, Any] = {**row, **{name: int(row[name]) for name in _NUMBERS}}
    return Offer(**{**values, "usd_hour": float(row["usd_hour"]) if row["usd_hour"] else None})


def table_text(rows: Iterable[tuple[Offer, str]]) -> str:
    """The text of a table of offers, each with its source."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([[*COLUMNS, "source"], *([*_cells(row), source] for row, source in rows)])
    return text.getvalue()


def _cells(row: Offer) -> list[str]:
    values = {**vars(row), "usd_hour": "" if row.usd_hour is None else repr(row.usd_hour)}
    return [str(values[name]) for name in COLUMNS]
