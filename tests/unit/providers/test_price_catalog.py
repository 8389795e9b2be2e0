"""Catalogs in gpuhunt's format, read from a server on this machine."""

import csv
import functools
import http.server
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.web import serving

from shoal.cloud.providers import prices as table
from shoal.cloud.providers.api import Offer
from shoal.cloud.providers.price_catalog import TABLE, main, merge, read_catalog
from shoal.errors import ProviderError

HEADER = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags\n"
AWS = (
    HEADER + "g6.xlarge,us-east-1,0.805,4,16.0,1,L4,24,False,,nvidia,\n"
    "g6.xlarge,eu-west-1,0.91,4,16.0,1,L4,24,False,,nvidia,\n"
    "g6.xlarge,eu-west-1,0.30,4,16.0,1,L4,24,True,,nvidia,\n"
    "p5.48xlarge,us-east-1,0,192,2048.0,8,H100,80,False,,nvidia,\n"
    "p5en.48xlarge,us-east-1,,192,2048.0,8,H200,141,False,,nvidia,\n"
    "g4ad.xlarge,us-east-1,0.3,4,16.0,1,V520,8,False,,amd,\n"
    "m7i.large,us-east-1,0.1,2,8.0,0,,,False,,,\n"
    "x9.new,us-east-1,9.5,4,16.0,1,L4,24,False,,nvidia,\n"
)
GCP = (
    HEADER
    + "g2-standard-4,us-central1-a,0.71,4,16,1,L4,24,False,,,\ng2-standard-4,us-central1-b,0.70,4,16,1,L4,24,False,,,\n"
    + "n1-standard-8,us-central1-a,0.73,8,30,1,T4,16,False,,,\n"
)
NEBIUS = HEADER + "gpu-h100-sxm 1gpu-16vcpu-200gb,eu-north1,3.90,16,200,1,H100,80,False,,nvidia,\n"


def archive(name: str, text: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr(f"{name}.csv", text)
    return file.getvalue()


@pytest.fixture
def base(tmp_path: Path) -> Iterator[str]:
    """The address of a server with catalogs of Amazon, Google and Nebius."""
    for name, text in (("aws", AWS), ("gcp", GCP), ("nebius", NEBIUS)):
        place = tmp_path / "catalogs" / name
        (place / "20261101").mkdir(parents=True)
        (place / "version").write_text("20261101\n")
        (place / "20261101" / "catalog.zip").write_bytes(archive(name, text))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "catalogs"))
    with serving(handler) as url:
        yield url


def test_only_priced_nvidia_machines_are_read() -> None:
    rows = read_catalog("aws", archive("aws", AWS), "2026-11-01")
    assert [(row.type, row.region, row.market, row.usd_hour) for row in rows] == [
        ("g6.xlarge", "us-east-1", "on-demand", 0.805),
        ("g6.xlarge", "eu-west-1", "on-demand", 0.91),
        ("g6.xlarge", "eu-west-1", "spot", 0.30),
        ("x9.new", "us-east-1", "on-demand", 9.5),
    ]
    assert (rows[0].gpu, rows[0].gpus, rows[0].cpus, rows[0].memory_gb, rows[0].as_of) == ("L4", 1, 4, 16, "2026-11-01")


def test_zones_are_regions_and_the_cheapest_counts_without_types_to_which_gpus_are_added() -> None:
    [row] = read_catalog("gcp", archive("gcp", GCP), "2026-11-01")
    assert (row.region, row.usd_hour) == ("us-central1", 0.70)


@cases("content", b"", b"<html>", archive("other", AWS))
def test_broken_catalog_is_an_error(content: bytes) -> None:
    with pytest.raises(ProviderError, match="the catalog of aws cannot be read"):
        read_catalog("aws", content, "2026-11-01")


def test_unknown_price_is_replaced_and_a_newer_one_kept() -> None:
    unknown = Offer("aws", "a", "r", as_of="2026-08-01")
    newer = Offer("aws", "b", "r", usd_hour=2.0, as_of="2026-12-01")
    news = [
        Offer("aws", "a", "r", usd_hour=1.0, as_of="2026-11-01"),
        Offer("aws", "b", "r", usd_hour=3.0, as_of="2026-11-01"),
    ]
    merged = merge([(unknown, ""), (newer, "mine")], [(offer, "new") for offer in news])
    assert merged == [(news[0], "new"), (newer, "mine")]


def test_table_is_updated_with_source_and_date(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "prices.csv"
    copy.write_text(TABLE.read_text())
    assert (
        main(["--url", base, "--provider", "aws", "--provider", "gcp", "--provider", "nebius", "--table", str(copy)])
        == 0
    )
    assert "prices are new" in capsys.readouterr().out
    with copy.open() as file:
        rows = {(row["type"], row["region"], row["market"]): row for row in csv.DictReader(file)}
    assert rows["g6.xlarge", "eu-west-1", "on-demand"]["source"] == "gpuhunt catalog 20261101"
    assert rows["g2-standard-4", "us-central1", "on-demand"]["usd_hour"] == "0.7"
    assert rows["gpu-h100-sxm 1gpu-16vcpu-200gb", "eu-north1", "on-demand"]["usd_hour"] == "3.9"
    assert rows["p5.48xlarge", "us-east-1", "on-demand"]["usd_hour"] == "55.04"  # a price of 0 is none
    assert ("x9.new", "us-east-1", "on-demand") not in rows
    assert ("gpu_1x_a10", "", "on-demand") in rows


def test_cache_is_updated_for_this_machine(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "cache_dir", lambda: tmp_path / "cache")
    assert main(["--url", base, "--provider", "gcp", "--cache"]) == 0
    found = table.prices().find("gcp", "g2-standard-4", "us-central1", "on-demand")
    assert found is not None
    assert found.usd_hour == 0.70


def test_server_without_catalogs_is_an_error_with_its_address(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", f"{base}/none", "--provider", "aws"]) == 1
    assert f"cannot read {base}/none/aws/version" in capsys.readouterr().err
