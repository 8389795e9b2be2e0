"""The rules of a VPC at Google are exactly what the file says, whatever was there before."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from tests.contract.rental_providers import CASES, CLUSTER, Trial, renting
from tests.support.cases import cases

from shoal.cloud.providers.capabilities import FirewallFix, HasFirewall
from shoal.cloud.providers.responses import ApiError
from shoal_simulators.gcp import GoogleComputeSimulator

CASE = CASES["gcp"]
PORTS = ("tcp:22", "udp:51820")
LAN = ("tcp:22", "tcp:6817", "tcp:60001-63000")
NETWORK = "https://www.googleapis.com/compute/v1/projects/reefs/global/networks/"
CREATE = "gcloud compute firewall-rules create"
UPDATE = "gcloud compute firewall-rules update"


def cloud(it: Trial) -> GoogleComputeSimulator:
    assert isinstance(it.simulation.simulator, GoogleComputeSimulator)
    return it.simulation.simulator


def rules(it: Trial) -> dict[str, dict[str, Any]]:
    """The VPC's rules, by project and name."""
    return cloud(it).stored("firewalls")


async def order(it: Trial, ports: tuple[str, ...] = PORTS, **settings: str) -> list[str]:
    """Order a machine in a new process. Returns what was written, as `METHOD rule`."""
    before = len(it.simulation.requests)
    async with renting(CASE, it.url, **settings) as renter:
        [outcome] = await renter.create([replace(await it.order(token=f"t{it.made}"), ports=ports)])
    assert outcome.ok, outcome.message
    sent = [(one["method"], one["path"]) for one in it.simulation.requests[before:] if "/firewalls" in one["path"]]
    return [f"{method} {path.rpartition('/')[2]}" for method, path in sent if method != "GET"]


async def fixes(it: Trial, ports: tuple[str, ...] = PORTS, **settings: str) -> list[FirewallFix]:
    async with renting(CASE, it.url, **settings) as renter:
        assert isinstance(renter, HasFirewall)
        return await renter.firewall_fixes(CLUSTER, ports)


async def test_first_order_makes_the_rules_and_waits_for_them(it: Trial) -> None:
    ports, inside = await fixes(it)
    options = "--target-tags=shoal-reef --allow=tcp:22,udp:51820"
    assert ports.reason == "shoal-reef-ports is missing"
    assert ports.command == (
        f"{CREATE} shoal-reef-ports --project=reefs --network=default --source-ranges=0.0.0.0/0 {options}"
    )
    assert inside.command == (
        f"{CREATE} shoal-reef-inside --project=reefs --network=default"
        " --source-tags=shoal-reef --target-tags=shoal-reef --allow=icmp,tcp,udp"
    )
    assert await order(it) == ["POST firewalls", "POST firewalls"]
    assert rules(it)["reefs/shoal-reef-ports"] == {
        "kind": "compute#firewall",
        "name": "shoal-reef-ports",
        "network": f"{NETWORK}default",
        "direction": "INGRESS",
        "priority": 1000,
        "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}, {"IPProtocol": "udp", "ports": ["51820"]}],
        "sourceRanges": ["0.0.0.0/0"],
        "targetTags": ["shoal-reef"],
        "disabled": False,
    }
    assert await fixes(it) == []
    assert await order(it) == []


async def test_ports_of_slurm_are_open_to_private_addresses_only(it: Trial) -> None:
    await order(it, LAN, sources="203.0.113.7")
    lan, ports = rules(it)["reefs/shoal-reef-lan"], rules(it)["reefs/shoal-reef-ports"]
    assert lan["allowed"] == [{"IPProtocol": "tcp", "ports": ["60001-63000", "6817"]}]
    assert lan["sourceRanges"] == ["10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16"]
    assert (ports["allowed"], ports["sourceRanges"]) == ([{"IPProtocol": "tcp", "ports": ["22"]}], ["203.0.113.7/32"])
    assert [(fix.reason, fix.command) for fix in await fixes(it, PORTS, sources="203.0.113.7")][1:] == [
        (
            "shoal-reef-lan is of no use any more",
            "gcloud compute firewall-rules delete shoal-reef-lan --project=reefs --quiet",
        )
    ]
    assert await order(it, PORTS) == ["PATCH shoal-reef-ports", "DELETE shoal-reef-lan"]
    assert "reefs/shoal-reef-lan" not in rules(it)


