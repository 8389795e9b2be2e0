"""The simulated Google Compute Engine follows the documented API."""

import copy
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from tests.contract.rental_providers import Clock, Trial
from tests.support.cases import cases

from shoal_simulators.gcp import GoogleComputeSimulator
from shoal_simulators.instances import Fault
from shoal_simulators.market import Market

KIND = "gcp"
BODY: dict[str, Any] = {
    "count": "2",
    "perInstanceProperties": {"a": {}, "b": {}},
    "instanceProperties": {
        "machineType": "g2-standard-4",
        "networkInterfaces": [{"accessConfigs": [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]}],
        "scheduling": {"provisioningModel": "STANDARD", "onHostMaintenance": "TERMINATE", "automaticRestart": False},
        "labels": {"team": "reef"},
        "metadata": {"items": [{"key": "ssh-keys", "value": "ubuntu:ssh-ed25519 AAAA me"}]},
    },
}
ZONE = "/projects/p/zones/us-central1-b"


@dataclass
class Google:
    """The simulator, and a client of it."""

    client: httpx.AsyncClient
    market: Market
    clock: Clock

    async def get(self, path: str, **params: str) -> Any:
        return (await self.client.get(path, params=params)).json()

    async def insert(self, body: dict[str, Any] = BODY, place: str = ZONE, **params: str) -> httpx.Response:
        return await self.client.post(f"{place}/instances/bulkInsert", json=body, params=params)

    async def end_of(self, operation: dict[str, Any], place: str = ZONE) -> Any:
        await self.get(f"{place}/operations/{operation['name']}")
        return await self.get(f"{place}/operations/{operation['name']}")

    async def names(self, **params: str) -> list[str]:
        return sorted(one["name"] for one in (await self.get(f"{ZONE}/instances", **params)).get("items", []))


@pytest.fixture
def google(it: Trial, client: httpx.AsyncClient) -> Google:
    return Google(client, it.market, it.clock)


def changed(*path: str, to: Any) -> dict[str, Any]:
    body: Any = copy.deepcopy(BODY)
    part = body
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = to
    return dict(body)


async def test_order_is_an_operation_with_created_counts(google: Google) -> None:
    operation = (await google.insert()).json()
    assert (operation["kind"], operation["operationType"], operation["status"]) == (
        "compute#operation",
        "bulkInsert",
        "PENDING",
    )
    assert operation["zone"].endswith("/zones/us-central1-b")
    running = await google.get(f"{ZONE}/operations/{operation['name']}")
    assert (running["status"], running.get("endTime")) == ("RUNNING", None)
    done = await google.get(f"{ZONE}/operations/{operation['name']}")
    assert done["status"] == "DONE"
    counts = done["instancesBulkInsertOperationMetadata"]["perLocationStatus"]["zones/us-central1-b"]
    assert (counts["targetVmCount"], counts["createdVmCount"], counts["failedToCreateVmCount"]) == (2, 2, 0)
    assert "error" not in done


async def test_instance_passes_the_google_states_and_is_deleted(google: Google) -> None:
    await google.insert()
    path = f"{ZONE}/instances/a"
    shown = await google.get(path)
    assert shown["status"] == "PROVISIONING" and "natIP" not in str(shown["networkInterfaces"])
    assert shown["labels"] == {"team": "reef"}
    assert shown["machineType"].endswith("/zones/us-central1-b/machineTypes/g2-standard-4")
    google.clock.now += 25
    shown = await google.get(path)
    assert shown["status"] == "STAGING"
    assert shown["networkInterfaces"][0]["accessConfigs"][0]["natIP"].startswith("192.0.2.")
    google.clock.now += 20
    assert (await google.get(path))["status"] == "RUNNING"
    deleting = (await google.client.delete(path)).json()
    assert (deleting["operationType"], deleting["targetLink"].endswith("/instances/a")) == ("delete", True)
    assert (await google.get(path))["status"] == "STOPPING"
    google.clock.now += 30
    assert (await google.client.get(path)).status_code == 404
    assert (await google.client.delete(path)).status_code == 404 and await google.names() == ["b"]


async def test_existing_name_is_a_conflict(google: Google) -> None:
    await google.insert()
    answer = await google.insert()
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert (error["code"], error["errors"][0]["reason"]) == (409, "alreadyExists")
    assert error["message"] == "The resource 'projects/p/zones/us-central1-b/instances/a' already exists"


@cases(
    "body, told",
    (changed("count", to="3"), "resource.count"),
    (changed("namePattern", to="n-#"), "Exactly one of namePattern"),
    (changed("perInstanceProperties", to={"A_": {}, "b": {}}), "'A_'"),
    (changed("perInstanceProperties", to={"a": {"labels": {}}, "b": {}}), "Unknown name 'labels'"),
    (changed("instanceProperties", "scheduling", "onHostMaintenance", to="MIGRATE"), "live migration"),
    (changed("instanceProperties", "scheduling", "maxRunDuration", to={"seconds": "60"}), "termination action"),
    (
        changed(
            "instanceProperties",
            "scheduling",
            to={"provisioningModel": "SPOT", "onHostMaintenance": "TERMINATE", "automaticRestart": True},
        ),
        "automaticRestart",
    ),
    (changed("instanceProperties", "machineType", to="z9-huge"), "z9-huge"),
)
async def test_invalid_order_is_rejected(google: Google, body: dict[str, Any], told: str) -> None:
    answer = await google.insert(body)
    assert (answer.status_code, answer.json()["error"]["errors"][0]["reason"]) == (400, "invalid")
    assert told in answer.json()["error"]["message"] and google.market.instances == {}


