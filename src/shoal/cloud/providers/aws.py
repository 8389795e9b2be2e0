"""Amazon EC2: virtual machines in the regions that the account's settings name.

Amazon lists machines of one region only, so a machine outside of those regions would be lost: none is ordered there.
Stock is reported by the order alone, with status 500, and haste with 503: the code decides, never the status. A machine
that shuts itself down is terminated, which ends its bill.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from shoal.cloud.providers import api
from shoal.cloud.providers import aws_addresses as elastic
from shoal.cloud.providers.api import FailureKind
from shoal.cloud.providers.aws_query import QueryClient, number
from shoal.cloud.providers.aws_quotas import vcpu_quotas
from shoal.cloud.providers.aws_security_group import ensure_security_group
from shoal.cloud.providers.capabilities import Quota, ReservedAddress
from shoal.cloud.providers.firewall_ports import address_ranges
from shoal.cloud.providers.http import HttpProvider, gather_all, map_concurrently
from shoal.cloud.providers.prices import gpu_model, prices
from shoal.cloud.providers.responses import ApiError, Body, Refusal, refusal_by_code

BASE = "https://ec2.{region}.amazonaws.com"
DEFAULT_REGION = "us-east-1"
GPU_TYPES = ("g*", "p*")
PAGE = 100
ROOT_DEVICE = "/dev/sda1"
"""Of Ubuntu's images; another name would add a second disk."""
GPU_IMAGE = "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
IMAGE = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{arch}/hvm/ebs-gp3/ami-id"
"""Public parameters with the newest image of a region; RunInstances resolves them itself."""
CLUSTER, NODE, TOKEN = elastic.CLUSTER, elastic.NODE, "shoal-token"
MARKETS: dict[str, api.Market] = {"on-demand": "on-demand", "spot": "spot"}
"""Amazon's usage classes that are offers; a capacity block is bought in advance."""
CAPACITY_BLOCK = "capacity-block"
STATES: dict[str, api.InstanceState] = {
    "pending": "pending",
    "running": "up",
    "shutting-down": "stopping",
    "stopping": "stopped",
    "stopped": "stopped",
}
GONE = "terminated"
"""Listed for an hour more."""
NO_INSTANCE = "InvalidInstanceID.NotFound"
REFUSALS_BY_CODE = {
    "InsufficientInstanceCapacity InsufficientHostCapacity InsufficientReservedInstanceCapacity InsufficientCapacity"
    " UnfulfillableCapacity SpotMaxPriceTooLow Unsupported InsufficientFreeAddressesInSubnet"
    " ReservationCapacityExceeded": Refusal(FailureKind.CAPACITY, "zone"),
    "VcpuLimitExceeded MaxSpotInstanceCountExceeded InstanceLimitExceeded SpotInstanceCountLimitExceeded"
    " VolumeLimitExceeded AddressLimitExceeded": Refusal(
        FailureKind.QUOTA, "region", hint="ask for more vCPUs of this family in Service Quotas: new accounts have none"
    ),
    "Blocked": Refusal(FailureKind.BALANCE, "provider", hint="see Amazon's console about the account"),
    "AuthFailure UnauthorizedOperation SignatureDoesNotMatch InvalidClientTokenId OptInRequired RequestExpired"
    " ExpiredToken ExpiredTokenException": Refusal(
        FailureKind.AUTH, "provider", hint="check the access key, its rights, this machine's clock and the region"
    ),
    "RequestLimitExceeded EC2ThrottledException Throttling ThrottlingException": Refusal(FailureKind.RATE, "provider"),
    "PendingVerification": Refusal(FailureKind.TRANSIENT, "region"),
    "IdempotentParameterMismatch": Refusal(FailureKind.CONFLICT),
    f"{NO_INSTANCE} InvalidInstanceID.Malformed InvalidParameterValue InvalidParameterCombination MissingParameter"
    " InvalidAMIID.NotFound InvalidAMIID.Malformed InvalidSubnetID.NotFound InvalidGroup.NotFound"
    " InvalidUserData.Malformed VPCIdNotSpecified MissingInput": Refusal(FailureKind.INVALID),
}
"""By Amazon's error code. Any other code of status 500 or 503 leaves open whether there is a machine."""


@dataclass(frozen=True)
class RegionNetwork:
    """Where machines of a region are."""

    subnets: Mapping[str, str]
    """Zone -> subnet."""
    security_group: str


