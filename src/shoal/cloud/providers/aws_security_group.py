"""The security group of a cluster's machines at Amazon: it admits exactly what the file says."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.cloud.providers.aws_query import QueryClient
from shoal.cloud.providers.firewall_ports import ANYWHERE, PRIVATE, SSH, address_range, is_public, split_port
from shoal.cloud.providers.responses import ApiError, Body

log = logging.getLogger("shoal.elastic")

ALL_PROTOCOLS = "-1"
DUPLICATE, NO_RULE = "InvalidPermission.Duplicate", "InvalidPermission.NotFound"
SOURCES = {
    "groups": ("groupId", "Groups", "GroupId"),
    "ipRanges": ("cidrIp", "IpRanges", "CidrIp"),
    "ipv6Ranges": ("cidrIpv6", "Ipv6Ranges", "CidrIpv6"),
    "prefixListIds": ("prefixListId", "PrefixListIds", "PrefixListId"),
}
"""A list of sources in an answer -> its field there, and list and field in a request."""


@dataclass(frozen=True)
class IngressRule:
    """One source that may reach some ports."""

    protocol: str
    first: str
    last: str
    """Empty where the rule admits all ports."""
    kind: str
    """The list of SOURCES that has it."""
    source: str

    def fields(self) -> Mapping[str, Any]:
        """As a request names it."""
        _, rows, field = SOURCES[self.kind]
        ports = {"FromPort": self.first or None, "ToPort": self.last or None}
        return {"IpProtocol": self.protocol, **ports, rows: [{field: self.source}]}


async def ensure_security_group(
    ec2: QueryClient, region: str, vpc: str, name: str, ports: Sequence[str], ssh_from: tuple[str, ...]
) -> str:
    """Make a group of this name, or correct it. Returns its id. Raises ApiError."""
    named = [{"Name": "group-name", "Value": [name]}, {"Name": "vpc-id", "Value": [vpc]}]
    groups = [row async for row in ec2.items(region, "DescribeSecurityGroups", "securityGroupInfo", Filter=named)]
    if groups:
        group, has = groups[0].text("groupId"), dict.fromkeys(rules_of(groups[0]))
    else:
        text = "Machines that Shoal rents"
        made = await ec2.call(region, "CreateSecurityGroup", GroupName=name, GroupDescription=text, VpcId=vpc)
        group, has = made.text("groupId"), {}
    rules = ingress(group, ports, ssh_from)
    for rule in rules:
        if rule not in has:
            await _change(ec2, region, group, "AuthorizeSecurityGroupIngress", rule, DUPLICATE)
    for rule in has:
        if rule not in rules:
            try:
                await _change(ec2, region, group, "RevokeSecurityGroupIngress", rule, NO_RULE)
            except ApiError as error:  # machines work with it all the same
                fix = "allow ec2:RevokeSecurityGroupIngress to the key, or remove the rule by hand"
                log.warning("security group %s still admits %s: %s; %s", name, rule.source, error.message, fix)
    return group


async def _change(ec2: QueryClient, region: str, group: str, action: str, rule: IngressRule, done: str) -> None:
    """Add or remove a rule. `done` is the code of the error where another process was faster."""
    try:
        await ec2.call(region, action, GroupId=group, IpPermissions=[rule.fields()])
    except ApiError as error:
        if f"{done}:" not in error.message:
            raise


def ingress(group: str, ports: Sequence[str], ssh_from: tuple[str, ...]) -> list[IngressRule]:
    """What may reach a machine: SSH, the cluster's ports, and the other machines of the group."""
    rules = [IngressRule(ALL_PROTOCOLS, "", "", "groups", group)]
    for port in dict.fromkeys((SSH, *ports)):
        protocol, first, last = split_port(port)
        sources = ssh_from if port == SSH else ANYWHERE if is_public(port) else PRIVATE
        for source in sources:
            kind = "ipv6Ranges" if ":" in source else "ipRanges"
            rules.append(IngressRule(protocol, str(first), str(last), kind, source))
    return rules


def rules_of(group: Body) -> Iterator[IngressRule]:
    """The rules of a group as Amazon lists it."""
    for row in group.rows_or_empty("ipPermissions"):
        protocol = row.text("ipProtocol")
        ports = ("", "") if protocol == ALL_PROTOCOLS else (row.text("fromPort", ""), row.text("toPort", ""))
        for kind, (field, _, _) in SOURCES.items():
            for source in row.rows_or_empty(kind):
                yield IngressRule(protocol, *ports, kind, address_range(source.text(field)))
