"""Host keys of rented machines: given at boot, expected at the join, replaced there, and another one is rejected."""

import logging
import re
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.contract.rental_providers import CASES
from tests.support.cases import cases
from tests.support.sshd_server import running_sshd
from tests.unit.cloud.scene import Scene, scene
from tests.unit.cloud.test_boot_script import unpacked
from tests.unit.cloud.test_join import Reef, machine

from shoal.cloud.providers.api import Abilities
from shoal.cloud.service import join as joining
from shoal.cloud.service.boot import boot_script
from shoal.cloud.service.connections import MachineConnector
from shoal.cloud.service.context import UNFIT_PREFIX
from shoal.cloud.service.machine_keys import ACTIVATE, REPLACE, MachineKey, install_script, replace_script
from shoal.errors import HostKeyChanged
from shoal.hosts.api import Result

PEM = re.compile(r"-----BEGIN OPENSSH PRIVATE KEY-----\n.*?-----END OPENSSH PRIVATE KEY-----\n", re.DOTALL)


def sent_keys(it: Scene, kind: str) -> list[str]:
    """The public halves of the keys that the machines got in their boot scripts."""
    keys = []
    for one in it.machines(kind):
        [text] = set(PEM.findall(unpacked(one.order.user_data)))
        show = ["ssh-keygen", "-y", "-f", "/dev/stdin"]
        keys.append(subprocess.run(show, input=text, capture_output=True, text=True, check=True).stdout)
    return [" ".join(key.split()[:2]) for key in keys]


def files_with(directory: Path, text: bytes) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and text in path.read_bytes()]


