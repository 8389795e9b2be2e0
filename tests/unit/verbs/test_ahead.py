"""Hosts are met while a command still loads."""

from __future__ import annotations

import threading

import pytest

from shoal.errors import ProviderError, UsageError
from shoal.hosts.api import Target
from shoal.hosts.fake import FakeConnector, FakeHost
from shoal.providers.fake import FakeProvider
from shoal.spec.load import load_text
from shoal.verbs.ahead import AT_ONCE, connected
from shoal.verbs.context import Context

SPEC = "cluster: reef\ncontroller: {{host: c1}}\nnodesets:\n  lab: {{hosts: ['n[1-{}]']}}\n"


class Slow(FakeConnector):
    """Says when it is asked for a host."""

    def __init__(self, *hosts: FakeHost) -> None:
        super().__init__(*hosts)
        self.asked = threading.Event()

    async def connect(self, target: Target) -> FakeHost:
        self.asked.set()
        return await super().connect(target)


def reef(nodes: int = 2) -> tuple[Context, Slow]:
    connector = Slow(*(FakeHost(name) for name in ("c1", *(f"n{number}" for number in range(1, nodes + 1)))))
    return Context(load_text(SPEC.format(nodes), "shoal.yaml"), connector=connector), connector


async def test_hosts_are_connected_to_before_all_is_loaded() -> None:
    context, connector = reef()
    async with connected(context, lambda: connector.asked.wait(30)) as (fleet, met_first):
        assert met_first
        assert (await fleet.host("n1")).name == "n1"
    assert [host.connects for host in connector.hosts.values()] == [1, 1, 1]
    assert all(host.closed for host in connector.hosts.values())


async def test_of_a_large_cluster_only_the_controller_is_met() -> None:
    context, connector = reef(AT_ONCE)
    async with connected(context, lambda: connector.asked.wait(30)) as (fleet, _):
        await fleet.host("c1")
    assert {name for name, host in connector.hosts.items() if host.connects} == {"c1"}


async def test_a_wrong_option_is_told_and_the_hosts_are_left() -> None:
    context, connector = reef()

    def wrong() -> None:
        connector.asked.wait(30)
        raise UsageError("--nodes is wrong")

    with pytest.raises(UsageError, match="--nodes is wrong"):
        async with connected(context, wrong):
            pass
    assert all(host.closed for host in connector.hosts.values() if host.connects)


async def test_a_wrong_option_is_told_before_hosts_that_are_not_there() -> None:
    spec = load_text("cluster: none\ncontroller: {provider: sandbox, compute: true}\n", "shoal.yaml")

    def wrong() -> None:
        raise UsageError("--nodes is wrong")

    for load, expected in ((wrong, UsageError), (lambda: None, ProviderError)):
        with pytest.raises(expected):
            async with connected(Context(spec, providers=lambda name: FakeProvider()), load):
                pass
