"""Behaviour specific to Lambda, against its simulator over a real socket."""

from dataclasses import replace
from typing import Any

import httpx
from tests.contract.rental_providers import CASES, CLUSTER, PUBLIC_KEY, Trial, trial
from tests.support.cases import cases

from shoal.cloud.providers.api import FailureKind, Query
from shoal_simulators.lambda_cloud import image_id

CASE = CASES["lambda"]


async def api(it: Trial, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """What Lambda's API itself answers, without a renter between."""
    async with httpx.AsyncClient(headers={"Authorization": "Bearer k"}) as client:
        answer = await client.request(method, it.url + path, json=body)
    return answer.status_code, answer.json()


async def launch(it: Trial, **more: Any) -> tuple[int, Any]:
    key = await it.renter.ensure_key(CLUSTER, PUBLIC_KEY)
    order = {"region_name": "us-west-1", "instance_type_name": "gpu_1x_a10", "ssh_key_names": [key], **more}
    wanted = {name: value for name, value in order.items() if value is not None}
    return await api(it, "POST", "/instance-operations/launch", wanted)


def code(answer: tuple[int, Any]) -> tuple[int, str, str]:
    return answer[0], answer[1]["error"]["code"], answer[1]["error"]["message"]


# The renter


async def test_offer_describes_the_machine(it: Trial) -> None:
    [offer] = await it.renter.offers(Query(types=("gpu_8x_h100_sxm5",), regions=("us-west-1",)))
    assert (offer.gpu, offer.gpus, offer.gpu_memory_gb) == ("H100", 8, 80)
    assert (offer.cpus, offer.memory_gb, offer.usd_hour, offer.available) == (208, 1800, 31.92, "yes")
    [arm] = await it.renter.offers(Query(gpu="gh200", regions=("us-east-1",)))
    assert arm.arch == "arm64"
    [plain] = await it.renter.offers(Query(types=("cpu_4x_general",), regions=("us-east-1",)))
    assert (plain.gpu, plain.gpus) == ("", 0)


async def test_machine_gets_the_ruleset_of_the_cluster_in_its_region(it: Trial) -> None:
    order = replace(await it.order(), ports=("tcp:22", "udp:51820"))
    for token in ("t1", "t2"):
        [outcome] = await it.renter.create([replace(order, token=token)])
        assert outcome.ok
    [ruleset] = it.simulation.simulator.stored("rulesets").values()
    assert (ruleset["name"], ruleset["region"]) == ("shoal-reef-us-west-1", "us-west-1")
    assert [(rule["protocol"], rule.get("port_range")) for rule in ruleset["rules"]] == [
        ("icmp", None),
        ("tcp", [22, 22]),
        ("udp", [51820, 51820]),
    ]
    assert {one.order.marks["firewall_rulesets"][0]["id"] for one in it.market.instances.values()} == {ruleset["id"]}


async def test_region_without_firewall_rules_is_ordered_without_a_ruleset(it: Trial) -> None:
    order = replace(await it.order(), ports=("tcp:22",), offer=replace(it.case.offer, region="us-south-1"))
    [outcome] = await it.renter.create([order])
    assert outcome.ok
    assert not it.simulation.simulator.stored("rulesets")


async def test_filesystems_of_the_account_are_attached() -> None:
    case = replace(CASES["lambda"], settings={"filesystems": "data, models:/data/models"})
    async with trial(case) as it:
        ids = {}
        for name in ("data", "models"):
            _, made = await api(it, "POST", "/filesystems", {"name": name, "region": "us-west-1"})
            ids[name] = made["data"]["id"]
        await it.create()
        [machine] = it.market.instances.values()
        assert machine.order.marks["file_system_names"] == ["data", "models"]
        assert machine.order.marks["file_system_mounts"] == [
            {"mount_point": "/data/models", "file_system_id": ids["models"]}
        ]


@cases(
    "setting, message, scope",
    ("data", "acme has no filesystem data in us-west-1", "region"),
    ("there:/etc", "Lambda mounts nothing at /etc", "provider"),
)
async def test_filesystem_that_cannot_be_attached_is_named_before_renting(
    setting: str, message: str, scope: str
) -> None:
    async with trial(replace(CASES["lambda"], settings={"filesystems": setting})) as it:
        await api(it, "POST", "/filesystems", {"name": "data", "region": "us-east-1"})
        await api(it, "POST", "/filesystems", {"name": "there", "region": "us-west-1"})
        [outcome] = await it.renter.create([await it.order()])
        assert (outcome.failure, outcome.scope, it.made) == (FailureKind.INVALID, scope, 0)
        assert message in outcome.message


@cases(
    "image, sent",
    ("", "lambda-stack-24-04"),
    ("lambda-stack-22-04", "lambda-stack-22-04"),
    (image_id("gpu-base-24-04", "us-west-1"), "gpu-base-24-04"),
)
async def test_image_is_a_family_or_an_id(it: Trial, image: str, sent: str) -> None:
    [outcome] = await it.renter.create([replace(await it.order(), image=image)])
    assert outcome.ok, outcome
    [machine] = it.market.instances.values()
    assert machine.order.image == sent


async def test_requested_region_without_capacity_is_listed_as_unavailable(it: Trial) -> None:
    [offer] = await it.renter.offers(Query(types=("gpu_8x_b200_sxm6",), regions=("us-east-1",)))
    assert offer.available == "no"
    assert await it.renter.offers(Query(types=("gpu_8x_b200_sxm6",))) == []


async def test_order_has_tags_image_and_script(it: Trial) -> None:
    await it.create("gpu1", "tok")
    [machine] = it.market.instances.values()
    assert machine.order.name == "reef--gpu1--tok"
    tags = {tag["key"]: tag["value"] for tag in machine.order.marks["tags"]}
    assert (tags["shoal-cluster"], tags["shoal-node"], tags["shoal-token"]) == ("reef", "gpu1", "tok")
    assert tags["shoal-epoch"].isdigit()
    assert machine.order.marks["hostname"] == "gpu1"
    assert machine.order.user_data == "#!/bin/sh\ntrue\n"
    assert machine.order.public_keys == (PUBLIC_KEY,)


async def test_machine_without_tags_is_identified_by_its_name(it: Trial) -> None:
    await it.create("gpu1", "tok")
    it.simulation.rewrite = lambda line, data: _without_tags(data)
    [found] = await it.listed()
    assert (found.cluster, found.node, found.token, found.created) == ("reef", "gpu1", "tok", None)


async def test_long_names_are_shortened_and_identified_by_tags(it: Trial) -> None:
    node, token = "node-" + "x" * 50, "t" * 40
    assert (await it.create(node, token)).ok
    [found] = await it.listed()
    assert (found.node, found.token) == (node, token)


async def test_order_without_a_key_is_rejected_before_any_request(it: Trial) -> None:
    [outcome] = await it.renter.create([replace(await it.order(), key_name="")])
    assert outcome.failure is FailureKind.INVALID
    assert "requires the name of an SSH key" in outcome.message
    assert it.made == 0


async def test_address_is_listed_before_the_machine_is_active(it: Trial) -> None:
    await it.create()
    [found] = await it.listed()
    assert (found.state, found.host) == ("pending", "")
    it.clock.now += 26
    [found] = await it.listed()
    assert (found.state, found.raw_state, found.host) == ("pending", "booting", "192.0.2.1")
    it.boot()
    [found] = await it.listed()
    assert (found.state, found.raw_state, found.user, found.port) == ("up", "active", "ubuntu", 22)


async def test_machine_without_a_private_address_is_up(it: Trial) -> None:
    order = await it.order()
    south = replace(order, offer=replace(order.offer, region="us-south-1"), token="t2", node="gpu2")
    assert [one.ok for one in await it.renter.create([order, south])] == [True, True]
    it.boot()
    assert [one.state for one in await it.listed()] == ["up", "up"]


@cases("status, states", ("defragmenting", [("pending", "defragmenting")]), ("terminated", []))
async def test_unknown_state_is_pending_and_a_terminated_machine_is_not_listed(
    it: Trial, status: str, states: list[tuple[str, str]]
) -> None:
    await it.create()
    it.simulation.rewrite = lambda line, data: {"data": [{**one, "status": status} for one in data["data"]]}
    assert [(one.state, one.raw_state) for one in await it.listed()] == states


async def test_machine_not_terminated_by_lambda_is_reported(it: Trial) -> None:
    await it.create()
    found = await it.listed()
    it.simulation.rewrite = lambda line, data: {"data": {"terminated_instances": []}}
    [outcome] = await it.renter.delete(found)
    assert outcome.failure is FailureKind.TRANSIENT
    assert outcome.message == f"Lambda did not terminate {found[0].id}"


async def test_machines_are_deleted_in_a_single_call(it: Trial) -> None:
    for count in range(3):
        await it.create(f"gpu{count}", f"t{count}")
    found = await it.listed()
    it.simulation.requests.clear()
    assert all(one.ok for one in await it.renter.delete(found))
    assert len(it.simulation.requests) == 1


async def test_key_is_matched_by_its_material(it: Trial) -> None:
    await api(it, "POST", "/ssh-keys", {"name": "laptop", "public_key": PUBLIC_KEY + " somebody's"})
    assert await it.renter.ensure_key(CLUSTER, PUBLIC_KEY) == "laptop"
    other = PUBLIC_KEY.replace("FyC2", "FyC3")
    assert (await it.renter.ensure_key(CLUSTER, other)).startswith("shoal-reef-")


# The simulator itself, with requests that the client never sends


async def test_simulator_enforces_the_rate_limits_of_lambda() -> None:
    async with trial(CASE, limited=True) as it:
        it.clock.now += 10
        key = await it.renter.ensure_key(CLUSTER, PUBLIC_KEY)
        it.clock.now += 10
        order = replace(await it.order(), key_name=key)
        outcomes = []
        for seconds in (10.0, 5.0, 7.0, 12.0):
            it.clock.now += seconds
            outcomes += await it.renter.create([order])
        assert [one.failure for one in outcomes] == [None, FailureKind.RATE, None, None]
        assert outcomes[1].retry_after == 12.0


@cases(
    "more, told",
    ({"quantity": 2}, (400, "global/invalid-parameters", "Requested too many instances.")),
    ({"region_name": None}, (400, "global/invalid-parameters", "region_name: Missing data for required field.")),
    ({"ssh_key_names": ["a", "b"]}, (400, "global/invalid-parameters", "ssh_key_names: exactly one")),
    ({"ssh_key_names": ["nobody's"]}, (404, "global/object-does-not-exist", "Specified object does not exist.")),
    ({"instance_type_name": "x"}, (404, "global/object-does-not-exist", "Specified object does not exist.")),
    ({"image": {"family": "x"}}, (404, "global/object-does-not-exist", "Specified object does not exist.")),
    ({"name": "x" * 65}, (400, "global/invalid-parameters", "name: Longer than maximum length 64.")),
    ({"hostname": "Up"}, (400, "global/invalid-parameters", "hostname: String does not match expected pattern.")),
    ({"tags": [{"key": "A", "value": ""}]}, (400, "global/invalid-parameters", "tags: Invalid key.")),
    ({"tags": [{"key": "ab", "value": "x" * 129}]}, (400, "global/invalid-parameters", "tags: Invalid value.")),
    (
        {"user_data": "x" * (1 << 20) + "x"},
        (400, "global/invalid-parameters", "user_data: Longer than maximum length."),
    ),
)
async def test_invalid_order_is_rejected_with_the_code_of_lambda(
    it: Trial, more: dict[str, Any], told: tuple[int, str, str]
) -> None:
    assert code(await launch(it, **more)) == told
    assert it.made == 0


async def test_instance_has_the_documented_fields(it: Trial) -> None:
    await launch(it, tags=[{"key": "ab", "value": "c"}])
    it.boot()
    _, answer = await api(it, "GET", "/instances")
    [shown] = answer["data"]
    assert {"id", "name", "ip", "private_ip", "status", "ssh_key_names", "region", "instance_type", "actions"} <= set(
        shown
    )
    assert shown["tags"] == [{"key": "ab", "value": "c"}]
    assert shown["jupyter_token"]
    assert not any("created" in name for name in shown)
    assert await api(it, "GET", f"/instances/{shown['id']}") == (200, {"data": shown})
    _, renamed = await api(it, "POST", f"/instances/{shown['id']}", {"name": "other"})
    assert renamed["data"]["name"] == "other"
    assert (await api(it, "POST", "/instance-operations/restart", {"instance_ids": [shown["id"]]}))[0] == 200


async def test_terminated_instance_is_not_found(it: Trial) -> None:
    _, made = await launch(it)
    [id] = made["data"]["instance_ids"]
    status, answer = await api(it, "POST", "/instance-operations/terminate", {"instance_ids": [id]})
    assert (status, answer["data"]["terminated_instances"][0]["status"]) == (200, "terminating")
    assert (await api(it, "GET", f"/instances/{id}"))[1]["data"]["actions"]["restart"][
        "reason_code"
    ] == "vm-is-terminating"
    it.clock.now += 31
    assert code(await api(it, "GET", f"/instances/{id}"))[:2] == (404, "global/object-does-not-exist")
    assert (await api(it, "POST", "/instance-operations/terminate", {"instance_ids": [id]}))[0] == 404


async def test_unknown_id_terminates_no_instance(it: Trial) -> None:
    _, made = await launch(it)
    ids = [*made["data"]["instance_ids"], "0" * 32]
    assert (await api(it, "POST", "/instance-operations/terminate", {"instance_ids": ids}))[0] == 404
    assert [one.phase for one in it.market.instances.values()] == ["pending"]


async def test_keys_are_created_listed_and_deleted(it: Trial) -> None:
    status, made = await api(it, "POST", "/ssh-keys", {"name": "new"})
    assert status == 200
    assert made["data"]["private_key"].startswith("-----BEGIN")
    _, listed = await api(it, "GET", "/ssh-keys")
    assert [set(key) for key in listed["data"]] == [{"id", "name", "public_key"}]
    assert code(await api(it, "POST", "/ssh-keys", {"name": "new"}))[:2] == (400, "global/duplicate")
    assert (await api(it, "DELETE", f"/ssh-keys/{made['data']['id']}"))[0] == 200
    assert (await api(it, "DELETE", f"/ssh-keys/{made['data']['id']}"))[0] == 404


async def test_images_contain_the_default_family(it: Trial) -> None:
    _, answer = await api(it, "GET", "/images")
    assert "lambda-stack-24-04" in {image["family"] for image in answer["data"]}


@cases("user, status", ("k", 200), ("", 401))
async def test_key_is_accepted_as_basic_auth_user(it: Trial, user: str, status: int) -> None:
    async with httpx.AsyncClient(auth=(user, "")) as client:
        assert (await client.get(it.url + "/instances")).status_code == status


def _without_tags(data: Any) -> Any:
    return {"data": [{name: value for name, value in one.items() if name != "tags"} for one in data["data"]]}
