"""The simulated Paperspace follows the documented API."""

from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tests.contract.rental_providers import Clock, Trial
from tests.support.cases import cases

from shoal_simulators.instances import Fault
from shoal_simulators.market import Market

KIND = "paperspace"
ORDER: dict[str, Any] = {
    "name": "one",
    "machineType": "A4000",
    "templateId": "twnlo3zj",
    "region": "East Coast (NY2)",
    "diskSize": 100,
    "publicIpType": "dynamic",
}


@dataclass
class Space:
    """The simulator, and a client of it."""

    client: httpx.AsyncClient
    market: Market
    clock: Clock

    async def get(self, path: str, **params: str) -> Any:
        return (await self.client.get(path, params=params)).json()

    async def create(self, **more: Any) -> Any:
        return (await self.client.post("/machines", json=ORDER | more)).json()


@pytest.fixture
def space(it: Trial, client: httpx.AsyncClient) -> Space:
    return Space(client, it.market, it.clock)


async def test_machine_is_created_ready_and_deleted_with_events(space: Space) -> None:
    made = await space.create()
    machine, event = made["data"], made["event"]
    assert (machine["state"], machine["publicIp"], machine["usageRate"]) == ("provisioning", None, 0.76)
    assert machine["ram"] == 45 << 30
    assert machine["accelerators"] == [{"name": "A4000", "count": 1, "memory": 16 << 30}]
    assert (event["name"], event["state"], event["machineId"]) == ("create", "new", machine["id"])
    assert (await space.get(f"/machine-events/{event['id']}"))["state"] == "in progress"
    space.clock.now += 30
    assert (await space.get(f"/machines/{machine['id']}"))["publicIp"].startswith("192.0.2.")
    space.clock.now += 100
    assert (await space.get(f"/machines/{machine['id']}"))["state"] == "ready"
    assert (await space.get(f"/machine-events/{event['id']}"))["state"] == "done"
    gone = (await space.client.delete(f"/machines/{machine['id']}")).json()
    assert (gone["data"]["state"], gone["event"]["name"]) == ("stopping", "deactivate")
    space.clock.now += 30
    assert (await space.client.get(f"/machines/{machine['id']}")).status_code == 404
    assert (await space.get("/machines"))["items"] == []


@cases(
    "fault, words", ("stockout", "We are currently out of capacity"), ("quota", "You have reached your machine limit")
)
async def test_unavailable_machine_is_reported_by_its_event_and_never_listed(
    space: Space, fault: str, words: str
) -> None:
    space.market.faults = [Fault(fault)]
    made = await space.create()
    assert (made["event"]["state"], made["event"]["error"]) == ("new", None)
    failed = await space.get(f"/machine-events/{made['event']['id']}")
    assert failed["state"] == "error" and failed["error"].startswith(words)
    assert (await space.get("/machines"))["items"] == []
    assert (await space.client.delete(f"/machines/{made['data']['id']}")).status_code == 404
    assert space.market.bill() == []


@cases(
    "more, told",
    ({"name": None}, "name: Required"),
    ({"diskSize": "100"}, "diskSize: Required"),
    ({"diskSize": 120}, "diskSize: one of"),
    ({"region": "NY2"}, "No such region"),
    ({"machineType": "Z1"}, "No such region or machine type"),
    ({"templateId": "tilqt47t"}, "The template is not available"),
)
async def test_invalid_order_is_rejected_with_the_reason(space: Space, more: dict[str, Any], told: str) -> None:
    answer = await space.client.post("/machines", json=ORDER | more)
    assert (answer.status_code, answer.json()["code"]) == (400, "BAD_REQUEST")
    assert told in answer.json()["issues"][0]["message"] and space.market.instances == {}


async def test_each_gpu_family_has_its_own_template(space: Space) -> None:
    assert (await space.create(machineType="H100", templateId="tilqt47t"))["event"]
    assert (await space.create(machineType="C5", templateId="t0nspur5"))["event"]
    templates = (await space.get("/os-templates"))["items"]
    assert {one["id"] for one in templates} >= {"tilqt47t", "t0nspur5", "twnlo3zj"}


async def test_startup_script_is_a_separate_resource_run_by_a_machine(space: Space) -> None:
    script = (await space.client.post("/startup-scripts", json={"name": "boot", "script": "#!/bin/sh\ntrue\n"})).json()
    assert (script["assignedMachineIds"], script["isRunOnce"]) == ([], False) and "script" not in script
    machine = (await space.create(startupScriptId=script["id"]))["data"]
    assert (await space.get(f"/startup-scripts/{script['id']}"))["assignedMachineIds"] == [machine["id"]]
    assert space.market.instances[machine["id"]].order.user_data == "#!/bin/sh\ntrue\n"
    assert (await space.client.delete(f"/startup-scripts/{script['id']}")).status_code == 200
    assert (await space.client.delete(f"/startup-scripts/{script['id']}")).status_code == 404
    assert (await space.client.post("/machines", json=ORDER | {"startupScriptId": script["id"]})).status_code == 404
    assert (await space.client.post("/startup-scripts", json={"name": "empty"})).status_code == 400


async def test_lists_are_paged_and_filtered(space: Space) -> None:
    for name in ("a", "b", "c"):
        await space.create(name=name)
    first = await space.get("/machines", limit="2")
    second = await space.get("/machines", limit="2", after=first["nextPage"])
    assert [one["name"] for one in first["items"] + second["items"]] == ["a", "b", "c"]
    assert (first["hasMore"], second["hasMore"], "nextPage" in second) == (True, False, False)
    assert [one["name"] for one in (await space.get("/machines", name="b"))["items"]] == ["b"]
    assert (await space.client.get("/machines", params={"limit": "121"})).status_code == 400
    machine = first["items"][0]["id"]
    assert [one["machineId"] for one in (await space.get("/machine-events", machineId=machine))["items"]] == [machine]


async def test_availability_follows_the_free_capacity(space: Space) -> None:
    asked = {"machineType": "A4000", "region": "East Coast (NY2)"}
    assert await space.get("/machine-availability", **asked) == {"available": True}
    assert await space.get("/machine-availability", **asked | {"region": "Mars"}) == {"available": False}


@cases(
    "fault, status, code",
    ("auth", 401, "UNAUTHORIZED"),
    ("rate", 429, "TOO_MANY_REQUESTS"),
    ("balance", 412, "PRECONDITION_FAILED"),
    ("error-before-create", 500, "INTERNAL_SERVER_ERROR"),
    ("error-after-create", 500, "INTERNAL_SERVER_ERROR"),
)
async def test_errors_have_the_paperspace_format(space: Space, fault: str, status: int, code: str) -> None:
    space.market.faults = [Fault(fault)]
    answer = await space.client.post("/machines", json=ORDER)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert len(space.market.instances) == (1 if fault == "error-after-create" else 0)
