"""Security groups of the simulated Amazon EC2: a rule is a protocol, ports and one source, and is there once."""

from __future__ import annotations

import ipaddress
import re
import uuid
from typing import Any

from shoal_simulators.aws_requests import filters, page
from shoal_simulators.market import ApiRejection, Market

Groups = dict[str, dict[str, Any]]
Form = dict[str, str]
SOURCES = {
    "IpRanges": ("CidrIp", "ipRanges", "cidrIp"),
    "Ipv6Ranges": ("CidrIpv6", "ipv6Ranges", "cidrIpv6"),
    "Groups": ("GroupId", "groups", "groupId"),
}
"""A list of sources in a request -> its field, and list and field in an answer."""


def describe(region: str, form: Form, groups: Groups) -> dict[str, Any]:
    names = filters(form).get("group-name", [])
    rows = [one for one in groups.values() if one["vpcId"] == f"vpc-{region}" and one["groupName"] in names]
    shown = [{**{name: row[name] for name in ("groupId", "groupName", "vpcId")}, **_shown(row)} for row in rows]
    return page(form, "securityGroupInfo", shown)


def create(form: Form, groups: Groups, market: Market) -> dict[str, Any]:
    name, vpc = form["GroupName"], form["VpcId"]
    if any((one["groupName"], one["vpcId"]) == (name, vpc) for one in groups.values()):
        raise ApiRejection("invalid", f"InvalidGroup.Duplicate: The security group '{name}' already exists")
    id = f"sg-{uuid.uuid4().hex[:17]}"
    groups[id] = {"groupId": id, "groupName": name, "vpcId": vpc, "rules": []}
    market.save()
    return {"groupId": id, "return": True}


def authorize(form: Form, groups: Groups, market: Market) -> dict[str, Any]:
    rules, new = _rules(form, groups), read_rules(form, groups)
    if any(rule in rules for rule in new):
        raise ApiRejection("invalid", "InvalidPermission.Duplicate: the specified rule already exists")
    rules += new
    market.save()
    return {"return": True}


def revoke(form: Form, groups: Groups, market: Market) -> dict[str, Any]:
    rules, old = _rules(form, groups), read_rules(form, groups)
    if any(rule not in rules for rule in old):
        raise ApiRejection("invalid", "InvalidPermission.NotFound: The specified rule does not exist")
    rules[:] = [rule for rule in rules if rule not in old]
    market.save()
    return {"return": True}


def read_rules(form: Form, groups: Groups) -> list[list[str]]:
    """Protocol, first and last port, list and source of each rule in a request."""
    numbers = sorted({match[1] for name in form if (match := re.match(r"IpPermissions\.(\d+)\.", name))})
    rules = []
    for number in numbers:
        fields = {name.split(".", 2)[2]: form[name] for name in form if name.startswith(f"IpPermissions.{number}.")}
        protocol, ports = fields["IpProtocol"], [fields.get("FromPort", ""), fields.get("ToPort", "")]
        if protocol == "-1":
            ports = ["", ""]
        elif not all(re.fullmatch(r"\d{1,5}", port) for port in ports) or int(ports[0]) > int(ports[1]):
            wrong = f"Invalid value '{'-'.join(ports)}' for a port range. Must be integers"
            raise ApiRejection("invalid", f"InvalidParameterValue: {wrong}")
        for kind, (field, _, _) in SOURCES.items():
            named = (fields[name] for name in fields if re.fullmatch(rf"{kind}\.\d+\.{field}", name))
            rules += [[protocol, *ports, kind, _source(kind, source, groups)] for source in named]
    if not rules:
        raise ApiRejection("invalid", "MissingParameter: The request must contain the parameter IpPermissions")
    return rules


def _source(kind: str, source: str, groups: Groups) -> str:
    if kind == "Groups":
        if source not in groups:
            raise ApiRejection("invalid", f"InvalidGroup.NotFound: The security group '{source}' does not exist")
        return source
    try:
        network = ipaddress.ip_network(source, strict=False)
    except ValueError:
        network = None
    if network is None or "/" not in source or network.version != (4 if kind == "IpRanges" else 6):
        raise ApiRejection("invalid", f"InvalidParameterValue: CIDR block {source} is malformed")
    return str(network)


def _rules(form: Form, groups: Groups) -> list[list[str]]:
    if form.get("GroupId") not in groups:
        raise ApiRejection("invalid", f"InvalidGroup.NotFound: The group '{form.get('GroupId')}' does not exist")
    rules: list[list[str]] = groups[form["GroupId"]]["rules"]
    return rules


def _shown(group: dict[str, Any]) -> dict[str, Any]:
    """Rules of the same ports are one permission with several sources."""
    permissions: dict[tuple[str, ...], dict[str, Any]] = {}
    for protocol, first, last, kind, source in group["rules"]:
        ports = {"fromPort": first or None, "toPort": last or None}
        empty: dict[str, Any] = {name: [] for _, name, _ in SOURCES.values()}
        row = permissions.setdefault((protocol, first, last), {"ipProtocol": protocol, **ports, **empty})
        row[SOURCES[kind][1]].append({SOURCES[kind][2]: source})
    return {"ipPermissions": [*permissions.values()]}
