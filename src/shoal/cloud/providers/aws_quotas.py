"""Amazon's quotas of vCPUs: one for each family of machine types, market and region. New accounts have none for GPUs.

The limit comes from Service Quotas. What is in use is counted from the machines that run, ours and others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.cloud.providers.api import Market, Offer
from shoal.cloud.providers.aws_query import QueryClient, number
from shoal.cloud.providers.capabilities import Quota
from shoal.cloud.providers.responses import ApiError

SERVICE, TARGET = "servicequotas", "ServiceQuotasV20190624"
BASE = "https://servicequotas.{region}.amazonaws.com"
NO_QUOTA = "NoSuchResourceException"
"""The account's quota was never changed: the default applies."""


@dataclass(frozen=True)
class VcpuQuota:
    """A quota, and the machine types that count against it."""

    code: str
    name: str
    types: str
    """A regular expression of their names."""


G, P, STANDARD = r"(g|gr|vt)\d", r"p\d", r"[acdhimrtz]\d"
QUOTAS: Mapping[Market, tuple[VcpuQuota, ...]] = {
    "on-demand": (
        VcpuQuota("L-DB2E81BA", "Running On-Demand G and VT instances", G),
        VcpuQuota("L-417A185B", "Running On-Demand P instances", P),
        VcpuQuota("L-1216C47A", "Running On-Demand Standard instances", STANDARD),
    ),
    "spot": (
        VcpuQuota("L-3819A6DF", "All G and VT Spot Instance Requests", G),
        VcpuQuota("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests", r"p[234]"),
        VcpuQuota("L-C4BD4855", "All P5 and newer Spot Instance Requests", P),
    ),
}


def quota_of(type_name: str, market: Market) -> VcpuQuota | None:
    """The quota of a machine type; None for a family whose quota we do not know."""
    return next((quota for quota in QUOTAS[market] if re.match(quota.types, type_name)), None)


async def vcpu_quotas(ec2: QueryClient, offer: Offer) -> list[Quota]:
    """The quota that a machine of this offer takes from, in its region."""
    quota = quota_of(offer.type, offer.market)
    if quota is None:
        return []
    limit = await _limit(ec2, offer.region, quota.code)
    usage = await _usage(ec2, offer.region, quota, offer.market)
    return [Quota(f"“{quota.name}” ({quota.code}, vCPUs) in {offer.region}", limit, usage, need=offer.cpus)]


async def _limit(ec2: QueryClient, region: str, code: str) -> float:
    fields = {"ServiceCode": "ec2", "QuotaCode": code}
    try:
        answer = await ec2.call_json(SERVICE, BASE, region, f"{TARGET}.GetServiceQuota", fields)
    except ApiError as error:
        if NO_QUOTA not in error.message:
            raise
        answer = await ec2.call_json(SERVICE, BASE, region, f"{TARGET}.GetAWSDefaultServiceQuota", fields)
    return answer.object("Quota").number("Value")


async def _usage(ec2: QueryClient, region: str, quota: VcpuQuota, market: Market) -> float:
    """The vCPUs of the machines that run and count against a quota."""
    running = [{"Name": "instance-state-name", "Value": ["pending", "running"]}]
    types: list[str] = []
    async for reservation in ec2.items(region, "DescribeInstances", "reservationSet", MaxResults=1000, Filter=running):
        for machine in reservation.rows("instancesSet"):
            bought = machine.text("instanceLifecycle", "on-demand")  # or a capacity block, which has its own quota
            if bought == market and quota_of(machine.text("instanceType"), market) == quota:
                types.append(machine.text("instanceType"))
    if not types:
        return 0.0
    named = [{"Name": "instance-type", "Value": sorted(set(types))}]
    rows = ec2.items(region, "DescribeInstanceTypes", "instanceTypeSet", MaxResults=100, Filter=named)
    vcpus = {row.text("instanceType"): number(row.object("vCpuInfo"), "defaultVCpus") async for row in rows}
    return sum(vcpus.get(name, 0.0) for name in types)