class AwsProvider(HttpProvider):
    """Implements `shoal.cloud.providers.api.RentalProvider`."""

    abilities = api.Abilities(
        user="ubuntu",
        system=api.System("ubuntu", "24.04"),  # of IMAGE and GPU_IMAGE
        notice_s=120,
        idempotent="token",
        create_interval=0.5,
        billing=api.Billing(step=1, least=60, from_up=True),
        boot_s=900,
    )

    def __init__(self, account: api.ProviderLogin) -> None:
        interval = float(account.settings.get("create_interval", self.abilities.create_interval))
        self.abilities = replace(self.abilities, create_interval=interval)
        self._ec2 = QueryClient(account, BASE, read_error=read_error, interval=0.1)
        self._regions = account.settings.get("regions", DEFAULT_REGION).replace(",", " ").split()
        self._block = account.settings.get("capacity_block", "")
        self._networks: dict[tuple[str, str], RegionNetwork] = {}
        self._preparing = asyncio.Lock()
        super().__init__(account, self._ec2)

    async def offers(self, query: api.Query) -> list[api.Offer]:
        """The types of each zone. Amazon does not tell what is in stock."""
        for region in query.regions:
            self._check(region)
        regions = query.regions or self._regions
        offers = [one for found in await gather_all(self._offers_in(one, query) for one in regions) for one in found]
        filled = offers if self._block else prices().fill(self._account.kind, offers)  # a block is paid in advance
        return [offer for offer in filled if query.admits(offer)]

    async def instances(self, cluster: str) -> list[api.RentedInstance]:
        listed = await gather_all(self._instances_in(region, cluster) for region in self._regions)
        return [machine for machines in listed for machine in machines]

    async def delete(self, instances: Sequence[api.RentedInstance]) -> list[api.RequestOutcome]:
        return await map_concurrently(self._terminate, instances)

    async def addresses(self, cluster: str) -> list[ReservedAddress]:
        return await elastic.list_addresses(self._ec2, self._regions, cluster)

    async def reserve_address(self, cluster: str, node: str, region: str) -> ReservedAddress:
        reserved = [one for one in await self.addresses(cluster) if (one.node, one.region) == (node, region)]
        return reserved[0] if reserved else await elastic.allocate_address(self._ec2, cluster, node, region)

    async def attach_address(self, address: ReservedAddress, machine: api.RentedInstance) -> None:
        await elastic.associate_address(self._ec2, address, machine)

    async def release_address(self, address: ReservedAddress) -> None:
        await elastic.release_address(self._ec2, address)

    async def start(self, machine: api.RentedInstance) -> None:
        await elastic.start_machine(self._ec2, machine)

    async def quotas(self, offer: api.Offer) -> list[Quota]:
        """The vCPUs of the offer's family in its region. A capacity block has none."""
        return [] if self._block else await vcpu_quotas(self._ec2, offer)

    async def _offers_in(self, region: str, query: api.Query) -> list[api.Offer]:
        named = {"Filter": [{"Name": "instance-type", "Value": list(query.types or GPU_TYPES)}]}
        places: dict[str, list[str]] = {}
        zones = self._ec2.items(
            region,
            "DescribeInstanceTypeOfferings",
            "instanceTypeOfferingSet",
            LocationType="availability-zone",
            **named,
        )
        async for one in zones:
            places.setdefault(one.text("instanceType"), []).append(one.text("location"))
        spot = await self._spot_prices(region, named) if query.market != "on-demand" and not self._block else {}
        offers: list[api.Offer] = []
        types = self._ec2.items(region, "DescribeInstanceTypes", "instanceTypeSet", MaxResults=PAGE, **named)
        async for kind in types:
            offer = self._offer(kind, region)
            if offer is None:
                continue
            for market in self._markets(kind):
                for zone in places.get(offer.type, []):
                    price = spot.get((offer.type, zone)) if market == "spot" else None
                    offers.append(replace(offer, zone=zone, market=market, usd_hour=price))
        return offers

    async def _spot_prices(self, region: str, named: Mapping[str, Any]) -> dict[tuple[str, str], float]:
        """The last price of each type in each zone."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        rows: AsyncIterator[Body] = self._ec2.items(
            region,
            "DescribeSpotPriceHistory",
            "spotPriceHistorySet",
            StartTime=now,
            ProductDescription=["Linux/UNIX"],
            **named,
        )
        latest: dict[tuple[str, str], tuple[float, float]] = {}
        async for row in rows:
            key, told = (row.text("instanceType"), row.text("availabilityZone")), row.time("timestamp") or 0.0
            if key not in latest or latest[key][0] < told:
                latest[key] = (told, number(row, "spotPrice"))
        return {key: price for key, (_, price) in latest.items() if price > 0}

    def _markets(self, kind: Body) -> list[api.Market]:
        classes = [one.value for one in kind.rows("supportedUsageClasses")]
        if self._block:
            return ["on-demand"] if CAPACITY_BLOCK in classes else []
        return [MARKETS[one] for one in classes if one in MARKETS]

    def _offer(self, kind: Body, region: str) -> api.Offer | None:
        """A type without zone and price; None for GPUs of another make than NVIDIA, and for parts of a GPU."""
        cards = kind.object_or_empty("gpuInfo").rows_or_empty("gpus")
        gpu, memory, count = "", 0, 0
        for card in cards[:1]:
            count = int(number(card, "count"))
            if card.text("manufacturer") != "NVIDIA" or not count:
                return None
            gpu, memory = gpu_model(card.text("name"))
            memory = memory or round(number(card.object("memoryInfo"), "sizeInMiB") / 1024)
        arches = [one.value for one in kind.object("processorInfo").rows("supportedArchitectures")]
        return api.Offer(
            provider=self._account.name,
            type=kind.text("instanceType"),
            region=region,
            gpu=gpu,
            gpus=count,
            gpu_memory_gb=memory,
            cpus=int(number(kind.object("vCpuInfo"), "defaultVCpus")),
            memory_gb=int(number(kind.object("memoryInfo"), "sizeInMiB") // 1024),
            arch="arm64" if "arm64" in arches else "x86_64",
        )

    async def _instances_in(self, region: str, cluster: str) -> list[api.RentedInstance]:
        marked = [{"Name": f"tag:{CLUSTER}", "Value": [cluster]}]
        reservations = self._ec2.items(region, "DescribeInstances", "reservationSet", MaxResults=1000, Filter=marked)
        machines = [
            _instance(one, region)
            async for reservation in reservations
            for one in reservation.rows("instancesSet")
            if one.object("instanceState").text("name") != GONE
        ]
        if not any(one.market == "spot" and one.state == "up" for one in machines):
            return machines
        noticed = [{"Name": "status-code", "Value": ["marked-for-termination"]}]
        requests = self._ec2.items(region, "DescribeSpotInstanceRequests", "spotInstanceRequestSet", Filter=noticed)
        ending = {one.text("instanceId", "") async for one in requests}
        return [replace(one, ending=one.id in ending) for one in machines]

    async def _terminate(self, machine: api.RentedInstance) -> api.RequestOutcome:
        # one unknown id fails a whole call, so each has its own
        try:
            answer = await self._ec2.call(machine.region, "TerminateInstances", InstanceId=[machine.id])
            done = {one.text("instanceId") for one in answer.rows("instancesSet")}
        except ApiError as error:
            return api.RequestOutcome(machine.id) if f"{NO_INSTANCE}:" in error.message else error.outcome(machine.id)
        if machine.id in done:
            return api.RequestOutcome(machine.id)
        message = f"{self._account.name}: Amazon did not terminate {machine.id}"
        return api.RequestOutcome(machine.id, FailureKind.TRANSIENT, message=message)

    async def _create(self, order: api.RentalOrder) -> api.RequestOutcome:
        region, zone = order.offer.region, order.offer.zone
        self._check(region)
        async with self._preparing:
            network = await self._network(region, order.cluster, order.ports)
        subnet = network.subnets.get(zone) if zone else next(iter(network.subnets.values()), None)
        if subnet is None:
            message = f"{self._account.name}: no subnet in {zone or region}: name one in settings: subnets"
            return api.RequestOutcome("", FailureKind.INVALID, "zone", message=message)
        image, device = await self._image(order)
        request = machine_order(order, image, device, subnet, network.security_group, self._block)
        answer = await self._ec2.call(region, "RunInstances", creates=True, **request)
        machines = answer.rows("instancesSet")
        if len(machines) != 1:
            raise answer.error(f"instancesSet has {len(machines)} machines, expected one")
        id = machines[0].text("instanceId")
        if machines[0].object_or_empty("instanceState").text("name", "") in (GONE, "shutting-down"):
            message = f"{self._account.name}: {id} of the same order has ended"
            return api.RequestOutcome("", FailureKind.CONFLICT, message=message)
        return api.RequestOutcome(id)

    async def _image(self, order: api.RentalOrder) -> tuple[str, str]:
        """The image's id or parameter, and the name of its root disk."""
        image = order.image or self._account.settings.get("image", "") or default_image(order.offer)
        if image.startswith("/"):
            return f"resolve:ssm:{image}", ROOT_DEVICE
        answer = await self._ec2.call(order.offer.region, "DescribeImages", ImageId=[image])
        return image, answer.first("imagesSet").text("rootDeviceName", ROOT_DEVICE)

    async def _network(self, region: str, cluster: str, ports: Sequence[str]) -> RegionNetwork:
        """The subnets and the security group of a region, looked up or made once per process."""
        if (region, cluster) in self._networks:
            return self._networks[region, cluster]
        named = self._account.settings.get("subnets", "").replace(",", " ").split()
        chosen = {"Name": "subnet-id", "Value": named} if named else {"Name": "default-for-az", "Value": ["true"]}
        rows = [one async for one in self._ec2.items(region, "DescribeSubnets", "subnetSet", Filter=[chosen])]
        if not rows:
            problem = f"{self._account.name}: {region} has no {'subnet of settings' if named else 'default VPC'}"
            hint = "name subnets with an internet gateway in settings: {subnets: subnet-…}"
            raise ApiError(problem, FailureKind.INVALID, scope="region", hint=hint)
        subnets = {row.text("availabilityZone"): row.text("subnetId") for row in rows}
        group = self._account.settings.get("security_group")
        if not group:
            vpc, ssh_from = rows[0].text("vpcId"), address_ranges(self._account.settings.get("ssh_from"))
            group = await ensure_security_group(self._ec2, region, vpc, f"shoal-{cluster}", ports, ssh_from)
        self._networks[region, cluster] = RegionNetwork(subnets, group)
        return self._networks[region, cluster]

    def _check(self, region: str) -> None:
        if region not in self._regions:
            raise ApiError(
                f"{self._account.name}: {region} is none of this account's regions",
                FailureKind.INVALID,
                scope="region",
                hint=f'add it to the account: settings: {{regions: "{" ".join([*self._regions, region])}"}}',
            )