@cases("kind", *CASES)
async def test_order_gives_the_machine_the_key_that_the_ledger_expects(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with scene(tmp_path, kind) as it:
        it.slurm.submit("1", 2)
        await it.until(lambda: len(it.machines()) == 2)
        expected = [rental.host_key for rental in it.rentals()]
        assert sorted(sent_keys(it, kind)) == sorted(expected)
        assert all(key.startswith("ssh-ed25519 ") for key in expected)
        several = it.context.accounts[kind].abilities.at_once > 1
        assert len(set(expected)) == (1 if several else 2), "one for each order, which may be of several machines"
        await it.until(lambda: it.context.accounts[kind].machine(it.rentals()[0]) is not None)
        listed = it.context.accounts[kind].machine(it.rentals()[0])
        assert listed is not None and listed.account == kind  # what the node reads of its provider follows it
        assert listed is not None and listed.host_key == it.rentals()[0].host_key
        assert "PRIVATE KEY" not in caplog.text
    assert files_with(tmp_path, b"PRIVATE KEY") == [], "the controller stores public halves only"


def test_provider_without_boot_scripts_gets_no_key() -> None:
    key = MachineKey.make()
    assert boot_script(Abilities(boots_with="none"), 600, key) == ""
    assert "PRIVATE" not in repr(key)


@cases("container", False, True)
def test_boot_script_installs_the_key_once(tmp_path: Path, container: bool) -> None:
    key = MachineKey.make()
    calls, ssh = tmp_path / "calls", tmp_path / "ssh"
    reload = f"echo reload >> {calls}"
    for _ in range(2):  # as where a provider runs it at every boot
        subprocess.run(["sh", "-eu"], input=install_script(key, reload, str(ssh)), text=True, check=True)
    private = ssh / "ssh_host_ed25519_key"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    made = subprocess.run(["ssh-keygen", "-y", "-f", private], check=True, text=True, capture_output=True).stdout
    assert " ".join(made.split()[:2]) == key.public
    assert (ssh / "ssh_host_ed25519_key.pub").read_text() == f"{key.public}\n"
    assert calls.read_text() == "reload\n"
    script = boot_script(Abilities(container=container), 600, key)
    assert ("kill -HUP" in script) is container
    assert ("systemctl --no-block try-reload-or-restart ssh" in script) is not container


def test_join_replaces_the_key_once(tmp_path: Path) -> None:
    key = MachineKey.make()
    subprocess.run(["sh", "-eu"], input=install_script(key, "true", str(tmp_path)), text=True, check=True)
    script = replace_script(str(tmp_path), f"echo reload >> {tmp_path}/calls")
    run = [subprocess.run(["sh", "-c", script], check=True, text=True, capture_output=True).stdout for _ in range(2)]
    assert run[0] == run[1] != f"{key.public}\n"
    private = tmp_path / "ssh_host_ed25519_key"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    made = subprocess.run(["ssh-keygen", "-y", "-f", private], check=True, text=True, capture_output=True).stdout
    assert " ".join(made.split()[:2]) == run[0].strip()
    assert (tmp_path / "calls").read_text() == "reload\n"


def test_key_is_active_once_sshd_has_been_told() -> None:
    assert "systemctl try-reload-or-restart ssh.service" in ACTIVATE[-1]


async def test_joined_machine_has_a_key_of_its_own_in_the_ledger(tmp_path: Path) -> None:
    first, second = MachineKey.make().public, MachineKey.make().public
    reef = Reef(tmp_path, 1, 2)
    recorded: dict[str, str] = {}
    reef.joiner.record_host_key = recorded.__setitem__
    reef.world.hosts["cloud1"].answers[REPLACE] = Result(0, f"{second}\n".encode())
    assert await reef.joiner.join({"cloud1": machine(1, host_key=first), "cloud2": machine(2)}) == {
        "cloud1": "",
        "cloud2": "",
    }
    assert recorded == {"t1": second}, "a machine without a boot script keeps its key, trusted on first use"


async def test_machine_that_returns_no_key_does_not_join(tmp_path: Path) -> None:
    reef = Reef(tmp_path, 1)
    reef.world.hosts["cloud1"].answers[REPLACE] = Result(0, b"no key\n")
    errors = await reef.joiner.join({"cloud1": machine(1, host_key=MachineKey.make().public)})
    assert errors["cloud1"].startswith("cannot replace its host key")


@cases("timeout, unfit", (0.0, True), (3600.0, False))
async def test_machine_with_another_key_is_retried_and_then_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float, unfit: bool
) -> None:
    monkeypatch.setattr(joining, "SSH_WAIT_S", 0.0)
    monkeypatch.setattr(joining, "OTHER_KEY_TIMEOUT_S", timeout)
    reef = Reef(tmp_path, 1, 2)
    reef.world.hosts["cloud1"].unreachable = HostKeyChanged("cloud1", "shows another key", hint="")
    given = {"host_key": MachineKey.make().public}
    errors = await reef.joiner.join({"cloud1": machine(1, **given), "cloud2": machine(2)})
    assert errors["cloud2"] == ""
    assert errors["cloud1"].startswith(UNFIT_PREFIX) is unfit
    assert "shows another host key than the one that the machine got at boot" in errors["cloud1"]
    assert reef.asked("cloud1") == []


async def test_connection_pins_the_expected_key(tmp_path: Path) -> None:
    connector = MachineConnector("c1", tmp_path / "id", tmp_path / "known")
    expected = MachineKey.make().public
    machines: dict[str, Any] = {"cloud1": machine(1, host_key=expected), "cloud2": machine(2)}
    targets = connector.fleet(machines).targets
    assert [targets[name].host_key for name in machines] == [expected, None]


async def test_ssh_rejects_another_key_than_the_expected_one(tmp_path: Path) -> None:
    """With a real SSH server, which has the key of another machine."""
    with running_sshd(tmp_path / "sshd") as server:
        connector = MachineConnector("c1", server.identity, tmp_path / "known")
        shown = replace(machine(1), host="127.0.0.1", port=server.port, host_key=MachineKey.make().public)
        async with connector.fleet({"cloud1": shown}) as fleet:
            with pytest.raises(HostKeyChanged):
                await fleet.host("cloud1")
