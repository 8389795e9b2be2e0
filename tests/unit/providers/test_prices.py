"""The price table: the prices that Shoal ships, newer prices from providers, and which one applies."""

import csv
from dataclasses import replace
from datetime import date
from pathlib import Path

from tests.support.cases import cases

from shoal.cloud.providers import RENTAL_PROVIDERS
from shoal.cloud.providers.api import Offer
from shoal.cloud.providers.price_catalog import TABLE
from shoal.cloud.providers.prices import COLUMNS, InstanceShape, Prices, prices, shape_of, shipped, store_prices

H100 = Offer("mine", "gpu_8x_h100_sxm5", "us-west-1")


def test_shipped_table_is_complete() -> None:
    rows = shipped()
    assert len({(row.provider, row.type, row.region, row.market) for row in rows}) == len(rows)
    for row in rows:
        assert row.provider in RENTAL_PROVIDERS
        assert row.type and ((row.gpu and row.gpus > 0) or row.type.startswith("cpu-")), row
        assert row.usd_hour is None or row.usd_hour > 0, row
        assert not row.usd_hour or not row.gpus or 0.1 < row.usd_hour / row.gpus < 20, row
        assert row.arch in ("x86_64", "arm64")
        assert date.fromisoformat(row.as_of) <= date(2026, 11, 15)


def test_every_shipped_price_has_its_source_and_its_date() -> None:
    with TABLE.open(encoding="utf-8") as file:
        priced = [row for row in csv.DictReader(file) if row["usd_hour"]]
    assert len(priced) > 60
    assert [row for row in priced if not row["source"].strip() or not date.fromisoformat(row["as_of"])] == []


def test_price_without_a_source_is_unknown() -> None:
    assert prices().find("paperspace", "A5000", "", "on-demand") is None
    shape = shape_of("paperspace", "A5000")
    assert shape is not None and shape.gpus == 1


def test_price_is_looked_up_by_region_or_for_all_regions() -> None:
    table = Prices([_row("", 2.0), _row("eu", 3.0)])
    assert table.find("lambda", "t", "eu", "on-demand") == _row("eu", 3.0)
    assert table.find("lambda", "t", "us", "on-demand") == _row("", 2.0)
    assert table.find("lambda", "other", "us", "on-demand") is None
    assert table.find("gcp", "t", "us", "on-demand") is None


def test_missing_spot_price_falls_back_to_on_demand() -> None:
    whole = _row("", 2.0)
    assert Prices([whole]).find("lambda", "t", "us", "spot") == whole
    spot = replace(whole, market="spot", usd_hour=0.5)
    assert Prices([whole, spot]).find("lambda", "t", "us", "spot") == spot
    assert Prices([spot]).find("lambda", "t", "us", "on-demand") is None


def test_newer_price_counts_in_any_order() -> None:
    old, new = _row("", 2.0, as_of="2026-08-01"), _row("", 3.0, as_of="2026-09-01")
    assert list(Prices([old, new])) == [new]
    assert list(Prices([new, old])) == [new]


def test_offer_without_a_price_gets_the_table_price_and_date() -> None:
    [filled] = prices().fill("lambda", [H100])
    assert (filled.usd_hour, filled.as_of) == (31.92, "2026-08-22")
    assert (filled.gpu, filled.gpus, filled.cpus, filled.memory_gb, filled.gpu_memory_gb) == ("H100", 8, 208, 1800, 80)


def test_values_of_the_provider_are_kept() -> None:
    told = replace(H100, usd_hour=29.0, gpu="H100 SXM5", gpus=8, cpus=200, memory_gb=1700, gpu_memory_gb=80)
    assert prices().fill("lambda", [told]) == [told]
    unknown = Offer("mine", "gpu_1x_moon", "us-west-1")
    assert prices().fill("lambda", [unknown]) == [unknown]


def test_shape_has_less_memory_than_advertised() -> None:
    assert shape_of("gcp", "a2-highgpu-1g") == InstanceShape(12, 80076, 1, "A100", 40, "x86_64")
    assert shape_of("lambda", "gpu_1x_gh200") == InstanceShape(64, 406978, 1, "GH200", 96, "arm64")
    assert shape_of("runpod", "NVIDIA H200") is None  # the host's cores differ
    assert shape_of("lambda", "gpu_1x_moon") is None


def test_provider_prices_are_cached_and_used_while_newer(tmp_path: Path) -> None:
    told = replace(H100, usd_hour=28.5, gpu="H100", gpus=8, cpus=208, memory_gb=1800, gpu_memory_gb=80)
    assert store_prices("lambda", [told], "2026-11-15", tmp_path) == 1
    table = prices(tmp_path)
    found = table.find("lambda", H100.type, "us-west-1", "on-demand")
    assert found is not None
    assert (found.usd_hour, found.as_of) == (28.5, "2026-11-15")
    other = table.find("lambda", H100.type, "us-east-1", "on-demand")
    assert other is not None and other.usd_hour == 31.92  # no newer price for that region
    assert store_prices("lambda", [replace(told, usd_hour=27.0)], "2026-11-16", tmp_path) == 1
    assert table != prices(tmp_path)
    assert [row.usd_hour for row in prices(tmp_path) if row.region == "us-west-1" and row.provider == "lambda"] == [
        27.0
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["prices.csv"]


def test_table_price_is_not_stored_as_new(tmp_path: Path) -> None:
    assert store_prices("lambda", prices(tmp_path).fill("lambda", [H100]), "2026-11-15", tmp_path) == 0
    assert store_prices("lambda", [H100], "2026-11-15", tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


@cases("text", "", "nonsense", ",".join(COLUMNS) + "\nlambda,t,,moon,1,,0,0,0,0,,\n", "\0\xff")
def test_invalid_cache_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "prices.csv").write_text(text, encoding="latin-1")
    assert list(prices(tmp_path)) == list(Prices(shipped()))


def test_unwritable_cache_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert store_prices("lambda", [replace(H100, usd_hour=1.0)], "2026-11-15", tmp_path / "file") == 0


def _row(region: str, usd_hour: float, as_of: str = "2026-08-01") -> Offer:
    return Offer("lambda", "t", region, usd_hour=usd_hour, gpu="H100", gpus=1, as_of=as_of)