def machine_order(
    order: api.RentalOrder, image: str, device: str, subnet: str, security_group: str, block: str = ""
) -> dict[str, Any]:
    """The fields of RunInstances. The same order has the same fields, or Amazon refuses its repetition."""
    offer = order.offer
    # a token counts in its region only, so it must differ between places
    client_token = hashlib.sha256(" ".join((order.token, *offer.identity)).encode()).hexdigest()[:64]
    name = f"{order.cluster}--{order.node}--{order.token}"
    tags = {CLUSTER: order.cluster, NODE: order.node, TOKEN: order.token, "Name": name}
    interface = {"DeviceIndex": 0, "SubnetId": subnet, "SecurityGroupId": [security_group]}
    own_address = order.permanent and bool(order.address)  # it is attached once the machine runs
    market: dict[str, Any] = {}
    if block:
        target = {"CapacityReservationTarget": {"CapacityReservationId": block}}
        market = {"InstanceMarketOptions": {"MarketType": CAPACITY_BLOCK}, "CapacityReservationSpecification": target}
    elif offer.market == "spot":
        once = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        market = {"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": once}}
    return {
        "ImageId": image,
        "InstanceType": offer.type,
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": client_token,
        "UserData": base64.b64encode(order.cloud_config().encode()).decode(),
        "InstanceInitiatedShutdownBehavior": "stop" if order.permanent else "terminate",
        "MetadataOptions": {"HttpTokens": "required"},
        "BlockDeviceMapping": [
            {
                "DeviceName": device,
                "Ebs": {"VolumeSize": order.disk_gb, "VolumeType": "gp3", "DeleteOnTermination": True},
            }
        ],
        "NetworkInterface": [{**interface, "AssociatePublicIpAddress": not own_address, "DeleteOnTermination": True}],
        "TagSpecification": [
            {"ResourceType": "instance", "Tag": [{"Key": key, "Value": value} for key, value in tags.items()]}
        ],
        **market,
    }


