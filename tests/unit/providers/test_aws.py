"""Behaviour specific to Amazon EC2; the contract tests cover what all providers share."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest
from tests.contract.rental_providers import CASES, PUBLIC_KEY, Trial, account, renting
from tests.support.cases import cases

from shoal.cloud.providers import aws
from shoal.cloud.providers.api import FailureKind, Market, Offer, Query, RentalOrder
from shoal.cloud.providers.aws_query import Credentials, QueryClient, flatten, parse_credentials, read_xml, sign
from shoal.cloud.providers.aws_quotas import quota_of
from shoal.cloud.providers.capabilities import HasQuotas
from shoal.cloud.providers.responses import ApiError
from shoal.roles.rented_images import image_system
from shoal_simulators import aws_groups
from shoal_simulators.market import ApiRejection

CASE = CASES["aws"]
ORDER = RentalOrder("reef", "gpu1", "t0ken1", CASE.offer, PUBLIC_KEY, user_data="#!/bin/sh\necho me\n", disk_gb=120)


# The protocol


def test_signature_equals_botocores() -> None:
    body = b"Action=DescribeRegions&Version=2016-11-15"
    at = datetime(2026, 11, 16, 6, tzinfo=UTC)
    headers = sign(
        Credentials("AKIDEXAMPLE", "SECRETEXAMPLE"), "us-east-1", "https://ec2.us-east-1.amazonaws.com/", body, at
    )
    assert headers["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20261116/us-east-1/ec2/aws4_request,"
        " SignedHeaders=content-type;host;x-amz-date,"
        " Signature=4e327dab20977167855acf60fe765ac8802ffd04bf3e49d26a2aeb8a9302cbbf"
    )


def test_session_token_is_signed() -> None:
    headers = sign(Credentials("A", "b", "c"), "eu-west-1", "https://x/", b"")
    assert headers["x-amz-security-token"] == "c"
    assert ";x-amz-security-token," in headers["authorization"]


@cases(
    "name, market, code",
    ("g6.xlarge", "on-demand", "L-DB2E81BA"),
    ("gr6.4xlarge", "spot", "L-3819A6DF"),
    ("p4d.24xlarge", "on-demand", "L-417A185B"),
    ("p4d.24xlarge", "spot", "L-7212CCBC"),
    ("p5.48xlarge", "spot", "L-C4BD4855"),
    ("p6-b200.48xlarge", "spot", "L-C4BD4855"),
    ("c7i.large", "on-demand", "L-1216C47A"),
    ("trn1.2xlarge", "on-demand", None),
)
def test_family_and_market_decide_on_the_quota(name: str, market: Market, code: str | None) -> None:
    quota = quota_of(name, market)
    assert (quota.code if quota else None) == code


async def test_machines_that_run_count_against_the_quota(it: Trial) -> None:
    offer = replace(CASE.offer, cpus=4)
    assert isinstance(it.renter, HasQuotas)
    [before] = await it.renter.quotas(offer)
    [made] = await it.renter.create([ORDER])
    assert made.ok
    [after] = await it.renter.quotas(offer)
    [other] = await it.renter.quotas(replace(offer, market="on-demand"))
    assert (before.usage, after.usage, other.usage, before.machines - after.machines) == (0, 4, 0, 1)


@cases(
    "text, profile, expected",
    ("AKID:s3cret/+", "default", Credentials("AKID", "s3cret/+")),
    ("AKID:s3cret:session==\n", "default", Credentials("AKID", "s3cret", "session==")),
    ("[default]\naws_access_key_id = A\naws_secret_access_key = %b\n", "default", Credentials("A", "%b")),
    (
        "[default]\nx = 1\n[lab]\naws_access_key_id=A\naws_secret_access_key=b\naws_session_token=c\n",
        "lab",
        Credentials("A", "b", "c"),
    ),
    ('{"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "b"}', "default", Credentials("A", "b")),
    ("[other]\naws_access_key_id = A\n", "default", None),
    ("no key", "default", None),
    ("{", "default", None),
    ("[broken", "default", None),
    ("", "default", None),
)
def test_key_may_be_a_pair_a_file_or_json(text: str, profile: str, expected: Credentials | None) -> None:
    assert parse_credentials(text, profile) == expected


def test_form_numbers_lists_from_one() -> None:
    fields = {"A": 1, "B": [{"C": True}, {"C": None, "D": ["x", "y"]}], "E": {"F": "g"}}
    assert flatten(fields) == {"A": "1", "B.1.C": "true", "B.2.D.1": "x", "B.2.D.2": "y", "E.F": "g"}


def test_xml_is_read_without_its_namespace() -> None:
    text = (
        '<R xmlns="http://x/"><aSet/><bSet><item><n>1</n></item></bSet><c>\n d </c><e/><gpus><item>1</item></gpus></R>'
    )
    expected = {"aSet": [], "bSet": [{"n": "1"}], "c": "d", "e": "", "gpus": ["1"]}
    assert read_xml(ElementTree.fromstring(text)) == expected


# Orders


def test_order_is_complete_and_always_the_same() -> None:
    order = aws.machine_order(ORDER, "ami-1", "/dev/sda1", "subnet-1", "sg-1")
    assert order == aws.machine_order(ORDER, "ami-1", "/dev/sda1", "subnet-1", "sg-1")
    assert order["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert order["InstanceMarketOptions"]["MarketType"] == "spot"
    assert order["BlockDeviceMapping"][0]["Ebs"] == {
        "VolumeSize": 120,
        "VolumeType": "gp3",
        "DeleteOnTermination": True,
    }
    assert len(order["ClientToken"]) == 64
    elsewhere = replace(ORDER, offer=replace(ORDER.offer, zone="us-east-1a"))
    assert aws.machine_order(elsewhere, "ami-1", "/dev/sda1", "s", "sg-1")["ClientToken"] != order["ClientToken"]


def test_capacity_block_is_named_by_its_reservation() -> None:
    order = flatten(aws.machine_order(ORDER, "ami-1", "/dev/sda1", "subnet-1", "sg-1", "cr-12"))
    assert order["InstanceMarketOptions.MarketType"] == "capacity-block"
    assert order["CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"] == "cr-12"
    assert not any("Spot" in name for name in order)


@cases(
    "offer, image",
    (Offer("a", "g6.xlarge", "r", gpus=1), "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-"),
    (Offer("a", "g5g.xlarge", "r", gpus=1, arch="arm64"), "/aws/service/deeplearning/ami/arm64/"),
    (Offer("a", "c7i.large", "r"), "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/"),
)
def test_default_image_is_ubuntu_of_the_architecture(offer: Offer, image: str) -> None:
    assert aws.default_image(offer).startswith(image)
    assert image_system(aws.default_image(offer)) == aws.AwsProvider.abilities.system


async def test_machine_has_the_key_and_runs_the_script(it: Trial) -> None:
    assert (await it.renter.create([ORDER]))[0].ok
    [machine] = it.market.instances.values()
    assert machine.order.public_keys == (PUBLIC_KEY,)
    assert machine.order.user_data == ORDER.user_data
    assert machine.order.zone == "us-east-1b"


async def test_own_image_is_looked_up_for_its_root_disk(it: Trial) -> None:
    assert (await it.renter.create([replace(ORDER, image="ami-0123")]))[0].ok
    [machine] = it.market.instances.values()
    assert machine.order.marks["image"] == "ami-0123"


# The security group

OPEN = [["-1", "", "", "Groups", "SELF"], ["tcp", "22", "22", "IpRanges", "0.0.0.0/0"]]
LAN = ("tcp:22", "tcp:6817", "tcp:60001-63000")


async def group_rules(it: Trial, ports: tuple[str, ...] = (), **settings: str) -> list[list[str]]:
    """The rules of the cluster's group after an order of a new process. Its own id is SELF."""
    async with renting(CASE, it.url, **settings) as again:
        [outcome] = await again.create([replace(ORDER, token=f"t{len(it.market.instances)}", ports=ports)])
    assert outcome.ok, outcome.message
    [group] = it.market.notes["groups"].values()
    assert group["groupName"] == "shoal-reef"
    return [["SELF" if field == group["groupId"] else field for field in rule] for rule in group["rules"]]


