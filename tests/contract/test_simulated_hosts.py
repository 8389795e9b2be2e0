"""The machines of a simulated cloud are hosts: they boot, accept SSH, fail and are deleted."""

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.support.over_ssh import SshFailed, over_ssh
from tests.support.sshd_server import make_key

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import ProviderLogin, Query, RentalOrder, RentalProvider, RentedInstance
from shoal.errors import ProviderError
from shoal.hosts.api import Result, Target
from shoal.hosts.provider import Request
from shoal.local_files import cache_dir
from shoal.sandbox.layout import Layout
from shoal.sandbox.lifecycle import ssh_answers
from shoal.sandbox.programs import call
from shoal.sandbox.provider import SandboxProvider
from shoal.spec.member import Shape
from shoal.verbs.simulate import Simulated, simulate
from shoal_simulators.instances import Fault, InstanceOrder, MachineType, Profile
from shoal_simulators.market import Market
from shoal_simulators.sandbox_backend import SandboxBackend

CLUSTER = "t-simulated"
TYPES = (MachineType("gpu", "A10", 2, 24, 1, 3, 1.0, places={"here": 9}),)
VM = Profile(user="ubuntu", boot_s=0.0, stop_s=0.0)
SCRIPT = "#!/bin/sh\nhostname > /root/user-data-ran\n"

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("systemd-nspawn"), reason="needs root and systemd-nspawn"),
]


@pytest.fixture
async def backend() -> AsyncIterator[SandboxBackend]:
    await SandboxProvider().destroy(CLUSTER, _silent)
    made = SandboxBackend("lambda", CLUSTER)
    await made.open()
    yield made
    await made.close()
    await SandboxProvider().destroy(CLUSTER, _silent)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("key") / "id"
    make_key(path)
    return path


def wanted(key: Any, name: str = "n1", **more: Any) -> InstanceOrder:
    public = key.with_suffix(".pub").read_text()
    return replace(InstanceOrder(name, "gpu", "here", public_keys=(public,), user_data=SCRIPT), **more)


async def until(market: Market, holds: Callable[[], object]) -> None:
    async with asyncio.timeout(90):
        while not holds():
            await asyncio.sleep(0.1)
            market.update()


async def on(address: str, port: int, key: Any, user: str, command: str) -> Result:
    """Run a shell command on a machine, with the key that it was ordered with."""
    return await over_ssh(Target("machine", address, port, user, key), command)


async def test_machine_boots_accepts_the_key_runs_its_script_and_is_deleted(backend: SandboxBackend, key: Any) -> None:
    market = Market(VM, TYPES, backend)
    one = market.order(wanted(key), "0" * 31 + "1")
    await until(market, lambda: one.phase == "up")
    said = await on(one.host, 22, key, "ubuntu", "id -un; sudo id -un; nvidia-smi -L | wc -l; cat /dev/nvidia1")
    assert said.text.split() == ["ubuntu", "root", "2"]
    script = await on(one.host, 22, key, "ubuntu", "until sudo cat /root/user-data-ran; do sleep 0.1; done")
    assert script.text.strip() == backend.host_name(one.id)
    with pytest.raises(SshFailed, match="Permission denied"):
        await on(one.host, 22, key, "root", "true")

    assert await SandboxProvider().instances(CLUSTER) == []
    market.delete(one.id)
    await until(market, lambda: one.phase == "gone")
    assert Layout(cache_dir(), CLUSTER).hosts() == {}
    assert not await ssh_answers(one.host)


async def test_cluster_hosts_reach_a_machine_and_stay_after_its_end(backend: SandboxBackend, key: Any) -> None:
    provider = SandboxProvider()
    [own] = await provider.create(CLUSTER, [Request("c1", Shape())], _silent)
    market = Market(VM, TYPES, backend)
    one = market.order(wanted(key), "m1")
    await until(market, lambda: one.phase == "up")
    assert own.target.address
    ask = f"exec 3<>/dev/tcp/{one.host}/22; head -c 4 <&3"
    reached = await on(own.target.address, 22, own.target.identity, "root", f"bash -c '{ask}'")
    assert reached.text == "SSH-"
    await backend.close()
    assert [found.name for found in await provider.instances(CLUSTER)] == ["c1"]
    assert set(Layout(cache_dir(), CLUSTER).hosts()) == {"c1"}


async def test_machines_can_be_broken_from_the_start(backend: SandboxBackend, key: Any) -> None:
    market = Market(VM, TYPES, backend)
    market.faults = [Fault("bad-gpu"), Fault("never-reachable", region="here")]
    both_broken = market.order(wanted(key, "n1"), "m1")
    market.faults = [Fault("bad-gpu")]
    bad_gpu = market.order(wanted(key, "n2"), "m2")
    await until(market, lambda: bad_gpu.phase == "up" and both_broken.phase == "up" and both_broken.host)
    assert not await ssh_answers(both_broken.host)
    said = await on(bad_gpu.host, 22, key, "ubuntu", "nvidia-smi -L; echo $?; cat /dev/nvidia0")
    assert said.status != 0
    assert said.text.split() == ["15"]
    assert "No such device or address" in said.error_text


