"""The fake provider with injected failures."""

import pytest

from shoal.errors import ProviderError
from shoal.hosts.provider import Request
from shoal.spec.finding import Finding
from shoal.spec.member import Shape
from shoal_simulators.fake_provider import FakeProvider

WANTED = [Request("n1", Shape()), Request("n2", Shape())]


async def test_failed_host_does_not_stop_the_others() -> None:
    fake = FakeProvider()
    fake.failing["n1"] = "no capacity"
    with pytest.raises(ProviderError, match="host n1: no capacity") as caught:
        await fake.create("reef", WANTED, lambda what, done: None)
    assert caught.value.hosts == {"n1": "no capacity"}
    assert [one.name for one in await fake.instances("reef")] == ["n2"]
    del fake.failing["n1"]
    assert [one.name for one in await fake.create("reef", WANTED, lambda what, done: None)] == ["n1", "n2"]


def test_check_returns_the_configured_findings() -> None:
    finding = Finding("error", "no account")
    assert FakeProvider(findings=[finding]).check(WANTED) == [finding]


async def test_faults_are_recorded() -> None:
    fake = FakeProvider()
    await fake.create("reef", WANTED, lambda what, done: None)
    await fake.faults.cut("reef", "n1")
    await fake.faults.fill_disk("reef", "n2")
    await fake.faults.reboot("reef", "n2")
    assert (fake.faults.cuts, fake.faults.full) == ({("reef", "n1")}, {("reef", "n2")})
    assert fake.faults.reboots == [("reef", "n2")]
    await fake.faults.heal("reef", "n1")
    await fake.faults.empty_disk("reef", "n2")
    assert (fake.faults.cuts, fake.faults.full) == (set(), set())
