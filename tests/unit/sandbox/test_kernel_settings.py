"""Kernel settings are raised once and restored."""

from pathlib import Path

import pytest

from shoal.sandbox.network import KERNEL_SETTINGS, raise_settings, restore_settings


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    for name in KERNEL_SETTINGS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("0\n")
    (tmp_path / "fs/inotify/max_user_watches").write_text("9999999\n")
    return tmp_path


def values(proc: Path) -> dict[str, int]:
    return {name: int((proc / name).read_text()) for name in KERNEL_SETTINGS}


def test_only_too_low_settings_are_raised_and_all_are_restored(proc: Path) -> None:
    before, first = proc / "before", values(proc)
    raise_settings(proc, before)
    assert values(proc) == {**KERNEL_SETTINGS, "fs/inotify/max_user_watches": 9999999}
    raise_settings(proc, before)  # a second cluster does not take our values for the machine's own
    restore_settings(proc, before)
    assert values(proc) == first and not before.exists()


def test_settings_changed_meanwhile_are_kept(proc: Path) -> None:
    before = proc / "before"
    raise_settings(proc, before)
    (proc / "fs/inotify/max_user_instances").write_text("100000\n")
    restore_settings(proc, before)
    assert values(proc)["fs/inotify/max_user_instances"] == 100000


def test_restore_without_raise_is_not_an_error(proc: Path) -> None:
    restore_settings(proc, proc / "before")
    assert values(proc)["net/ipv4/ip_forward"] == 0
