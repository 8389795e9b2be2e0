"""The HTTP server of simulated clouds: keys, limits, control routes, metadata, and `shoal simulate` itself."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.support.cases import cases

from shoal.errors import ProviderError, ShoalError, UsageError
from shoal.registry import install_command
from shoal.verbs.simulate import Simulated, simulate
from shoal_simulators import find_simulator
from shoal_simulators.backend import NoHosts
from shoal_simulators.instances import InstanceOrder
from shoal_simulators.market import Market
from shoal_simulators.server import RateLimit, SimulatorApp, listen, serve

ORDER = {"token": "t1", "name": "n1", "type": "gpu", "zone": "sandbox-a", "public_key": "ssh-ed25519 AAAA x"}


def simulation(key: str = "", *, limited: bool = False) -> SimulatorApp:
    made = find_simulator("sandbox")
    return SimulatorApp(made(Market(made.profile, made.types, NoHosts())), key=key, limited=limited)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with serve(simulation()) as url, httpx.AsyncClient(base_url=url.removesuffix("/v1")) as made:
        yield made


async def test_bill_requests_and_faults_are_readable(client: httpx.AsyncClient) -> None:
    made = await client.post("/v1/machines", json={"machines": [ORDER]})
    id = made.json()["machines"][0]["id"]
    bill = (await client.get("/_simulator/bill")).json()
    assert [(one["id"], one["name"], one["usd_hour"]) for one in bill["machines"]] == [(id, "n1", 0.60)]
    assert bill["usd"] == bill["machines"][0]["usd"]
    seen = (await client.get("/_simulator/requests")).json()
    assert [(one["method"], one["path"], one["status"]) for one in seen] == [("POST", "/v1/machines", 200)]
    assert (await client.get("/_simulator/faults")).json() == []
    put = await client.put("/_simulator/faults", json=[{"kind": "list-fails", "times": 1}])
    assert put.json() == [{"kind": "list-fails", "times": 1, "type": "", "region": "", "seconds": None}]
    assert [(await client.get("/v1/machines")).status_code for _ in range(2)] == [500, 200]


async def test_invalid_faults_are_rejected_and_change_nothing(client: httpx.AsyncClient) -> None:
    refused = await client.put("/_simulator/faults", json=[{"kind": "meteor"}])
    assert refused.status_code == 400 and refused.json()["error"].startswith("fault 0: kind must be one of")
    assert (await client.put("/_simulator/faults", content=b"{")).status_code == 400
    assert (await client.get("/_simulator/faults")).json() == []


async def test_machine_can_be_preempted_and_killed_on_demand(client: httpx.AsyncClient) -> None:
    orders = [ORDER, {**ORDER, "token": "t2", "name": "n2"}]
    made = (await client.post("/v1/machines", json={"machines": orders})).json()["machines"]
    assert (await client.post(f"/_simulator/preempt/{made[0]['id']}")).json()["takes_away"] > 0
    assert (await client.post(f"/_simulator/kill/{made[1]['id']}")).json()["phase"] == "error"
    shown = (await client.get("/v1/machines")).json()["machines"]
    assert [(one["preempted"], one["state"]) for one in shown] == [(True, "booting"), (False, "failed")]
    unknown = await client.post("/_simulator/kill/m-0")
    assert (unknown.status_code, unknown.json()) == (404, {"error": "no live machine m-0"})


async def test_wrong_key_is_rejected_and_not_recorded() -> None:
    it = simulation("the-right-one")
    async with serve(it) as url, httpx.AsyncClient(base_url=url) as client:
        for headers in ({}, {"Authorization": "Bearer the-wrong-one"}):
            assert (await client.get("/machines", headers=headers)).status_code == 401
        right = {"Authorization": "Bearer the-right-one"}
        assert (await client.get("/machines", headers=right)).status_code == 200
        shown = await client.get(url.removesuffix("/v1") + "/_simulator/requests")
    assert [one["status"] for one in shown.json()] == [401, 401, 200] and "one" not in shown.text
    assert "the-right-one" not in repr(it)


def test_rate_limit_permits_a_burst_and_then_a_request_per_interval() -> None:
    limit = RateLimit(10.0, r"POST /launch", slack=10.0)
    assert [limit.admits("POST /launch", now) for now in (100.0, 100.0, 100.0, 109.0, 110.0, 115.0)] == [
        *(True, True, False),
        *(False, True, False),
    ]
    assert limit.admits("GET /list", 100.0)


async def test_machine_asking_for_metadata_is_identified_by_its_address() -> None:
    it = simulation()
    it.metadata_at = ("10.0.0.1", 8080)
    market = it.market
    wanted = InstanceOrder("n1", "gpu", "sandbox", "sandbox-a", "spot", marks={"token": "t1", "labels": {}})
    machine = market.order(wanted, "m1")
    market.update()

    async def asked(path: str, client: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=it, client=(client, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.1:8080") as asking:
            return await asking.get(path)

    assert (await asked("/notice", machine.host)).status_code == 404
    market.preempt("m1")
    assert (await asked("/notice", machine.host)).json() == {"seconds": 30}
    assert (await asked("/notice", "192.0.2.250")).status_code == 404
    assert (await asked("/v1/machines", machine.host)).status_code == 404


async def test_port_in_use_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ProviderError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            async with serve(simulation(), port):
                pass


async def test_simulate_reports_its_url_and_ends_when_cancelled(tmp_path: Path) -> None:
    (tmp_path / "faults.json").write_text('[{"kind": "stockout", "times": -1}]')
    found: asyncio.Future[Simulated] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(simulate("lambda", found.set_result, faults=tmp_path / "faults.json", boot_s=3.0))
    simulated = await found
    async with httpx.AsyncClient(base_url=simulated.url) as client:
        assert [one["kind"] for one in (await client.get("/_simulator/faults")).json()] == ["stockout"]
        types = await client.get("/api/v1/instance-types", headers={"Authorization": "Bearer k"})
        assert types.status_code == 200
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(httpx.ConnectError):
        await httpx.AsyncClient().get(simulated.url)


@cases(
    "text, message",
    ("{", "faults.json: Expecting"),
    ('[{"kind": "x"}]', "faults.json: fault 0: kind must be one of"),
    (None, "cannot read"),
)
async def test_unreadable_fault_file_is_an_error(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "faults.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        await simulate("lambda", lambda found: None, faults=path)


async def test_provider_without_a_simulator_is_rejected_with_the_existing_names() -> None:
    with pytest.raises(UsageError, match="there is no simulator of 'azure'\n  fix: use one of: aws, digitalocean"):
        await simulate("azure", lambda found: None)


async def test_sandbox_hosts_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ProviderError, match="sandbox hosts need root"):
        await simulate("lambda", lambda found: None, cluster="nobodys")


def test_listener_disables_nagle() -> None:
    with listen("127.0.0.1", 0) as listener:
        # asyncio turns Nagle's algorithm off only on sockets whose protocol is TCP.
        assert listener.proto == socket.IPPROTO_TCP


def test_command_prints_how_to_use_the_simulator() -> None:
    words = [sys.executable, "-m", "shoal", "simulate", "lambda"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        first, second = running.stdout.readline(), running.stdout.readline()
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=30) == 0 and "until Ctrl-C" in running.stderr.read()
    assert first.startswith("lambda is simulated at http://127.0.0.1:")
    assert second.startswith("  no real hosts; bill: http://127.0.0.1:") and second.endswith("/_simulator/bill\n")


@cases("number", signal.SIGINT, signal.SIGTERM)
def test_command_prints_its_url_and_ends_cleanly_on_a_signal(number: signal.Signals) -> None:
    words = [sys.executable, "-m", "shoal", "simulate", "sandbox", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        lines = ""
        while not lines.rstrip().endswith("}"):
            lines += running.stdout.readline()
        simulated = json.loads(lines)
        assert simulated["kind"] == "sandbox" and httpx.get(simulated["url"] + "/v1/types").status_code == 200
        running.send_signal(number)
        assert running.wait(timeout=30) == 0


@cases("module", "shoal_simulators", "uvicorn", "starlette")
async def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("shoal_simulators", module)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ShoalError) as caught:
        await simulate("lambda", lambda simulated: None)
    assert caught.value.message.startswith(f"cannot simulate lambda: the package {module}")
    assert caught.value.hint == f"run `{install_command('simulate')}`" and "'starlette>=" in caught.value.hint
