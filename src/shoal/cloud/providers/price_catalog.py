"""Prices from catalogs in gpuhunt's format: a zip archive with one CSV file for each provider.

    python -m shoal.cloud.providers.price_catalog --url BASE              update prices.csv in a checkout, for a release
    python -m shoal.cloud.providers.price_catalog --url BASE --cache      update this machine's cache instead

`shoal up` sends such prices from the cache to the rental service, where the file rents machines of these types.

A catalog is at BASE/PROVIDER/VERSION/catalog.zip, and BASE/PROVIDER/version names the newest. A row without a price, or
with a price of 0, is no price: it stays unknown.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from shoal.cloud.providers.api import Offer
from shoal.cloud.providers.prices import gpu_model, store_prices, table_row, table_text
from shoal.errors import ProviderError, ShoalError
from shoal.local_files import write_atomic

BASE = "https://dstack-gpu-pricing.s3.eu-west-1.amazonaws.com/v3"
"""Where gpuhunt itself reads its catalogs."""
CATALOGS = {"aws": "aws", "gcp": "gcp", "lambda": "lambdalabs", "nebius": "nebius", "runpod": "runpod"}
"""Our kind of provider -> its name in gpuhunt."""
ZONED = ("gcp",)
"""Their rows name zones; prices are those of regions."""
ADDED_GPUS = {"gcp": "n1-"}
"""Types to which GPUs are added: a row has the price of both, under the type's name alone."""
DOWNLOAD_TIMEOUT_S = 60.0
MAX_CATALOG_MIB = 64
"""Of the archive, and of the file in it."""
TABLE = Path(__file__).with_name("prices.csv")


def fetch_catalog(kind: str, base: str = BASE) -> tuple[bytes, str]:
    """The newest catalog of a provider, and its version. Raises ProviderError."""
    name = CATALOGS[kind]
    with httpx.Client(timeout=DOWNLOAD_TIMEOUT_S, follow_redirects=True) as client:
        version = _get(client, f"{base.rstrip('/')}/{name}/version").decode("ascii", "replace").strip()
        if not re.fullmatch(r"[\w.-]{1,64}", version):
            raise ProviderError(f"{base}: {name} has no version of a catalog", hint="check the address")
        return _get(client, f"{base.rstrip('/')}/{name}/{version}/catalog.zip"), version


def _get(client: httpx.Client, url: str) -> bytes:
    try:
        with client.stream("GET", url) as answer:
            answer.raise_for_status()
            content = bytearray()
            for piece in answer.iter_bytes():
                content += piece
                if len(content) > MAX_CATALOG_MIB << 20:
                    raise ProviderError(f"{url} is longer than {MAX_CATALOG_MIB} MiB")
            return bytes(content)
    except httpx.HTTPError as error:
        text = f"cannot read {url}: {error}"
        raise ProviderError(text, hint="check the network, or give another --url") from None


def read_catalog(kind: str, content: bytes, as_of: str) -> list[Offer]:
    """The priced NVIDIA machines of a catalog, the cheapest row of each type, region and market."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entry = archive.getinfo(f"{CATALOGS[kind]}.csv")
            if entry.file_size > MAX_CATALOG_MIB << 20:
                raise ProviderError(f"the catalog of {kind} is longer than {MAX_CATALOG_MIB} MiB")
            text = archive.read(entry).decode("utf-8")
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError) as error:
        raise ProviderError(f"the catalog of {kind} cannot be read: {error}") from None
    cheapest: dict[tuple[str, ...], Offer] = {}
    for row in csv.DictReader(io.StringIO(text)):
        offer = _offer(kind, row, as_of)
        if offer is not None:
            known = cheapest.get(offer.identity)
            if known is None or (known.usd_hour or 0.0) > (offer.usd_hour or 0.0):
                cheapest[offer.identity] = offer
    return list(cheapest.values())


def _offer(kind: str, row: dict[str, str | None], as_of: str) -> Offer | None:
    """A row as an offer; None where it has no price of its type, no GPU, or one that is not NVIDIA's."""
    price, gpus = _number(row.get("price")), int(_number(row.get("gpu_count")))
    type, place = (row.get("instance_name") or "").strip(), (row.get("location") or "").strip()
    if not type or price <= 0 or gpus < 1 or (row.get("gpu_vendor") or "nvidia").lower() != "nvidia":
        return None
    if kind in ADDED_GPUS and type.startswith(ADDED_GPUS[kind]):
        return None
    gpu, memory = gpu_model(row.get("gpu_name") or "")
    return Offer(
        kind,
        type,
        re.sub(r"-[a-z]$", "", place) if kind in ZONED else place,
        market="spot" if (row.get("spot") or "").lower() == "true" else "on-demand",
        usd_hour=price,
        gpu=gpu,
        gpus=gpus,
        gpu_memory_gb=round(_number(row.get("gpu_memory"))) or memory,
        cpus=int(_number(row.get("cpu"))),
        memory_gb=int(_number(row.get("memory"))),
        arch="arm64" if (row.get("cpu_arch") or "").lower() == "arm" else "x86_64",
        as_of=as_of,
    )


def _number(text: str | None) -> float:
    """A number of the catalog; 0 for none."""
    digits = (text or "").strip()
    return float(digits) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,12})?", digits) else 0.0


def merge(rows: Iterable[tuple[Offer, str]], news: Iterable[tuple[Offer, str]]) -> list[tuple[Offer, str]]:
    """The table with newer prices. Offers come with their source; types that the table lacks are left out."""
    table = {(offer.provider, offer.type, offer.region, offer.market): (offer, source) for offer, source in rows}
    types = {(offer.provider, offer.type) for offer, _ in table.values()}
    for offer, source in news:
        key = (offer.provider, offer.type, offer.region, offer.market)
        known = table.get(key)
        if (offer.provider, offer.type) in types and (known is None or known[0].as_of <= offer.as_of):
            table[key] = (offer, source)
    return list(table.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="price_catalog", description="Update prices from catalogs.")
    parser.add_argument("--url", default=BASE, help="where the catalogs are")
    parser.add_argument("--provider", action="append", choices=sorted(CATALOGS), help="only this one; may be repeated")
    parser.add_argument("--cache", action="store_true", help="update this machine's cache, not the table")
    parser.add_argument("--table", type=Path, default=TABLE, help="the table")
    chosen = parser.parse_args(arguments)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    news: list[tuple[Offer, str]] = []
    try:
        for kind in chosen.provider or sorted(CATALOGS):
            content, version = fetch_catalog(kind, chosen.url)
            news += [(offer, f"gpuhunt catalog {version}") for offer in read_catalog(kind, content, today)]
    except ShoalError as error:
        print(f"{error.message}\n  fix: {error.hint}" if error.hint else error.message, file=sys.stderr)
        return 1
    if chosen.cache:
        stored = 0
        for kind, source in dict.fromkeys((offer.provider, source) for offer, source in news):
            undated = [replace(offer, as_of="") for offer, _ in news if offer.provider == kind]
            stored += store_prices(kind, undated, today, catalog=source)
        print(f"{stored} prices stored in the cache; `shoal up` sends those of machines that the file rents")
        return 0
    with chosen.table.open(encoding="utf-8", newline="") as file:
        rows = [(table_row(row), row.get("source") or "") for row in csv.DictReader(file)]
    merged = merge(rows, news)
    write_atomic(chosen.table, table_text(sorted(merged, key=lambda one: one[0].identity)), 0o644)
    changed = len(set(merged) - set(rows))
    print(f"{changed} of {len(merged)} prices are new; read the difference before you commit it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
