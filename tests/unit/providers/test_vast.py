"""Behaviour specific to Vast.ai; the contract tests cover what all providers share."""

import asyncio
import base64
import gzip
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.rental_providers import CASES, CLUSTER, PUBLIC_KEY, Trial

from shoal.cloud.providers import vast
from shoal.cloud.providers.api import FailureKind, Offer, Query, RentalOrder
from shoal.cloud.service.boot import boot_script
from shoal.cloud.service.machine_keys import MachineKey

CASE = CASES["vast"]
ORDER = RentalOrder(CLUSTER, "gpu1", "t0ken1", CASE.offer, PUBLIC_KEY, user_data="#!/bin/sh\ntrue\n")
SPOT = Offer("acme", "RTX 4090", "DE", market="spot", usd_hour=1.0)


def unpacked(args: str) -> str:
    match = re.search(r"echo (\S+) \|", args)
    assert match
    return gzip.decompress(base64.b64decode(match[1])).decode()


def test_whole_boot_script_fits() -> None:
    script = boot_script(vast.VastProvider.abilities, 86400, MachineKey.make())
    order = replace(ORDER, user_data=script, public_key="ssh-rsa " + "A" * 724 + " me")
    args = vast.boot_args(order, "https://console.vast.ai")
    assert len(args) < vast.SCRIPT_LENGTH
    assert script.strip() in unpacked(args)


def test_script_is_a_program_of_the_shell() -> None:
    text = unpacked(vast.boot_args(ORDER, "https://console.vast.ai"))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert f"PUBLIC_KEY='{PUBLIC_KEY}'" in text


async def test_container_deletes_itself_on_term(it: Trial, tmp_path: Path) -> None:
    await it.create()
    [(id, machine)] = it.market.instances.items()
    boot = vast.program_text("boot_vast.sh", API=it.url)
    ready = "echo ready; while :; do sleep 0.1 & wait $!; done"
    env = {**os.environ, "CONTAINER_ID": id, "CONTAINER_API_KEY": "its-own-key"}
    line = ["bash", "-c", f"{boot}\n{ready}"]
    program = f"""
import signal, subprocess, sys
process = subprocess.Popen({line!r}, stdout=subprocess.PIPE, text=True)
process.stdout.readline()
process.send_signal(signal.SIGTERM)
sys.exit(process.wait())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, env=env)
    assert await process.wait() == 0
    assert machine.ended is not None


async def test_machine_that_somebody_else_took_is_followed_by_the_next(it: Trial) -> None:
    await it.renter.offers(Query(types=("RTX 4090",)))
    simulator = it.simulation.simulator
    cheapest = min(simulator._asks)  # type: ignore[attr-defined]
    for id, (type, place, _) in list(simulator._asks.items()):  # type: ignore[attr-defined]
        if (type.name, place) == ("RTX 4090", "DE") and id != cheapest:
            del simulator._asks[id]  # type: ignore[attr-defined]
            break
    assert (await it.renter.create([ORDER]))[0].ok
    assert it.made == 1


async def test_nothing_dearer_than_the_offer_is_ordered(it: Trial) -> None:
    [outcome] = await it.renter.create([replace(ORDER, offer=replace(CASE.offer, usd_hour=0.41))])
    assert (outcome.failure, outcome.message) == (FailureKind.CAPACITY, "acme: no RTX 4090 in DE for $0.4100 or less")
    assert it.made == 0


async def test_bid_is_above_the_minimum_and_its_price_is_listed(it: Trial) -> None:
    [offer] = [one for one in await it.renter.offers(Query(types=("RTX 4090",), market="spot")) if one.region == "DE"]
    assert offer.usd_hour == pytest.approx(0.2 * 1.2 + 0.15 * 100 / 730, abs=1e-6)
    assert (await it.renter.create([replace(ORDER, offer=offer)]))[0].ok
    [machine] = await it.listed()
    assert (machine.market, machine.usd_hour) == ("spot", pytest.approx(offer.usd_hour, abs=1e-5))


async def test_outbid_machine_is_stopped_until_it_is_deleted(it: Trial) -> None:
    assert (await it.renter.create([replace(ORDER, offer=SPOT)]))[0].ok
    it.boot()
    assert [one.state for one in await it.listed()] == ["up"]
    it.market.preempt(next(iter(it.market.instances)))
    it.clock.now += 60
    [paused] = await it.listed()
    assert paused.state == "stopped"
    assert (await it.renter.delete([paused]))[0].ok
    assert await it.listed() == []


async def test_running_without_a_port_is_pending(it: Trial) -> None:
    await it.create()
    it.boot()

    def without_ports(line: str, data: dict[str, object]) -> object:
        rows = data.get("instances")
        if isinstance(rows, list):
            data = {**data, "instances": [{**row, "ports": None} for row in rows]}
        return data

    it.simulation.rewrite = without_ports
    assert [(one.state, one.raw_state, one.host) for one in await it.listed()] == [("pending", "running", "")]


async def test_offers_state_the_least_shape(it: Trial) -> None:
    eight = [one for one in await it.renter.offers(Query(gpu="h100", gpus=8)) if one.market == "on-demand"]
    assert {(one.type, one.cpus, one.memory_gb, one.region) for one in eight} == {
        ("8x H100 SXM", 32, 128, place) for place in ("US", "DE", "FI")
    }


async def test_each_machine_is_offered_once_and_a_bad_one_never(it: Trial) -> None:
    asks = await it.renter._search("on-demand", ("RTX 4090",))  # type: ignore[attr-defined]
    machines = [ask.machine_id for ask in asks if ask.offer.region == "DE"]
    assert len(machines) == len(set(machines)) == 8  # of 64 offers
    query = Query(types=("RTX 4090",), regions=("DE",), market="on-demand")
    assert len(await it.renter.offers(query)) == 1
    assert await it.renter.offers(replace(query, unfit_machines=frozenset(machines))) == []

    [good] = machines[5:6]
    unfit = frozenset(machines) - {good}
    for node in ("gpu1", "gpu2"):  # the second is searched for
        assert (await it.renter.create([replace(ORDER, node=node, token=node, unfit_machines=unfit)]))[0].ok
    assert [one.machine_id for one in await it.listed()] == [good, good]
    [outcome] = await it.renter.create([replace(ORDER, unfit_machines=frozenset(machines))])
    assert outcome.failure is FailureKind.CAPACITY


async def test_offer_of_a_bad_machine_does_not_set_the_price(it: Trial) -> None:
    """The cheapest machine may be bad: then the next one is offered, at its own price."""
    bad = "1"

    def cheap(line: str, data: dict[str, object]) -> object:
        rows = data.get("offers")
        if isinstance(rows, list) and rows:
            rows[0] |= {"machine_id": int(bad), "dph_total": 0.1}
        return data

    it.simulation.rewrite = cheap
    query = Query(types=("RTX 4090",), regions=("US",), market="on-demand")
    assert [one.usd_hour for one in await it.renter.offers(query)] == [0.1]
    [offer] = await it.renter.offers(replace(query, unfit_machines=frozenset((bad,))))
    assert offer.usd_hour == pytest.approx(0.42, abs=0.01)