async def test_narrower_sources_close_ssh_to_others(it: Trial) -> None:
    await order(it)
    [fix] = await fixes(it, sources="203.0.113.7, 198.51.100.0/24")
    assert fix.reason == "shoal-reef-ports: its sources: 0.0.0.0/0, not 198.51.100.0/24, 203.0.113.7/32"
    assert fix.command == (
        f"{UPDATE} shoal-reef-ports --project=reefs --source-ranges=198.51.100.0/24,203.0.113.7/32"
        " --target-tags=shoal-reef --allow=tcp:22,udp:51820"
    )
    assert await order(it, sources="203.0.113.7, 198.51.100.0/24") == ["PATCH shoal-reef-ports"]
    assert rules(it)["reefs/shoal-reef-ports"]["sourceRanges"] == ["198.51.100.0/24", "203.0.113.7/32"]
    assert await fixes(it, sources="198.51.100.0/24 203.0.113.7/32") == []


async def test_other_port_and_disabled_rule_are_corrected(it: Trial) -> None:
    await order(it)
    rules(it)["reefs/shoal-reef-ports"]["disabled"] = True
    [fix] = await fixes(it, ("tcp:22", "udp:51000"))
    assert fix.reason == "shoal-reef-ports: its ports: tcp:22, udp:51820, not tcp:22, udp:51000; it is disabled"
    assert fix.command.startswith(UPDATE) and fix.command.endswith("--allow=tcp:22,udp:51000 --no-disabled")
    assert await order(it, ("tcp:22", "udp:51000")) == ["PATCH shoal-reef-ports"]
    assert await fixes(it, ("tcp:22", "udp:51000")) == []


@cases(
    "change, reason",
    ({"network": f"{NETWORK}old"}, "its network: old, not default"),
    ({"direction": "EGRESS"}, "its other conditions: EGRESS, not none"),
    ({"sourceTags": ["web"]}, "its sources: 0.0.0.0/0, web, not 0.0.0.0/0"),
    ({"allowed": None, "denied": [{"IPProtocol": "tcp"}]}, "its ports: none, not tcp:22, udp:51820"),
)
async def test_rule_that_no_patch_corrects_is_made_anew(it: Trial, change: dict[str, Any], reason: str) -> None:
    await order(it)
    old = rules(it)["reefs/shoal-reef-ports"] | change
    rules(it)["reefs/shoal-reef-ports"] = {name: value for name, value in old.items() if value is not None}
    [fix] = await fixes(it)
    assert fix.reason.startswith(f"shoal-reef-ports: {reason}")
    delete = "gcloud compute firewall-rules delete shoal-reef-ports --project=reefs --quiet"
    assert fix.command.startswith(f"{delete} && {CREATE} shoal-reef-ports --project=reefs --network=default ")
    assert await order(it) == ["DELETE shoal-reef-ports", "POST firewalls"]
    assert await fixes(it) == []


@cases(
    "subnetwork, project",
    ("regions/us-central1/subnetworks/lab", "reefs"),
    ("projects/host/regions/us-central1/subnetworks/lab", "host"),
    ("https://www.googleapis.com/compute/v1/projects/host/regions/us-central1/subnetworks/lab", "host"),
)
async def test_rules_are_in_the_network_of_the_subnetwork(it: Trial, subnetwork: str, project: str) -> None:
    await order(it)
    network = f"projects/{project}/global/networks/research"
    cloud(it).stored("subnetworks")[f"{project}/us-central1/lab"] = {"network": network}
    assert f"--project={project} --network=research" in (await fixes(it, subnetwork=subnetwork))[0].command
    assert await order(it, subnetwork=subnetwork) == ["POST firewalls", "POST firewalls"]
    made = [key for key, rule in rules(it).items() if rule["network"].endswith(f"/v1/{network}")]
    assert len(made) == 2 and all(key.startswith(f"{project}/shoal-reef-") for key in made)
    assert await fixes(it, subnetwork=subnetwork) == []
    assert await fixes(it) == [], "machines that are left in the other network keep its rules"


