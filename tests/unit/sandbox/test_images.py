"""How images are stored. The end-to-end tests build them."""

import asyncio
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from shoal.errors import ProviderError
from shoal.sandbox import images

needs_apt = pytest.mark.skipif(not shutil.which("apt-config"), reason="apt-config is not installed")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Builds that only make a directory; the list holds the image of each."""
    made: list[str] = []

    async def bootstrap(image: str, root: Path, log: Path) -> None:
        made.append(image)
        os.mkdir(root)
        await asyncio.sleep(0.05)

    async def finish(image: str, root: Path, settings: str, log: Path) -> None:
        (root / "done").touch()

    monkeypatch.setattr(images, "_bootstrap", bootstrap)
    monkeypatch.setattr(images, "_finish", finish)
    return made


def quiet(what: str, done: float) -> None:
    assert 0 <= done <= 1


async def test_unknown_image_is_rejected_with_the_existing_names(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="no image 'arch'\n  fix: use one of: debian11, debian12, debian13, sid"):
        await images.ensure(tmp_path, "arch", quiet)


async def test_concurrent_calls_build_once_and_get_the_same_image(tmp_path: Path, builds: list[str]) -> None:
    one, two = await asyncio.gather(*(images.ensure(tmp_path, "debian12", quiet) for _ in range(2)))
    assert one == two and (one / "done").exists() and builds == ["debian12"]
    assert await images.ensure(tmp_path, "debian12", quiet) == one and builds == ["debian12"]
    assert images.exists(tmp_path, "debian12") and not images.exists(tmp_path, "sid")


async def test_incomplete_build_is_removed_and_never_used(tmp_path: Path, builds: list[str]) -> None:
    left = tmp_path / "images/sid/.building-1"
    left.mkdir(parents=True)
    assert not images.exists(tmp_path, "sid")
    await images.ensure(tmp_path, "sid", quiet)
    assert not left.exists() and builds == ["sid"]


async def test_older_builds_are_removed_unless_in_use(tmp_path: Path, builds: list[str]) -> None:
    room = tmp_path / "images/sid"
    for name, hours in (("used", 5), ("unused", 5), ("young", 0)):
        (room / name).mkdir(parents=True)
        moment = time.time() - hours * 3600
        os.utime(room / name, (moment, moment))
    record = tmp_path / "sandbox/reef/hosts/n1/host.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"image": str(room / "used")}))
    made = await images.ensure(tmp_path, "sid", quiet)
    assert {path.name for path in room.iterdir() if path.is_dir()} == {"used", "young", made.name}


async def test_changed_recipe_is_another_image(
    tmp_path: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await images.ensure(tmp_path, "sid", quiet)
    monkeypatch.setattr(images, "PACKAGES", (*images.PACKAGES, "vim"))
    assert await images.ensure(tmp_path, "sid", quiet) != first


@needs_apt
async def test_apt_proxy_of_the_machine_is_copied_into_the_image(
    tmp_path: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "apt.conf"
    settings.write_text('Acquire::http::Proxy "http://proxy.example:3142";\n')
    without = await images.ensure(tmp_path, "sid", quiet)
    monkeypatch.setenv("APT_CONFIG", str(settings))
    assert await images.ensure(tmp_path, "sid", quiet) != without
    assert 'Acquire::http::Proxy "http://proxy.example:3142";' in await images.apt_settings()