async def test_dead_or_powered_off_machine_is_in_error_until_deleted(backend: SandboxBackend, key: Any) -> None:
    market = Market(VM, TYPES, backend)
    one, other = market.order(wanted(key, "n1"), "m1"), market.order(wanted(key, "n2"), "m2")
    await until(market, lambda: one.phase == other.phase == "up")
    market.kill(one.id)
    with contextlib.suppress(OSError):
        await on(other.host, 22, key, "ubuntu", "sudo systemctl poweroff")
    await until(market, lambda: one.phase == other.phase == "error")
    await until(market, lambda: backend.status("m1").state == "dead")
    assert not await ssh_answers(one.host)
    market.delete("m1")
    market.delete("m2")
    await until(market, lambda: one.phase == other.phase == "gone")


@pytest.mark.matrix  # it boots twice; starting after a stop is part of the rented controller's test, too
async def test_stopped_machine_ends_its_services_and_keeps_its_disk(backend: SandboxBackend, key: Any) -> None:
    market = Market(VM, TYPES, backend)
    one = market.order(wanted(key), "m1")
    await until(market, lambda: one.phase == "up")
    unit = "[Service]\\nType=oneshot\\nRemainAfterExit=yes\\nExecStop=touch /root/ended\\n"
    write = f"printf '{unit}' | sudo tee /etc/systemd/system/last.service && sudo systemctl start last"
    assert (await on(one.host, 22, key, "ubuntu", write)).status == 0
    market.stop(one.id)
    market.start(one.id)  # at once: it begins when the machine has shut down
    await until(market, lambda: one.phase == "error" or (one.phase == "up" and one.host))
    assert one.phase == "up"
    assert (await on(one.host, 22, key, "ubuntu", "sudo test -e /root/ended")).status == 0


async def test_kept_machines_are_available_to_the_next_run(backend: SandboxBackend, key: Any) -> None:
    before = Market(VM, TYPES, backend, store=backend.store)
    one = before.order(wanted(key, "n1"), "m1")
    lost = before.order(wanted(key, "n2"), "m2")
    await until(before, lambda: one.phase == lost.phase == "up")
    await backend.close(keep=True)
    await SandboxProvider().delete(CLUSTER, [backend.host_name("m2")], _silent)
    stray = SandboxBackend("lambda", CLUSTER)
    await stray.open()
    Market(VM, TYPES, stray).order(wanted(key, "n3"), "m3")
    await stray.close(keep=True)

    after = SandboxBackend("lambda", CLUSTER)
    await after.open()
    market = Market(VM, TYPES, after, store=after.store)
    market.adopt()
    assert {id: found.phase for id, found in market.instances.items()} == {"m1": "up", "m2": "error"}
    assert (await on(market.instances["m1"].host, 22, key, "ubuntu", "id -un")).text == "ubuntu\n"
    await until(market, lambda: set(after.layout.hosts()) == {backend.host_name("m1")})
    await after.close()
    assert not after.layout.dir.exists()


async def test_container_is_reachable_on_its_own_port_and_runs_its_command(backend: SandboxBackend, key: Any) -> None:
    container = Profile(user="root", boot_s=0.0, stop_s=0.0, container=True)
    market = Market(container, TYPES, backend)
    one = market.order(wanted(key, user_data="echo ran > /root/args-ran"), "m1")
    await until(market, lambda: one.phase == "up")
    assert one.port != 22
    look = "until cat /root/args-ran; do sleep 0.1; done; ls /dev/net /run/systemd"
    said = await on(one.host, one.port, key, "root", look)
    assert said.text.split() == ["ran"]


async def test_container_whose_first_process_ends_is_started_again(backend: SandboxBackend, key: Any) -> None:
    pods = Profile(user="root", boot_s=0.0, stop_s=0.0, container=True, restarts=True)
    market = Market(pods, TYPES, backend)
    one = market.order(wanted(key, user_data="echo ran >> /root/args-ran"), "m1")
    await until(market, lambda: one.phase == "up")
    look = "until [ $(wc -l < /root/args-ran) = {} ]; do sleep 0.1; done; cat /proc/sys/kernel/random/uuid"
    await on(one.host, one.port, key, "root", look.format(1))
    with contextlib.suppress(OSError):
        await on(one.host, one.port, key, "root", "kill -TERM 1; sleep 60")
    await until(market, lambda: one.phase != "up" or not backend._tasks["m1"].done())
    await until(market, backend._tasks["m1"].done)
    assert one.phase == "up"  # as its cloud shows it, and bills it
    assert (await on(one.host, one.port, key, "root", look.format(2))).status == 0
    market.delete(one.id)
    await until(market, lambda: one.phase == "gone")


