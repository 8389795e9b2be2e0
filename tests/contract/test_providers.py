"""What every provider guarantees. The fake always runs; the sandbox where it can."""

import os
import shutil
from collections.abc import AsyncIterator

import pytest
from tests.sandbox_faults import SandboxFaults

from shoal.errors import ProviderError
from shoal.hosts.api import Target
from shoal.hosts.provider import Provider, Request, provider
from shoal.spec.member import Shape
from shoal_simulators.fake_provider import FakeFaults, FakeProvider

CLUSTER = "contract"
WANTED = [Request("n1", Shape()), Request("n2", Shape(site="b"))]


@pytest.fixture(params=["fake", pytest.param("sandbox", marks=pytest.mark.sandbox)])
async def made(request: pytest.FixtureRequest) -> AsyncIterator[Provider]:
    if request.param == "sandbox" and (os.geteuid() != 0 or not shutil.which("systemd-nspawn")):
        pytest.skip("needs root and systemd-nspawn")
    it: Provider = FakeProvider() if request.param == "fake" else provider(request.param)
    await it.destroy(CLUSTER, quiet)
    yield it
    await it.destroy(CLUSTER, quiet)


def quiet(what: str, done: float) -> None:
    assert what
    assert 0 <= done <= 1


async def test_cluster_is_empty_before_create_and_after_destroy(made: Provider) -> None:
    assert await made.instances(CLUSTER) == []
    await made.create(CLUSTER, WANTED, quiet)
    await made.destroy(CLUSTER, quiet)
    assert await made.instances(CLUSTER) == []


async def test_hosts_are_in_the_requested_order_and_reachable(made: Provider) -> None:
    instances = await made.create(CLUSTER, WANTED, quiet)
    assert [(one.name, one.state) for one in instances] == [("n1", "running"), ("n2", "running")]
    assert [one.shape for one in instances] == [request.shape for request in WANTED]
    for one in instances:
        assert isinstance(one.target, Target)
        assert one.target.name == one.name
        assert one.target.address
    assert len({one.target.address for one in instances}) == 2
    assert await made.instances(CLUSTER) == instances


async def test_second_create_adds_only_missing_hosts(made: Provider) -> None:
    first = await made.create(CLUSTER, WANTED[:1], quiet)
    assert await made.create(CLUSTER, WANTED[:1], quiet) == first
    both = await made.create(CLUSTER, WANTED, quiet)
    assert both[0] == first[0]
    assert await made.instances(CLUSTER) == both


async def test_delete_removes_named_hosts_and_accepts_missing_hosts(made: Provider) -> None:
    both = await made.create(CLUSTER, WANTED, quiet)
    await made.delete(CLUSTER, ["n1", "never-there"], quiet)
    await made.delete(CLUSTER, ["n1"], quiet)
    assert await made.instances(CLUSTER) == both[1:]


async def test_delete_and_destroy_of_a_missing_cluster_are_not_errors(made: Provider) -> None:
    await made.delete("never-was", ["n1"], quiet)
    await made.destroy("never-was", quiet)
    assert await made.instances("never-was") == []


async def test_clusters_are_isolated(made: Provider) -> None:
    mine = await made.create(CLUSTER, WANTED[:1], quiet)
    try:
        [other] = await made.create("contract-b", WANTED[:1], quiet)
        assert other.target.address != mine[0].target.address
    finally:
        await made.destroy("contract-b", quiet)
    assert await made.instances(CLUSTER) == mine


async def test_killed_host_is_stopped_and_create_starts_the_host_again(made: Provider) -> None:
    before = await made.create(CLUSTER, WANTED, quiet)
    faults = faults_of(made)
    await faults.kill(CLUSTER, "n1")
    assert [one.state for one in await made.instances(CLUSTER)] == ["stopped", "running"]
    assert await made.create(CLUSTER, WANTED, quiet) == before


async def test_frozen_host_is_listed_as_frozen_until_thawed(made: Provider) -> None:
    await made.create(CLUSTER, WANTED[:1], quiet)
    faults = faults_of(made)
    await faults.freeze(CLUSTER, "n1")
    assert [one.state for one in await made.instances(CLUSTER)] == ["frozen"]
    await faults.thaw(CLUSTER, "n1")
    assert [one.state for one in await made.instances(CLUSTER)] == ["running"]


async def test_fault_on_a_missing_host_names_the_host(made: Provider) -> None:
    faults = faults_of(made)
    calls = (faults.cut, faults.heal, faults.freeze, faults.thaw, faults.kill, faults.reboot, faults.fill_disk)
    for call in calls:
        with pytest.raises(ProviderError, match=f"cluster {CLUSTER} has no host n9"):
            await call(CLUSTER, "n9")


def faults_of(made: Provider) -> FakeFaults | SandboxFaults:
    return made.faults if isinstance(made, FakeProvider) else SandboxFaults(made.cache)
