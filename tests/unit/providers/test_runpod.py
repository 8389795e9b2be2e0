"""Behaviour specific to RunPod: errors that are only text, a port that is known late, a script in the start command."""

import base64
import json
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.contract.rental_providers import CASES, Trial, account, http, renting, saying
from tests.support.cases import cases
from tests.support.programs import stand_in
from tests.support.waiting import wait_for

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import FailureKind, Query
from shoal.cloud.providers.responses import read_refusal
from shoal.cloud.providers.runpod import BOOT, TRAP, WAIT, boot_command, joined_type, read_error, split_type
from shoal.errors import ProviderError

CASE = CASES["runpod"]


def test_quoted_order_is_not_in_the_message() -> None:
    rows = [
        "$: additional properties 'x' not allowed",
        {"path": "$.disk", "message": "too small", "value": {"cmd": ["-----BEGIN OPENSSH PRIVATE KEY-----"]}},
        {"message": "x" * 4000},
        {"value": "PRIVATE KEY"},
        ["PRIVATE KEY"],
    ]
    found = read_refusal(read_error, 422, {"detail": "Request validation failed.", "errors": rows})
    assert found.message == (
        f"Request validation failed.; $: additional properties 'x' not allowed; $.disk: too small; {'x' * 200}…"
    )


async def test_retired_api_is_reported_with_the_fix() -> None:
    async with saying(http("410 Gone", b'{"error": "v1 is gone"}')) as url, renting(CASE, url) as away:
        with pytest.raises(ProviderError, match=r"retired this version of its API\n  fix: install a newer Shoal"):
            await away.instances("reef")


@cases("type, gpu, count", ("NVIDIA A40", "NVIDIA A40", 1), ("8x NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", 8))
def test_type_is_a_gpu_and_its_count(type: str, gpu: str, count: int) -> None:
    assert split_type(type) == (gpu, count)
    assert joined_type(gpu, count) == type


async def test_pod_is_requested_with_the_cpus_and_memory_of_the_nodeset_and_a_cuda_floor(it: Trial) -> None:
    order = replace(await it.order(), cpus=9, memory_mb=40_000, image="ubuntu:24.04")
    [outcome] = await it.renter.create([order])
    assert outcome.ok
    [pod] = it.market.instances.values()
    asked = pod.order.marks["order"]
    assert asked["image"] == "ubuntu:24.04"
    assert asked["gpu"] == {
        **{"id": "NVIDIA A40", "count": 1},
        **{"minVcpuCountPerGpu": 9, "minRamPerGpu": 40, "minCudaVersion": "12.8"},
    }
    [none] = await it.renter.create([replace(order, token="t2", cpus=64)])
    assert none.failure is FailureKind.CAPACITY


async def test_pod_that_got_less_than_requested_is_removed(it: Trial) -> None:
    [made] = await it.renter.create([await it.order()])
    answer = json.dumps({"id": made.id, "cost": 0.44, "gpu": {"vcpuCount": 1, "memory": 50}}).encode()
    async with saying(http("201 Created", answer), "POST .*", it.url) as url, renting(CASE, url) as renter:
        [outcome] = await renter.create([await it.order(token="t2")])
    assert (outcome.failure, outcome.message) == (FailureKind.CAPACITY, "RunPod granted 1 CPUs of 2")
    assert not any(pod.live for pod in it.market.instances.values())


@cases("cloud, seconds", ("secure", 0), ("community", 180))
def test_only_pods_of_the_community_cloud_are_not_waited_for_without_an_address(cloud: str, seconds: int) -> None:
    assert rental_provider(account(CASE, "http://x", cloud=cloud)).abilities.address_timeout_s == seconds


def decoded(args: str) -> str:
    """The script inside a container's command."""
    found = re.fullmatch(r"\(umask 077; echo (\S+) \| base64 -d > /run/shoal-boot\); exec bash /run/shoal-boot", args)
    assert found
    return base64.b64decode(found[1]).decode()


def test_command_starts_sshd_and_waits() -> None:
    script = decoded(boot_command(""))
    assert script == TRAP + BOOT + WAIT
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    assert "ssh-ed25519" not in script, "the key is in the environment"


def test_order_script_runs_before_sshd() -> None:
    own = "#!/bin/sh\necho 'it''s mine' \"$HOME\"\n"
    script = decoded(boot_command(own))
    found = re.search(r"\(umask 077; echo (\S+) \| base64 -d > /run/user-data\) && setsid sh /run/user-data\n", script)
    assert found
    assert base64.b64decode(found[1]).decode() == own
    assert script.endswith(WAIT)
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""


