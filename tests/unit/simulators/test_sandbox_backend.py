"""The operations of a simulated cloud on its hosts, one after the other, and the metadata service."""

import asyncio
import logging
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.errors import ProviderError
from shoal.sandbox.layout import Layout, Site
from shoal_simulators.instances import InstanceOrder, MachineType, Profile, SimulatedInstance
from shoal_simulators.sandbox_backend import SandboxBackend, host_image, metadata_rules

MACHINE = SimulatedInstance("m1", InstanceOrder("n1", "gpu", "here"), 1.0, 0.0, 0.0)


class RecordingBackend(SandboxBackend):
    """Does nothing to any host, and tells what it would have done."""

    def __init__(self, cache: Path) -> None:
        super().__init__("lambda", "t-notice", cache=cache)
        self.did: list[str] = []
        self.removed = asyncio.Event()

    async def _make(self, wanted: SimulatedInstance, type: MachineType, profile: Profile) -> None:
        self.did.append("making")
        await asyncio.Event().wait()

    async def _power_off(self, id: str) -> None:
        self.did.append("kill")
        raise ProviderError("the plug is stuck")

    async def _remove(self, id: str) -> None:
        self.did.append("remove")
        self.removed.set()


async def test_machine_is_removed_although_the_previous_operation_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = RecordingBackend(tmp_path)
    backend.kill("m1")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR):
        backend.end("m1")
        await asyncio.wait_for(backend.removed.wait(), 30)
    assert backend.did == ["kill", "remove"]
    assert "the previous operation on a machine failed: the plug is stuck" in caplog.text


async def test_machine_under_creation_is_cancelled_and_removed(tmp_path: Path) -> None:
    backend = RecordingBackend(tmp_path)
    backend.begin(MACHINE, MachineType("gpu"), Profile())
    await asyncio.sleep(0)
    backend.end("m1")
    await asyncio.wait_for(backend.removed.wait(), 30)
    assert backend.did == ["making", "remove"]


async def test_unopened_backend_removes_nothing_at_close(tmp_path: Path) -> None:
    backend = SandboxBackend("lambda", "t-notice", cache=tmp_path)
    backend.store.parent.mkdir(parents=True)
    backend.store.write_text("{}")
    await backend.close()
    assert backend.store.exists()


@cases(
    "image, system",
    ("", "debian12"),
    ("lambda-stack-24-04", "debian13"),
    ("projects/debian-cloud/global/images/family/debian-12", "debian12"),
    ("debian:13", "debian13"),
    ("Ubuntu 22.04", "debian12"),
    ("ami-0123456789abcdef0", "debian12"),
)
def test_machine_runs_the_system_of_its_image(image: str, system: str) -> None:
    assert host_image(image) == system


async def test_unknown_image_is_rejected_before_any_creation(tmp_path: Path) -> None:
    backend = SandboxBackend("lambda", "t-notice", image="debian9", cache=tmp_path)
    with pytest.raises(ProviderError, match="the sandbox has no image 'debian9'") as caught:
        await backend.open()
    assert caught.value.hint == "use one of: debian11, debian12, debian13, sid" and not backend.layout.dir.exists()


def test_metadata_is_served_only_to_the_machines_of_the_cloud(tmp_path: Path) -> None:
    layout, site = Layout(tmp_path, "reef"), Site("a", 0, "10.64.1.0/24")
    empty = (
        f"table ip {layout.table} {{\n"
        "    chain cloud_tide_pool {\n"
        "        type nat hook prerouting priority dstnat; policy accept;\n"
        "    }\n"
        "}\n"
        f"flush chain ip {layout.table} cloud_tide_pool\n"
    )
    assert metadata_rules(layout, site, "tide-pool", [], 4711) == empty
    assert metadata_rules(layout, site, "tide-pool", ["10.64.1.9", "10.64.1.3"], 4711) == empty + (
        f'add rule ip {layout.table} cloud_tide_pool iifname "{layout.bridge(site)}" '
        "ip saddr { 10.64.1.3, 10.64.1.9 } ip daddr 169.254.169.254 tcp dport 80 dnat to 10.64.1.1:4711\n"
    )
