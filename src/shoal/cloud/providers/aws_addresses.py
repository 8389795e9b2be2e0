"""Amazon's Elastic IP addresses, and the start of machines that are stopped: for hosts that stay."""

from __future__ import annotations

from shoal.cloud.providers import api
from shoal.cloud.providers.aws_query import QueryClient
from shoal.cloud.providers.capabilities import ReservedAddress
from shoal.cloud.providers.http import gather_all
from shoal.cloud.providers.responses import ApiError, Body

CLUSTER, NODE = "shoal-cluster", "shoal-node"
NO_ADDRESS = "InvalidAllocationID.NotFound"


async def list_addresses(ec2: QueryClient, regions: list[str], cluster: str) -> list[ReservedAddress]:
    """The addresses of a cluster in these regions."""
    marked = [{"Name": f"tag:{CLUSTER}", "Value": [cluster]}]

    async def ask(region: str) -> list[ReservedAddress]:
        answer = await ec2.call(region, "DescribeAddresses", Filter=marked)  # one page holds all
        return [address_of(row, region) for row in answer.rows("addressesSet")]

    return [address for found in await gather_all(ask(region) for region in regions) for address in found]


async def allocate_address(ec2: QueryClient, cluster: str, node: str, region: str) -> ReservedAddress:
    """An address of a member. Amazon does not recognize a repeated request, so the caller lists them first."""
    tags = {CLUSTER: cluster, NODE: node, "Name": f"{cluster}--{node}"}
    rows = [{"Key": key, "Value": value} for key, value in tags.items()]
    answer = await ec2.call(
        region, "AllocateAddress", Domain="vpc", TagSpecification=[{"ResourceType": "elastic-ip", "Tag": rows}]
    )
    return ReservedAddress(answer.text("allocationId"), answer.text("publicIp"), node, region)


async def associate_address(ec2: QueryClient, address: ReservedAddress, machine: api.RentedInstance) -> None:
    if address.instance != machine.id:
        await ec2.call(machine.region, "AssociateAddress", AllocationId=address.id, InstanceId=machine.id)


async def release_address(ec2: QueryClient, address: ReservedAddress) -> None:
    try:
        await ec2.call(address.region, "ReleaseAddress", AllocationId=address.id)
    except ApiError as error:
        if NO_ADDRESS not in error.message:
            raise


async def start_machine(ec2: QueryClient, machine: api.RentedInstance) -> None:
    await ec2.call(machine.region, "StartInstances", InstanceId=[machine.id])


def address_of(row: Body, region: str) -> ReservedAddress:
    tags = {tag.text("key"): tag.text("value", "") for tag in row.rows_or_empty("tagSet")}
    id, address = row.text("allocationId"), row.text("publicIp")
    return ReservedAddress(id, address, tags.get(NODE, ""), region, row.text("instanceId", ""))
