"""The simulated RunPod follows the documented API, so that a client that works here works there."""

from typing import Any

import httpx
from tests.contract.rental_providers import Trial
from tests.support.cases import cases

KIND = "runpod"
ORDER: dict[str, Any] = {"name": "n", "image": "debian:12", "gpu": {"id": "NVIDIA A40"}, "ports": ["22/tcp"]}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in ORDER.items() if key != name}


@cases(
    "order, told",
    ({**ORDER, "interruptible": True}, "$: additional properties 'interruptible' not allowed"),
    ({**ORDER, "gpu": {"id": "NVIDIA A40", "type": 1}}, "$.gpu: additional properties 'type' not allowed"),
    (without("name"), "$: missing property 'name'"),
    (without("image"), "$: missing property 'image'"),
    (without("gpu"), "$: exactly one of 'gpu' and 'cpu' is required"),
    ({**ORDER, "cpu": {"id": "cpu3c"}}, "$: exactly one of 'gpu' and 'cpu' is required"),
    ({**ORDER, "args": ["sleep"]}, "$.args: got array, want string"),
    ({**ORDER, "env": {f"K{n}": "v" for n in range(51)}}, "$.env: at most 50 strings"),
    ({**ORDER, "cloud": "SPOT"}, "$.cloud: value must be one of 'SECURE', 'COMMUNITY'"),
)
async def test_invalid_body_is_422_and_creates_nothing(
    it: Trial, client: httpx.AsyncClient, order: dict[str, Any], told: str
) -> None:
    answer = await client.post("/pods", json=order)
    assert answer.status_code == 422 and answer.headers["content-type"] == "application/problem+json"
    assert told in answer.json()["errors"] and it.made == 0


@cases(
    "change, told",
    ({"gpu": {"id": "NVIDIA NONE"}}, "gpu 'NVIDIA NONE' cannot be had 1 at a time"),
    ({"gpu": {"id": "NVIDIA A40", "count": 9}}, "gpu 'NVIDIA A40' cannot be had 9 at a time"),
    ({"dataCenterIds": ["MOON-1"]}, "unknown data center MOON-1"),
)
async def test_order_against_the_rules_is_400(
    it: Trial, client: httpx.AsyncClient, change: dict[str, Any], told: str
) -> None:
    answer = await client.post("/pods", json={**ORDER, **change})
    assert (answer.status_code, answer.json()["detail"]) == (400, told) and it.made == 0


async def test_stockout_in_a_region_does_not_move_to_another(it: Trial, client: httpx.AsyncClient) -> None:
    it.fault("stockout", region="US-KS-2", times=-1)
    full = await client.post("/pods", json={**ORDER, "dataCenterIds": ["US-KS-2"]})
    assert full.status_code == 400 and "no longer any instances available" in full.json()["detail"]
    assert (await client.post("/pods", json={**ORDER, "dataCenterIds": ["EU-RO-1"]})).status_code == 201


async def test_pod_without_a_port_has_no_ssh_address(it: Trial, client: httpx.AsyncClient) -> None:
    made = (await client.post("/pods", json=without("ports"))).json()
    it.boot()
    pod = (await client.get(f"/pods/{made['id']}")).json()
    assert (pod["status"], pod["ssh"]["direct"], pod["runtime"]) == ("RUNNING", None, None)


async def test_pod_passes_its_states_and_is_deleted_at_once(it: Trial, client: httpx.AsyncClient) -> None:
    made = (await client.post("/pods", json=ORDER)).json()
    seen = [made["status"]]
    for _ in range(5):
        it.clock.now += it.market.profile.boot_s / 5
        seen.append((await client.get(f"/pods/{made['id']}")).json()["status"])
    assert list(dict.fromkeys(seen)) == ["PROVISIONING", "STARTING", "RUNNING"]
    assert (await client.delete(f"/pods/{made['id']}")).status_code == 204
    assert (await client.get("/pods")).json() == {"pods": []}
    assert (await client.get(f"/pods/{made['id']}")).status_code == 404
    assert (await client.delete(f"/pods/{made['id']}")).status_code == 404


async def test_action_in_a_wrong_state_is_a_conflict(it: Trial, client: httpx.AsyncClient) -> None:
    made = (await client.post("/pods", json=ORDER)).json()
    refused = await client.post(f"/pods/{made['id']}/action", json={"action": "restart"})
    assert (refused.status_code, refused.json()["detail"]) == (409, "a pod that is PROVISIONING cannot restart")
    assert (await client.post(f"/pods/{made['id']}/action", json={"action": "stop", "now": 1})).status_code == 422
    assert (await client.post(f"/pods/{made['id']}/action", json={"action": "terminate"})).status_code == 200
    assert (await client.get("/pods")).json() == {"pods": []}


async def test_every_answer_has_the_rate_limit_headers(it: Trial, client: httpx.AsyncClient) -> None:
    first, second = await client.get("/pods"), await client.get("/catalog/gpus?product=POD")
    assert '"minute";r=179' in first.headers["RateLimit"]
    assert second.status_code == 400  # and still tells
    assert '"minute";r=178' in second.headers["RateLimit"]
    assert second.headers["RateLimit-Policy"].startswith('"minute";q=180;w=60')


async def test_unknown_query_parameters_are_ignored(it: Trial, client: httpx.AsyncClient) -> None:
    await client.post("/pods", json=ORDER)
    assert len((await client.get("/pods?desiredStatus=EXITED")).json()["pods"]) == 1