async def test_subnetwork_that_is_not_there_is_an_error_of_check(it: Trial, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ApiError, match="'reefs/us-central1/lab' was not found"):
        await fixes(it, subnetwork="regions/us-central1/subnetworks/lab")
    await order(it, subnetwork="regions/us-central1/subnetworks/lab")
    assert caplog.messages[0].startswith("cannot make firewall rules of cluster reef: acme: GET /projects/reefs/")


@cases("right", "get", "create", "update")
async def test_key_that_may_not_is_told_the_command_and_the_reason(
    it: Trial, caplog: pytest.LogCaptureFixture, right: str
) -> None:
    caplog.set_level(logging.WARNING)
    if right == "update":
        await order(it)
    cloud(it).firewall_rights.discard(right)
    await order(it, sources="203.0.113.7")  # the default network admits SSH without a rule
    verb = "update" if right == "update" else "create"
    assert f"403: forbidden: Required 'compute.firewalls.{right}' permission.; fix: " in caplog.messages[0]
    assert f"gcloud compute firewall-rules {verb} shoal-reef-ports " in caplog.messages[0]
    [fix, *_] = await fixes(it, sources="203.0.113.7")
    assert fix.command == caplog.messages[0].partition("; fix: ")[2]
    cloud(it).firewall_rights.add(right)
    await order(it, sources="203.0.113.7")
    assert await fixes(it, sources="203.0.113.7") == []


async def test_rule_whose_operation_fails_is_not_taken_for_made(it: Trial, caplog: pytest.LogCaptureFixture) -> None:
    cloud(it).firewall_errors = [{"code": "QUOTA_EXCEEDED", "message": "Quota 'FIREWALLS' exceeded.  Limit: 100.0"}]
    orders = [replace(await it.order(token=f"n{number}"), ports=PORTS) for number in range(2)]
    assert (await it.renter.create(orders[:1]))[0].ok
    assert "acme: QUOTA_EXCEEDED: Quota 'FIREWALLS' exceeded.  Limit: 100.0; fix: gcloud compute" in caplog.messages[0]
    assert rules(it) == {}
    cloud(it).firewall_errors = []
    assert (await it.renter.create(orders[1:]))[0].ok
    assert sorted(rules(it)) == ["reefs/shoal-reef-inside", "reefs/shoal-reef-ports"], "tried again with the next order"


async def test_rejected_key_is_an_error_of_check(it: Trial) -> None:
    it.fault("auth")
    with pytest.raises(ApiError, match="401"):
        await fixes(it)


async def test_simulated_google_rejects_what_google_rejects(it: Trial) -> None:
    await order(it)
    renter: Any = it.renter
    path = "/projects/reefs/global/firewalls"
    rule = {"name": "shoal-reef-ports", "allowed": [{"IPProtocol": "tcp"}]}
    for method, where, body, problem in (
        ("POST", path, rule, "already exists"),
        ("POST", path, {**rule, "name": "x", "sourceRanges": ["203.0.113.7/24"]}, "Must be a valid CIDR"),
        ("POST", path, {**rule, "name": "x", "network": "projects/other/global/networks/n"}, "resource.network"),
        ("PATCH", f"{path}/shoal-reef-ports", {"network": "global/networks/n"}, "cannot be changed"),
        ("PATCH", f"{path}/x", {}, "was not found"),
    ):
        with pytest.raises(ApiError, match=problem):
            await renter._api.request(method, where, json=body)
