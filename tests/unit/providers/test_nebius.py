"""What is special about Nebius: orders that fail later, machines at rest, keys, projects, stock, quotas and prices."""

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from tests.contract.rental_providers import CASES, CLUSTER, KEY, PUBLIC_KEY, Trial, renting
from tests.support.cases import cases

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import FailureKind, Offer, ProviderLogin, Query, RentalOrder
from shoal.cloud.providers.nebius import NebiusProvider, instance_order
from shoal.cloud.providers.nebius_api import INSTANCES, read_refusal
from shoal.cloud.providers.responses import ApiError
from shoal.errors import ProviderError
from shoal_simulators.nebius import SERVICE_ACCOUNT, NebiusSimulator

CASE = CASES["nebius"]
SPOT = replace(CASE.offer, market="spot", usd_hour=0.8525)


def calls(it: Trial, method: str) -> int:
    return sum(one["path"].endswith(f"/{method}") for one in it.simulation.requests)


@cases(
    "fault, failure, words",
    ("stockout", FailureKind.CAPACITY, "RESOURCE_EXHAUSTED: VM schedule timeout; no host has room"),
    ("quota", FailureKind.QUOTA, "RESOURCE_EXHAUSTED: Quota limit exceeded; 0 left"),
)
async def test_accepted_order_that_fails_leaves_no_machine(
    it: Trial, fault: str, failure: FailureKind, words: str
) -> None:
    it.fault(fault)
    outcome = await it.create()
    assert (outcome.failure, outcome.scope, outcome.id) == (failure, "offer", "")
    assert outcome.message == f"acme: the order was accepted, and failed: {words}"
    assert calls(it, "Delete") == 1
    assert await it.listed() == []


async def test_machine_of_a_failed_order_is_listed_as_stopped(it: Trial) -> None:
    it.fault("stockout")
    order = await it.order()
    api = it.renter._api  # type: ignore[attr-defined]
    project = "project-e00-eu-north1"
    request = instance_order(order, project, "vpcsubnet-eu-north1", {})
    await api.call(INSTANCES, "Create", request, creates=True, key=order.token)
    [left] = await it.listed()
    assert (left.state, left.token) == ("stopped", "t0ken1")
    with pytest.raises(ApiError, match=r"ALREADY_EXISTS: The name reef-gpu1-t0ken1 is taken") as caught:
        await api.call(INSTANCES, "Create", request, creates=True, key="another")
    assert caught.value.failure is FailureKind.CONFLICT


async def test_new_machine_is_pending_although_it_is_shown_as_stopped(it: Trial) -> None:
    await it.create()
    [shown] = [it.simulation.simulator._shown(one) for one in it.market.instances.values()]  # type: ignore[attr-defined]
    assert shown["status"] == {"state": "STOPPED", "reconciling": True}
    assert [one.state for one in await it.listed()] == ["pending"]
    it.boot()
    [found] = await it.listed()
    assert found.host == "192.0.2.1"  # without the /32


async def test_preempted_machine_is_stopped_until_it_is_deleted(it: Trial) -> None:
    [outcome] = await it.renter.create([replace(await it.order(), offer=SPOT)])
    assert outcome.ok, outcome
    it.boot()
    it.market.preempt(outcome.id)
    [found] = await it.listed()
    assert (found.market, found.state, found.ending) == ("spot", "stopping", True)
    it.clock.now += 61
    await it.listed()
    it.clock.now += 100
    [found] = await it.listed()
    assert found.state == "stopped"
    assert (await it.renter.delete([found]))[0].ok
    assert await it.listed() == []


async def test_machine_with_another_policy_would_be_started_again(it: Trial) -> None:
    order = await it.order()
    request = instance_order(order, "project-e00-eu-north1", "vpcsubnet-eu-north1", {})
    del request["spec"]["recoveryPolicy"]
    answer = await it.renter._api.call(INSTANCES, "Create", request)  # type: ignore[attr-defined]
    it.boot()
    it.market.kill(answer.text("resourceId"))
    await it.listed()
    it.boot()
    assert [one.state for one in await it.listed()] == ["up"]


# Keys


@pytest.fixture(scope="module")
def private_key() -> str:
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def service_key(private_key: str, who: str = SERVICE_ACCOUNT) -> str:
    subject = {"type": "JWT", "alg": "RS256", "private-key": private_key, "kid": "publickey-1", "iss": who, "sub": who}
    return json.dumps({"subject-credentials": subject})


async def test_key_of_a_service_account_is_exchanged_for_a_token(it: Trial, private_key: str) -> None:
    it.simulation.key = KEY
    async with renting(CASE, it.url, secret=service_key(private_key)) as renter:
        assert await renter.instances(CLUSTER) == []
        assert calls(it, "Exchange") >= 1


