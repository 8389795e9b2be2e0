"""A rented machine that never joins shuts itself down, by a timer in its boot script."""

import asyncio
import base64
import binascii
import gzip
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

from tests.contract.rental_providers import CASES, KEY, trial
from tests.support.cases import cases
from tests.support.programs import stand_in
from tests.unit.cloud.scene import scene

from shoal.cloud.providers.api import Abilities
from shoal.cloud.service.boot import boot_script, container_script, machine_script
from shoal.roles.rented import CONTROLLER_TIMEOUT_S, WATCHDOG
from shoal_simulators.runpod import RunPodSimulator


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


@cases("kind", *CASES)
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


def test_machine_gets_a_persistent_timer_that_respects_the_watchdog(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    systemctl = stand_in(tmp_path / "systemctl", f'echo "$@" >> {calls}')
    script = machine_script(5400, str(tmp_path), "/usr/local/lib/shoal/watchdog", str(systemctl))
    for _ in range(2):  # as where a provider runs it at every boot
        subprocess.run(["sh", "-eu"], input=script, text=True, check=True)
    service, timer = ((tmp_path / f"shoal-unclaimed.{kind}").read_text() for kind in ("service", "timer"))
    assert "ConditionPathExists=!/usr/local/lib/shoal/watchdog\n" in service
    assert "ExecStart=systemctl poweroff\n" in service
    assert "OnBootSec=5400\n" in timer and "WantedBy=timers.target\n" in timer
    once = ["daemon-reload", "enable --no-reload shoal-unclaimed.timer", "start --no-block shoal-unclaimed.timer"]
    assert calls.read_text().splitlines() == once * 2


def run_with_stand_ins(script: str, place: Path, **env: str) -> list[str]:
    """Run a container's script until it sleeps for the third time. Returns the seconds of each sleep."""
    stand_in(place / "sleep", f'echo "$1" >> {place}/slept; [ "$(wc -l < {place}/slept)" -lt 3 ] || kill "$PPID"')
    path = f"{place}:{os.environ['PATH']}"
    subprocess.run(["sh", "-u"], input=script + "wait\n", text=True, env={"PATH": path, **env}, timeout=60, check=False)
    return (place / "slept").read_text().split()


def test_container_that_never_joins_ends_itself_and_tries_again(tmp_path: Path) -> None:
    script = container_script(5400, f"echo end >> {tmp_path}/ended", str(tmp_path / "watchdog"))
    assert run_with_stand_ins(script, tmp_path) == ["5400", "300", "300"]
    assert (tmp_path / "ended").read_text() == "end\nend\n"


def test_container_that_joins_late_stays(tmp_path: Path) -> None:
    watchdog, ended = tmp_path / "watchdog", tmp_path / "ended"
    script = container_script(5400, f"touch {ended} {watchdog}", str(watchdog))
    assert run_with_stand_ins(script, tmp_path) == ["5400", "300"]
    ended.unlink()
    (tmp_path / "slept").unlink()
    stand_in(watchdog, f"echo looked >> {tmp_path}/looked")
    assert run_with_stand_ins(script, tmp_path) == ["60", "60", "60"], "started again, it runs the watchdog"
    assert (tmp_path / "looked").read_text() == "looked\nlooked\n"
    assert not ended.exists()


@cases("may", True, False)
async def test_pod_that_never_joins_is_deleted_with_its_own_key(tmp_path: Path, may: bool) -> None:
    """RunPod starts a container again that ends, and bills on."""
    async with trial(CASES["runpod"]) as it:
        simulator = it.simulation.simulator
        assert isinstance(simulator, RunPodSimulator)
        simulator.own_keys_delete = may
        script = boot_script(it.renter.abilities, 86400)
        assert "kill -TERM 1" not in script
        assert (await it.renter.create([replace(await it.order(), user_data=script)]))[0].ok
        [(id, pod)] = it.market.instances.items()
        assert script in unpacked(pod.order.user_data)
        environment = "".join(f"{name}={value}\0" for name, value in simulator.environment(id).items())
        (tmp_path / "environ").write_text(environment)
        here = script.replace("/proc/1/environ", f"{tmp_path}/environ").replace(WATCHDOG, f"{tmp_path}/watchdog")
        await asyncio.to_thread(run_with_stand_ins, here, tmp_path)
        assert pod.live is not may
        tries = [one["status"] for one in it.simulation.requests if one["method"] == "DELETE"]
        assert tries == ([204, 404] if may else [401, 401]), "it tries again, as long as it runs"