async def test_invalid_request_id_is_rejected(google: Google) -> None:
    assert (await google.insert(requestId="t0ken")).status_code == 400


async def test_order_without_a_minimum_is_all_or_none(google: Google) -> None:
    google.market.faults = [Fault("stockout")]
    done = await google.end_of((await google.insert()).json())
    codes = [one["code"] for one in done["error"]["errors"]]
    assert codes == ["VM_MIN_COUNT_NOT_REACHED", "ZONE_RESOURCE_POOL_EXHAUSTED"]
    google.clock.now += 60
    assert await google.names() == [] and len(google.market.bill()) == 1


async def test_order_with_a_minimum_keeps_the_rest_and_reports_the_failures(google: Google) -> None:
    google.market.faults = [Fault("quota")]
    done = await google.end_of((await google.insert({**BODY, "minCount": "1"})).json())
    assert "error" not in done
    group = f'operationGroupId="{done["operationGroupId"]}"'
    parts = (await google.get(f"{ZONE}/operations", filter=group))["items"]
    errors = [error for part in parts for error in part.get("error", {}).get("errors", [])]
    assert [error["code"] for error in errors] == ["QUOTA_EXCEEDED"] and len(await google.names()) == 1


async def test_lists_are_filtered_and_paged(google: Google) -> None:
    await google.insert()
    await google.insert(
        changed("perInstanceProperties", to={"c": {}, "d": {}})
        | {"instanceProperties": {"machineType": "e2-standard-2"}}
    )
    assert await google.names(filter="labels.team=reef") == ["a", "b"]
    assert await google.names(filter='(name = "a") OR (name = "d")') == ["a", "d"]
    assert (await google.client.get(f"{ZONE}/instances", params={"filter": "name ~ a"})).status_code == 400
    first = await google.get(f"{ZONE}/instances", maxResults="3")
    second = await google.get(f"{ZONE}/instances", maxResults="3", pageToken=first["nextPageToken"])
    assert [len(first["items"]), len(second["items"])] == [3, 1] and "nextPageToken" not in second


async def test_aggregated_list_warns_of_empty_zones(google: Google) -> None:
    await google.insert()
    items = (await google.get("/projects/p/aggregated/instances"))["items"]
    assert len(items["zones/us-central1-b"]["instances"]) == 2
    assert items["zones/us-east1-b"]["warning"]["code"] == "NO_RESULTS_ON_PAGE"


@cases("action, left", ("STOP", ["TERMINATED"]), ("DELETE", []))
async def test_preempted_spot_machine_follows_its_termination_action(
    google: Google, action: str, left: list[str]
) -> None:
    scheduling = {
        "provisioningModel": "SPOT",
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": False,
        "instanceTerminationAction": action,
        "preemptionNoticeDuration": {"seconds": "30"},
    }
    body = changed("perInstanceProperties", to={"a": {}}) | {"count": "1"}
    body["instanceProperties"] = {**BODY["instanceProperties"], "scheduling": scheduling}
    await google.insert(body)
    google.clock.now += 60
    google.market.update()
    google.market.preempt("a")
    google.clock.now += 20
    assert (await google.get(f"{ZONE}/instances/a"))["status"] == "RUNNING", "it has its notice"
    google.clock.now += 11
    assert (await google.get(f"{ZONE}/instances/a"))["status"] == "STOPPING"
    google.market.update()
    google.clock.now += 60
    shown = (await google.get(f"{ZONE}/instances")).get("items", [])
    assert [one["status"] for one in shown] == left
    for one in shown:
        assert (await google.client.delete(f"{ZONE}/instances/{one['name']}")).status_code == 200
    assert await google.names() == []


@cases(
    "fault, status, reason",
    ("auth", 401, "authError"),
    ("rate", 403, "rateLimitExceeded"),
    ("balance", 403, "BILLING_DISABLED"),
    ("error-before-create", 503, "backendError"),
    ("error-after-create", 503, "backendError"),
)
async def test_errors_have_the_google_format(google: Google, fault: str, status: int, reason: str) -> None:
    google.market.faults = [Fault(fault)]
    answer = await google.insert()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["errors"][0]["reason"]) == (status, status, reason)
    assert len(google.market.instances) == (2 if fault == "error-after-create" else 0)


async def test_ssh_keys_of_an_order_reach_the_machine(google: Google) -> None:
    await google.insert()
    assert google.market.instances["a"].order.public_keys == ("ssh-ed25519 AAAA me",)


@cases(
    "path, flavor, status, told",
    ("/computeMetadata/v1/instance/preempted", "Google", 200, "TRUE"),
    ("/computeMetadata/v1/instance/name", "Google", 200, "a"),
    ("/computeMetadata/v1/instance/preempted", "", 403, "Missing Metadata-Flavor:Google header."),
)
async def test_preempted_machine_reads_the_notice_in_its_metadata(
    google: Google, path: str, flavor: str, status: int, told: str
) -> None:
    await google.insert()
    machine = google.market.preempt("a")
    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"metadata-flavor", flavor.encode())]}
    answer = GoogleComputeSimulator(google.market).metadata(Request(scope), machine)
    assert answer is not None and (answer.status_code, bytes(answer.body).decode()) == (status, told)