def default_image(offer: api.Offer) -> str:
    """Ubuntu 24.04, with NVIDIA's driver where there are GPUs."""
    if offer.gpus:
        return GPU_IMAGE.format(arch=offer.arch)
    return IMAGE.format(arch="arm64" if offer.arch == "arm64" else "amd64")


def read_error(status: int, answer: Body) -> Refusal | None:
    """What an error answer means: its code decides, never its status."""
    if answer.has("__type"):  # of a service that speaks JSON
        code = answer.text("__type").rpartition("#")[2]
        return Refusal(message=f"{code}: {answer.text('message', '')}")
    error = answer.object("Errors").object("Error")
    code, message = error.text("Code"), error.text("Message", "")
    if code == "AuthFailure" and status == 400:  # an image that is not ours, not the key
        return Refusal(FailureKind.INVALID, message=f"{code}: {message}")
    return refusal_by_code(REFUSALS_BY_CODE, [(code, message)]) or Refusal(message=f"{code}: {message}")


def _instance(one: Body, region: str) -> api.RentedInstance:
    tags = {tag.text("key"): tag.text("value", "") for tag in one.rows_or_empty("tagSet")}
    return api.RentedInstance.listed(
        one.text("instanceId"),
        (tags.get(CLUSTER, ""), tags.get(NODE, ""), tags.get(TOKEN, "")),
        one.object("instanceState").text("name"),
        STATES,
        host=one.text("ipAddress", ""),
        user=AwsProvider.abilities.user,
        type=one.text("instanceType", ""),
        region=region,
        zone=one.object_or_empty("placement").text("availabilityZone", ""),
        market="spot" if one.text("instanceLifecycle", "") == "spot" else "on-demand",
        created=one.time("launchTime"),  # of its last start
    )
