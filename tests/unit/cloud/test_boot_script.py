"""A rented machine that never joins shuts itself down, by a timer in its boot script."""

from __future__ import annotations

import base64
import binascii
import gzip
import re
import subprocess
from pathlib import Path

import pytest
from tests.contract.rental_providers import CASES, KEY
from tests.unit.cloud.scene import scene

from shoal.cloud.providers.api import Abilities
from shoal.cloud.service.boot import boot_script, container_script, machine_script
from shoal.roles.rented import CONTROLLER_TIMEOUT_S


def unpacked(text: str) -> str:
    """A text with all that is in it as base64, compressed or not, however deep."""
    inner = ""
    for word in re.findall(r"[A-Za-z0-9+/]{24,}={0,2}", text):
        try:
            data = base64.b64decode(word, validate=True)
            inner += unpacked((gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode())
        except (binascii.Error, UnicodeDecodeError):
            continue
    return text + inner


@pytest.mark.parametrize("kind", CASES)
async def test_every_order_sends_the_machine_its_end_time(tmp_path: Path, kind: str) -> None:
    async with scene(tmp_path, kind) as it:
        it.slurm.submit("1", 1)
        await it.until(lambda: bool(it.machines()))
        abilities = it.context.accounts[kind].abilities
        sent = unpacked(it.machines()[0].order.user_data)
        assert boot_script(abilities, 86400) in sent, "beside its host key"
        seconds = abilities.boot_s + CONTROLLER_TIMEOUT_S
        assert (f"sleep {seconds}\n" if abilities.container else f"OnBootSec={seconds}\n") in sent
        assert KEY not in sent


def test_short_lifetime_ends_a_machine_before_its_boot_limit() -> None:
    assert "OnBootSec=4200\n" in boot_script(Abilities(boot_s=1800), 600)
    assert "OnBootSec=5400\n" in boot_script(Abilities(boot_s=1800), 0)


def test_provider_without_boot_scripts_gets_none() -> None:
    assert boot_script(Abilities(boots_with="none"), 600) == ""


def test_machine_gets_a_persistent_timer_that_respects_the_watchdog(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    systemctl.chmod(0o755)
    script = machine_script(5400, str(tmp_path), "/usr/local/lib/shoal/watchdog", str(systemctl))
    for _ in range(2):  # as where a provider runs it at every boot
        subprocess.run(["sh", "-eu"], input=script, text=True, check=True)
    service, timer = ((tmp_path / f"shoal-unclaimed.{kind}").read_text() for kind in ("service", "timer"))
    assert "ConditionPathExists=!/usr/local/lib/shoal/watchdog\n" in service
    assert "ExecStart=systemctl poweroff\n" in service
    assert "OnBootSec=5400\n" in timer and "WantedBy=timers.target\n" in timer
    once = ["daemon-reload", "enable --no-reload shoal-unclaimed.timer", "start --no-block shoal-unclaimed.timer"]
    assert calls.read_text().splitlines() == once * 2


@pytest.mark.parametrize("joined", [False, True])
def test_container_ends_only_without_a_watchdog(tmp_path: Path, joined: bool) -> None:
    watchdog, ended = tmp_path / "watchdog", tmp_path / "ended"
    if joined:
        watchdog.touch()
    script = container_script(0, f"touch {ended}", str(watchdog)) + "wait\n"
    subprocess.run(["sh", "-eu"], input=script, text=True, check=True, timeout=60)
    assert ended.exists() is not joined