async def test_token_of_a_service_account_is_removed_from_messages(it: Trial, private_key: str) -> None:
    async with renting(CASE, it.url, secret=service_key(private_key)) as renter:
        await renter.instances(CLUSTER)
        tokens = list(it.simulation.simulator.stored("tokens"))
        it.simulation.rewrite = lambda line, data: (
            {**data, "message": f"too much of {tokens[-1]}"} if "code" in data else data
        )
        it.fault("rate")
        with pytest.raises(ApiError) as caught:
            await renter.instances(CLUSTER)
    assert caught.value.message.endswith("too much of ***")


async def test_wrong_key_of_a_service_account_is_an_error_at_once(it: Trial, private_key: str) -> None:
    async with renting(CASE, it.url, secret=service_key(private_key, "serviceaccount-other")) as renter:
        with pytest.raises(ApiError) as caught:
            await renter.instances(CLUSTER)
    assert caught.value.failure is FailureKind.AUTH
    assert "PRIVATE KEY" not in str(caught.value)


@cases("secret", "", "{}", "{", '{"subject-credentials": {"alg": "none"}}', "tok\nen")
async def test_unusable_key_is_an_error_with_a_fix(secret: str) -> None:
    renter = rental_provider(ProviderLogin("acme", "nebius", secret))
    with pytest.raises(ProviderError) as caught:
        await renter.instances(CLUSTER)
    assert caught.value.message == "the key of acme is neither a token nor the JSON of a service account's key"
    assert "nebius iam auth-public-key generate" in caught.value.hint


def test_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nebius", None)
    with pytest.raises(ProviderError, match=r"^acme needs the package nebius, which is not installed") as caught:
        rental_provider(ProviderLogin("acme", "nebius", "token"))
    assert "install" in caught.value.hint
    assert "nebius" in caught.value.hint


# Projects, stock, quotas and prices


async def test_region_is_the_default_project_or_the_one_of_the_settings(it: Trial) -> None:
    await it.create()
    [machine] = it.market.instances.values()
    assert machine.order.marks["metadata"]["parentId"] == "project-e00-eu-north1"
    async with renting(CASE, it.url, project="project-e00-eu-west1") as there:
        assert await there.instances(CLUSTER) == []
        assert {one.region for one in await there.offers(Query())} == {"eu-west1"}
        [outcome] = await there.create([await it.order()])
        assert outcome.failure is FailureKind.INVALID
        assert outcome.message == "acme: the account has no project in eu-north1"


async def test_offers_have_stock_and_moving_prices(it: Trial) -> None:
    for type in it.market.types.values():
        it.market._taken[type.name, "eu-west1"] = 16
    offers = await it.renter.offers(Query(gpu="l40s", gpus=1, types=(CASE.offer.type,)))
    shown = {(one.region, one.market): (one.available, one.usd_hour, one.as_of) for one in offers}
    assert shown == {
        ("eu-north1", "on-demand"): ("yes", 1.55, "2026-08-22"),
        ("eu-north1", "spot"): ("yes", 0.8525, ""),
        ("eu-west1", "on-demand"): ("no", 1.55, "2026-08-22"),
        ("eu-west1", "spot"): ("no", 0.8525, ""),
    }
    assert [(one.gpu, one.gpus, one.gpu_memory_gb, one.cpus, one.memory_gb) for one in offers[:1]] == [
        ("L40S", 1, 48, 8, 32)
    ]


async def test_spot_price_without_an_estimate_is_that_on_demand(it: Trial) -> None:
    it.simulation.rewrite = lambda line, data: {} if line.endswith("/Estimate") else data
    [offer] = await it.renter.offers(Query(types=(SPOT.type,), regions=("eu-north1",), market="spot"))
    assert (offer.usd_hour, offer.as_of) == (1.55, "2026-08-22")


async def test_quotas_are_of_machines_gpus_and_addresses(it: Trial) -> None:
    await it.create()
    assert isinstance(it.renter, NebiusProvider)
    shown = {(one.name, one.limit, one.usage, one.need) for one in await it.renter.quotas(replace(CASE.offer, gpus=1))}
    assert shown == {
        ("compute.instance.count in eu-north1", 64, 1, 1),
        ("compute.instance.gpu.l40s in eu-north1", 64, 1, 1),
        ("vpc.ipv4-address.public.count in eu-north1", 64, 1, 1),
    }
    assert await it.renter.quotas(replace(CASE.offer, region="nowhere")) == []


