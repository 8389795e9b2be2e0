"""Machines log out of the tailnet before they are released, and a failed logout delays no release."""

import asyncio
from pathlib import Path

import pytest
from tests.support.fake_world import spec_of
from tests.unit.cloud.scene import Scene

from shoal.cloud.providers.api import RentedInstance
from shoal.cloud.service import join
from shoal.cloud.service.join import LiveJoiner
from shoal.cloud.service.settings import ServiceSettings
from shoal.hosts.api import Connector
from shoal.roles.tailscale import LOGOUT
from shoal_simulators.fake_host import FakeConnector, FakeHost, FakeProgram

TAILNET = """
cluster: reef
network: {kind: tailscale, auth_key: env:TS_AUTHKEY, tags: [slurm]}
controller: {host: c1}
nodesets: {cloud: {provider: lambda, type: gpu_1x_a10, max: 4}}
providers: {lambda: {key: env:K}}
"""
NODES = {
    f"cloud{n}": RentedInstance(f"i-{n}", "reef", f"cloud{n}", f"t{n}", "up", "active", f"10.0.0.{n}") for n in (1, 2)
}


def joiner(tmp_path: Path, connector: Connector, text: str = TAILNET) -> LiveJoiner:
    settings = ServiceSettings(spec_of(text), {}, "ssh-ed25519 AAAA", tmp_path / "id_ed25519")
    return LiveJoiner(settings, dict, known_hosts=tmp_path / "met", here=connector, there=lambda path: connector)


async def test_released_machines_log_out_although_another_is_unreachable(tmp_path: Path) -> None:
    first, second = FakeHost("cloud1", unreachable=True), FakeHost("cloud2", {LOGOUT: b""})
    await joiner(tmp_path, FakeConnector(first, second)).leave(NODES)
    assert [(call.argv, call.root) for call in second.calls] == [(LOGOUT, True)]


async def test_hanging_logout_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(program: FakeProgram) -> int:
        await asyncio.sleep(3600)
        return 0

    monkeypatch.setattr(join, "LOGOUT_TIMEOUT_S", 0.1)
    hosts = [FakeHost(name, {LOGOUT: hangs}) for name in NODES]
    async with asyncio.timeout(60):
        await joiner(tmp_path, FakeConnector(*hosts)).leave(NODES)
    assert [call.argv for host in hosts for call in host.calls] == [LOGOUT, LOGOUT]


async def test_no_logout_on_another_network(tmp_path: Path) -> None:
    hosts = [FakeHost(name) for name in NODES]
    text = TAILNET.replace("network: {kind: tailscale, auth_key: env:TS_AUTHKEY, tags: [slurm]}\n", "")
    await joiner(tmp_path, FakeConnector(*hosts), text).leave(NODES)
    assert not [call for host in hosts for call in host.calls]


async def test_service_logs_each_machine_out_once_before_release(it: Scene) -> None:
    it.slurm.submit("1", 2, seconds=60)
    await it.until(lambda: len(it.machines()) == 2)
    ids = sorted(machine.id for machine in it.machines())
    await it.until(lambda: it.slurm.settled and not it.ledger.live())
    assert sorted(it.joiner.parted) == ids
    assert it.machines() == []