async def test_security_group_is_made_once_with_its_rules(it: Trial) -> None:
    assert await group_rules(it) == OPEN
    before = len(it.simulation.requests)
    assert await group_rules(it) == OPEN
    assert len(it.simulation.requests) - before == 3, "subnets, the group and the order"


async def test_narrowed_source_of_ssh_revokes_the_wider_one(it: Trial) -> None:
    await group_rules(it, ("tcp:22", "udp:51820"))
    rules = await group_rules(it, ("tcp:22", "udp:51820"), ssh_from="203.0.113.7, 2001:db8::/32")
    assert rules == [
        OPEN[0],
        ["udp", "51820", "51820", "IpRanges", "0.0.0.0/0"],
        ["tcp", "22", "22", "IpRanges", "203.0.113.7/32"],
        ["tcp", "22", "22", "Ipv6Ranges", "2001:db8::/32"],
    ]
    assert await group_rules(it) == OPEN, "and what the file no longer has is closed"


async def test_ports_of_slurm_are_open_to_private_addresses_only(it: Trial) -> None:
    rules = await group_rules(it, LAN)
    assert rules[:2] == OPEN
    assert [rule[1:3] for rule in rules[2:]] == [["6817", "6817"]] * 4 + [["60001", "63000"]] * 4
    assert {rule[4] for rule in rules[2:]} == {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"}
    assert await group_rules(it, LAN) == rules


async def test_rule_that_cannot_be_removed_is_named_and_stops_no_order(
    it: Trial, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(*_: object) -> None:
        raise ApiRejection("invalid", "UnauthorizedOperation: You are not authorized to perform this operation")

    await group_rules(it, ("tcp:22", "udp:51820"))
    monkeypatch.setattr(aws_groups, "revoke", denied)
    rules = await group_rules(it, ("tcp:22", "udp:51820"), ssh_from="203.0.113.7")
    assert ["tcp", "22", "22", "IpRanges", "203.0.113.7/32"] in rules
    assert "security group shoal-reef still admits 0.0.0.0/0: " in caplog.text
    assert "allow ec2:RevokeSecurityGroupIngress to the key, or remove the rule by hand" in caplog.text


async def test_group_that_cannot_be_corrected_is_not_used(it: Trial) -> None:
    async with renting(CASE, it.url, ssh_from="office") as bad:
        [outcome] = await bad.create([ORDER])
    assert outcome.failure is FailureKind.INVALID
    assert outcome.message.endswith("InvalidParameterValue: CIDR block office is malformed")
    assert it.made == 0


async def test_range_of_ports_is_two_numbers_to_amazon(it: Trial) -> None:
    await group_rules(it)
    [group] = it.market.notes["groups"]
    rule = {"IpProtocol": "tcp", "FromPort": "1-2", "ToPort": "1-2", "IpRanges": [{"CidrIp": "10.0.0.0/8"}]}
    ec2 = QueryClient(account(CASE, it.url), "", read_error=aws.read_error)
    try:
        with pytest.raises(ApiError, match="Must be integers"):
            await ec2.call("us-east-1", "AuthorizeSecurityGroupIngress", GroupId=group, IpPermissions=[rule])
    finally:
        await ec2.close()


async def test_region_outside_of_the_settings_is_never_ordered_or_listed(it: Trial) -> None:
    [outcome] = await it.renter.create([replace(ORDER, offer=replace(ORDER.offer, region="eu-west-1", zone=""))])
    assert outcome.failure is FailureKind.INVALID
    with pytest.raises(ApiError, match="eu-west-1 is none of this account's regions") as caught:
        await it.renter.offers(Query(regions=("eu-west-1",)))
    assert caught.value.hint == 'add it to the account: settings: {regions: "us-east-1 us-west-2 eu-west-1"}'
    assert it.made == 0


async def test_machines_of_all_regions_are_listed(it: Trial) -> None:
    await it.create("gpu1", "t1")
    west = replace(ORDER, token="t2", offer=Offer("acme", "g4dn.xlarge", "us-west-2", "us-west-2a", gpus=1))
    assert (await it.renter.create([west]))[0].ok
    assert sorted((one.region, one.market) for one in await it.listed()) == [
        ("us-east-1", "spot"),
        ("us-west-2", "on-demand"),
    ]


async def test_on_demand_price_comes_from_the_table_and_spot_from_the_api(it: Trial) -> None:
    offers = await it.renter.offers(Query(types=("g6.xlarge",)))
    assert {(one.market, one.usd_hour, one.as_of) for one in offers} == {
        ("on-demand", 0.805, "2026-08-22"),
        ("spot", 0.77, ""),
    }
    [arm] = await it.renter.offers(Query(types=("g5g.xlarge",)))
    assert (arm.usd_hour, arm.arch) == (None, "arm64")  # an unknown price stays unknown


async def test_prepaid_block_has_no_price(it: Trial) -> None:
    async with renting(CASE, it.url, capacity_block="cr-1") as block:
        offers = await block.offers(Query(types=("p5.48xlarge", "g6.xlarge")))
    assert [(one.type, one.market, one.usd_hour) for one in offers] == [("p5.48xlarge", "on-demand", None)]


async def test_spot_notice_is_read_from_the_request(it: Trial) -> None:
    await it.create()
    it.boot()
    assert [one.ending for one in await it.listed()] == [False]
    it.market.preempt(next(iter(it.market.instances)))
    assert [(one.state, one.ending) for one in await it.listed()] == [("up", True)]


async def test_key_that_is_none_is_refused_before_any_request(it: Trial) -> None:
    async with renting(CASE, it.url, secret="hunter2") as other:
        with pytest.raises(ApiError, match="the key is no access key") as caught:
            await other.instances("reef")
    assert "hunter2" not in str(caught.value)
    assert it.simulation.requests == []


def test_cloud_config_is_yaml_and_json() -> None:
    first, _, rest = ORDER.cloud_config().partition("\n")
    assert first == "#cloud-config"
    script = {"path": "/run/shoal-user-data", "permissions": "0600", "content": ORDER.user_data}
    assert json.loads(rest) == {
        "ssh_authorized_keys": [PUBLIC_KEY],
        "write_files": [script],
        "runcmd": [["sh", "/run/shoal-user-data"]],
    }