async def test_spot_machines_of_several_clouds_get_their_own_preemption_notice(key: Any) -> None:
    layout = Layout(cache_dir(), CLUSTER)
    ours, google = "notice", "computeMetadata/v1/instance/preempted"
    async with simulated("sandbox") as sandbox, simulated("gcp") as gcp:
        mine, theirs = await asyncio.gather(
            spot("sandbox", sandbox.url, "cpu", key), spot("gcp", gcp.url, "e2-standard-2", key)
        )
        assert "404" in await asked(mine, key, ours)
        assert await asked(theirs, key, google) == "FALSE"
        await taken_away(gcp.url, theirs)
        assert await asked(theirs, key, google) == "TRUE"
        assert "404" in await asked(mine, key, ours)
        await taken_away(sandbox.url, mine)
        assert (await asked(mine, key, ours)).startswith('{"seconds":')
        assert "404" in await asked(mine, key, google)
        # This machine itself may be in a cloud that answers there.
        bridge = layout.bridge(layout.sites()["a"])
        assert "169.254.169.254" not in await call("ip", "-4", "addr", "show", "dev", bridge)
    assert not layout.dir.exists()
    assert layout.table not in await call("nft", "list", "tables")


async def test_second_simulator_is_rejected_and_the_machines_of_the_first_stay(key: Any) -> None:
    async with simulated("sandbox") as told:
        there = await spot("sandbox", told.url, "cpu", key)
        with pytest.raises(ProviderError) as caught:
            await simulate("sandbox", lambda found: None, cluster=CLUSTER)
        assert str(caught.value) == (
            f"another process simulates sandbox for cluster {CLUSTER}\n  fix: use that one, or stop it with Ctrl-C"
        )
        async with renting("sandbox", told.url) as rents:
            assert [(one.id, one.state) for one in await rents.instances(CLUSTER)] == [(there.id, "up")]
        assert (await on(there.host, 22, key, "root", "id -un")).text == "root\n"


async def test_failed_start_keeps_the_kept_machines(backend: SandboxBackend, key: Any) -> None:
    before = Market(VM, TYPES, backend, store=backend.store)
    one = before.order(wanted(key), "m1")
    await until(before, lambda: one.phase == "up")
    await backend.close(keep=True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ProviderError, match=r"cannot listen on 127\.0\.0\.1"):
            await simulate("lambda", lambda found: None, cluster=CLUSTER, port=taken.getsockname()[1])
    assert (await on(one.host, 22, key, "ubuntu", "id -un")).text == "ubuntu\n"
    await backend.open()  # whose end takes them away


@contextlib.asynccontextmanager
async def simulated(kind: str) -> AsyncIterator[Simulated]:
    """`shoal simulate KIND` with hosts, until the block ends."""
    found: asyncio.Future[Simulated] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(simulate(kind, found.set_result, cluster=CLUSTER))
    try:
        yield await asyncio.wait_for(found, 120)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def renting(kind: str, url: str) -> AsyncIterator[RentalProvider]:
    rents = rental_provider(ProviderLogin("acme", kind, "sk-simulated", url, {"project": "reefs"}))
    try:
        yield rents
    finally:
        await rents.close()


async def spot(kind: str, url: str, type: str, key: Any) -> RentedInstance:
    """A spot machine of a simulated cloud, up."""
    public = key.with_suffix(".pub").read_text()
    async with renting(kind, url) as rents:
        [offer, *_] = await rents.offers(Query(types=(type,), market="spot"))
        [outcome] = await rents.create([RentalOrder(CLUSTER, "n1", "t1", offer, public)])
        assert outcome.ok, outcome
        async with asyncio.timeout(120):
            while True:
                [there] = await rents.instances(CLUSTER)
                if there.state == "up":
                    return there
                await asyncio.sleep(0.2)


async def asked(machine: RentedInstance, key: Any, path: str) -> str:
    """The answer of the metadata service to a machine."""
    ask = (
        "import urllib.request as u; "
        f"r = u.Request('http://169.254.169.254/{path}', headers=dict([('Metadata-Flavor', 'Google')])); "
        "print(u.urlopen(r, timeout=60).read().decode())"
    )
    said = await on(machine.host, 22, key, machine.user, f'python3 -c "{ask}"')
    return (said.text or said.error_text).strip()


async def taken_away(url: str, machine: RentedInstance) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        (await client.post(f"/_simulator/preempt/{machine.id}")).raise_for_status()


def _silent(what: str, done: float) -> None:
    """Progress that is not shown."""
