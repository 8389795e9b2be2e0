"""Names, records and locks of the sandbox."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.errors import ProviderError
from shoal.local_files import cache_dir, locked, write_atomic
from shoal.sandbox.layout import HostRecord, Layout, Site, other_subnets
from shoal.spec.member import Shape

HOST = HostRecord("n1", 253, "10.70.1.2", "/images/x", "ssh-ed25519 AAAA", Shape(gpus=2, site="b"))


def test_names_fit_the_kernel_limits(tmp_path: Path) -> None:
    layout = Layout(tmp_path, "a" * 40)
    assert len(layout.link(HOST)) <= 15 and len(layout.bridge(Site("a", 99, ""))) <= 15
    assert len(layout.namespace("h" * 40)) <= 64


def test_names_of_clusters_with_a_common_prefix_differ(tmp_path: Path) -> None:
    one, two = Layout(tmp_path, "reef"), Layout(tmp_path, "reef-b")
    assert not two.prefix.startswith(one.prefix) and one.bridge_prefix != two.bridge_prefix
    assert one.table != two.table and Layout(tmp_path / "other", "reef").id != one.id


@cases("name", "", "Reef", "a/b", "..", "-a", "a-", "a" * 41, "a b", "a;b")
def test_unsafe_name_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProviderError, match="use lower-case letters, digits and hyphens, at most 40 of them"):
        Layout(tmp_path, name)
    with pytest.raises(ProviderError, match="not a name of a sandbox host"):
        Layout(tmp_path, "reef").host_dir(name)


def test_records_round_trip(tmp_path: Path) -> None:
    layout = Layout(tmp_path, "reef")
    layout.host_dir("n1").mkdir(parents=True)
    layout.save_host(HOST)
    layout.save_sites({"a": Site("a", 0, "10.70.1.0/24")})
    assert layout.hosts() == {"n1": HOST} and layout.sites() == {"a": Site("a", 0, "10.70.1.0/24")}
    assert other_subnets(tmp_path) == ["10.70.1.0/24"]


def test_truncated_record_is_ignored_and_an_unknown_key_tolerated(tmp_path: Path) -> None:
    layout = Layout(tmp_path, "reef")
    for name in ("n1", "n2"):
        layout.host_dir(name).mkdir(parents=True)
    layout.save_host(HOST)
    stored = json.loads((layout.host_dir("n1") / "host.json").read_text())
    stored["shape"]["colour"] = "blue"
    (layout.host_dir("n1") / "host.json").write_text(json.dumps(stored))
    (layout.host_dir("n2") / "host.json").write_text('{"name": "n2", ')
    assert layout.hosts() == {"n1": HOST}


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("SHOAL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/ada/.cache/shoal")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/shoal")
    monkeypatch.setenv("SHOAL_CACHE", "/own")
    assert cache_dir() == Path("/own")


async def test_lock_holders_take_turns(tmp_path: Path) -> None:
    layout, order = Layout(tmp_path, "reef"), []

    async def hold(name: str) -> None:
        async with layout.locked():
            order.append(f"{name} in")
            await asyncio.sleep(0.01)
            order.append(f"{name} out")

    await asyncio.gather(hold("one"), hold("two"))
    assert order in (["one in", "one out", "two in", "two out"], ["two in", "two out", "one in", "one out"])


async def test_waiting_lock_of_a_destroyed_cluster_creates_the_directory(tmp_path: Path) -> None:
    layout = Layout(tmp_path, "reef")
    first = layout.locked()
    await first.__aenter__()
    waiting = asyncio.create_task(layout.locked().__aenter__())
    await asyncio.sleep(0.01)
    layout.dir.rmdir()
    await first.__aexit__(None, None, None)
    await waiting
    assert layout.dir.is_dir()


async def test_lock_of_a_missing_directory_reports_its_absence(tmp_path: Path) -> None:
    async with locked(tmp_path / "gone") as there:
        assert not there


def test_atomic_write_leaves_only_the_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "x", "text", 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").stat().st_mode & 0o777 == 0o600