def test_container_without_a_mirror_runs_the_order_script_and_can_be_ended(tmp_path: Path) -> None:
    """With an apt-get that hangs, in temporary directories."""
    for name, does in {"apt-get": f"touch {tmp_path}/installing; exec sleep 600", "ssh-keygen": "true"}.items():
        stand_in(tmp_path / name, does)
    script = decoded(boot_command(f"touch {tmp_path}/armed\n"))
    for directory in ("/run/", "/root/", "/usr/sbin/"):
        script = script.replace(directory, f"{tmp_path}/")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    first = subprocess.Popen(["bash", "-c", script], env=env, start_new_session=True)
    try:
        for wanted in ("armed", "installing"):
            wait_for((tmp_path / wanted).exists)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) >= 0, (
            "it heard the signal itself: without a trap the first process of a container does not"
        )
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()


async def test_running_pod_is_up_only_with_an_ssh_address(it: Trial) -> None:
    await it.create()
    seen = []
    for _ in range(6):
        [found] = await it.listed()
        seen.append((found.raw_state, found.state))
        it.clock.now += it.market.profile.boot_s / 5
    assert ("RUNNING", "pending") in seen
    assert seen[-1] == ("RUNNING", "up")


async def test_ssh_address_is_also_read_from_the_ports(it: Trial) -> None:
    await it.create()
    it.boot()
    it.simulation.rewrite = without_direct
    [found] = await it.listed()
    assert (found.state, found.host, found.port) == ("up", "192.0.2.1", 22)


def without_direct(line: str, data: Any) -> Any:
    for pod in data["pods"]:
        pod["ssh"]["direct"] = None
    return data


@cases("page", 3, 50)
async def test_pods_on_all_pages_are_listed(it: Trial, page: int) -> None:
    it.simulation.simulator.page = page  # type: ignore[attr-defined]
    for count in range(7):
        assert (await it.create(f"gpu{count}", f"t{count}")).ok
    assert sorted(one.token for one in await it.listed()) == [f"t{count}" for count in range(7)]
    lists = [one for one in it.simulation.requests if (one["method"], one["path"]) == ("GET", "/v2/pods")]
    assert len(lists) == (3 if page == 3 else 1)


async def test_price_is_multiplied_by_the_gpu_count(it: Trial) -> None:
    [offer] = await it.renter.offers(Query(types=("4x NVIDIA H200",), regions=("US-KS-2",)))
    assert (offer.gpus, offer.gpu, offer.gpu_memory_gb) == (4, "H200", 141)
    assert offer.usd_hour == pytest.approx(4 * 4.59)
    [outcome] = await it.renter.create([replace(await it.order(), offer=offer)])
    assert outcome.usd_hour == pytest.approx(4 * 4.59)
    [found] = await it.listed()
    assert (found.type, found.region) == ("4x NVIDIA H200", "US-KS-2")


async def test_order_has_its_region_and_the_ssh_port(it: Trial) -> None:
    outcome = await it.create()
    order = it.market.instances[outcome.id].order.marks["order"]
    assert (order["dataCenterIds"], order["ports"], order["image"]) == (["EU-RO-1"], ["22/tcp"], "debian:12")
    assert {name: order["env"][name] for name in ("SHOAL_CLUSTER", "SHOAL_NODE", "SHOAL_TOKEN")} == {
        "SHOAL_CLUSTER": "reef",
        "SHOAL_NODE": "gpu1",
        "SHOAL_TOKEN": "t0ken1",
    }


async def test_community_cloud_has_a_single_region_and_its_own_price(it: Trial) -> None:
    async with renting(CASE, it.url, cloud="community") as own:
        [offer] = await own.offers(Query(types=("NVIDIA L40S",)))
        assert (offer.region, offer.usd_hour) == ("any", pytest.approx(0.87))
        [outcome] = await own.create([replace(await it.order(), offer=offer)])
        assert outcome.ok
    order = it.market.instances[outcome.id].order.marks["order"]
    assert order["cloud"] == "COMMUNITY"
    assert "dataCenterIds" not in order


async def test_pod_without_its_environment_is_identified_by_its_name(it: Trial) -> None:
    await it.create()
    it.simulation.rewrite = without_env
    [found] = await it.listed()
    assert (found.cluster, found.node, found.token) == ("reef", "gpu1", "t0ken1")


def without_env(line: str, data: Any) -> Any:
    return {"pods": [{**pod, "env": {}} for pod in data["pods"]]}


async def test_foreign_pod_is_not_listed(it: Trial) -> None:
    await it.create()
    it.simulation.rewrite = lambda line, data: {"pods": [{**one, "env": {}, "name": "mine"} for one in data["pods"]]}
    assert await it.listed() == []
    assert [one.token for one in await it.listed("")] == [""]


async def test_stopped_pod_is_listed_without_a_price(it: Trial) -> None:
    await it.create()
    it.boot()
    it.simulation.rewrite = lambda line, data: {
        "pods": [{**one, "status": "EXITED", "cost": 0} for one in data["pods"]]
    }
    [found] = await it.listed()
    assert (found.state, found.usd_hour) == ("stopped", None)