# Orders and errors


def order(**more: Any) -> RentalOrder:
    offer = Offer("acme", "gpu-h100-sxm 8gpu-128vcpu-1600gb", "eu-north1", gpus=8)
    return replace(RentalOrder("reef", "gpu1", "t1", offer, PUBLIC_KEY, user_data="true"), **more)


def test_order_is_for_a_machine_that_ends_with_its_disk() -> None:
    asked = instance_order(order(), "project-1", "subnet-1", {"gpu_cluster": "gpucluster-1", "security_groups": "a b"})
    spec = asked["spec"]
    assert asked["metadata"] == {
        "parentId": "project-1",
        "name": "reef-gpu1-t1",
        "labels": {"shoal-cluster": "reef", "shoal-node": "gpu1", "shoal-token": "t1"},
    }
    assert spec["recoveryPolicy"] == "FAIL"
    assert spec["onDemand"] == {}
    assert "preemptible" not in spec
    assert spec["gpuCluster"] == {"id": "gpucluster-1"}
    assert spec["networkInterfaces"][0]["securityGroups"] == [{"id": "a"}, {"id": "b"}]
    assert spec["bootDisk"]["managedDisk"]["spec"] == {
        "sizeGibibytes": 100,
        "type": "NETWORK_SSD",
        "sourceImageFamily": {"imageFamily": "ubuntu24.04-cuda13.0"},
    }
    config = json.loads(spec["cloudInitUserData"].removeprefix("#cloud-config\n"))
    assert config["ssh_authorized_keys"] == [PUBLIC_KEY]
    assert config["runcmd"] == [["sh", "/run/shoal-user-data"]]
    assert config["write_files"][0]["content"] == "AllowTcpForwarding yes\n"


def test_spot_order_follows_the_spot_price_and_images_are_families_or_ids() -> None:
    spec = instance_order(order(offer=SPOT, image="computeimage-1"), "p", "s", {})["spec"]
    assert spec["preemptible"] == {"onPreemption": "STOP"}
    assert spec["followsSpotPrice"] == {}
    assert "onDemand" not in spec
    assert spec["bootDisk"]["managedDisk"]["spec"]["sourceImageId"] == "computeimage-1"
    cpu = instance_order(order(offer=replace(SPOT, gpus=0)), "p", "s", {})["spec"]
    family = cpu["bootDisk"]["managedDisk"]["spec"]["sourceImageFamily"]
    assert family == {"imageFamily": "ubuntu24.04-driverless"}


async def test_boot_script_that_is_too_long_is_not_sent(it: Trial) -> None:
    [outcome] = await it.renter.create([replace(await it.order(), user_data="#" * 40_000)])
    assert outcome.failure is FailureKind.INVALID
    assert outcome.message == "acme: the boot script is longer than 32768 bytes"
    assert calls(it, "Create") == 0


@cases(
    "code, message, errors, failure",
    ("RESOURCE_EXHAUSTED", "x", [{"notEnoughResources": {}}], FailureKind.CAPACITY),
    ("RESOURCE_EXHAUSTED", "x", [{"quotaFailure": {}}], FailureKind.QUOTA),
    ("RESOURCE_EXHAUSTED", "x", [{"tooManyRequests": {}}], FailureKind.RATE),
    ("RESOURCE_EXHAUSTED", "VM schedule timeout", [], FailureKind.CAPACITY),
    ("RESOURCE_EXHAUSTED", "Quota exceeded", [], FailureKind.QUOTA),
    ("ABORTED", "x", [{"operationConflict": {}}], FailureKind.TRANSIENT),
    ("FAILED_PRECONDITION", "project is suspended", [], FailureKind.BALANCE),
    ("FAILED_PRECONDITION", "x", [], FailureKind.INVALID),
    ("INVALID_ARGUMENT", "x", [{"badRequest": {}}], FailureKind.INVALID),
    ("PERMISSION_DENIED", "x", [], FailureKind.AUTH),
    ("UNAUTHENTICATED", "x", [], FailureKind.AUTH),
    ("ALREADY_EXISTS", "x", [], FailureKind.CONFLICT),
    *((code, "x", [], FailureKind.AMBIGUOUS) for code in ("DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE")),
)
def test_errors_are_mapped(code: str, message: str, errors: list[dict[str, Any]], failure: FailureKind) -> None:
    assert read_refusal(code, message, errors, FailureKind.AMBIGUOUS).failure is failure


def test_simulator_has_every_type_of_the_table() -> None:
    assert {type.gpu for type in NebiusSimulator.types} == {"H100", "H200", "B200", "B300", "L40S", ""}
