"""A simulated Amazon EC2: signed forms in, XML out, and Amazon's own codes and statuses for what goes wrong.

Missing capacity has status 500 and haste 503; a repeated client token returns the same machine; terminated machines
stay listed for an hour; a list may have fewer items than a page holds. A machine that dies is shown as stopped.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import parse_qsl
from xml.etree import ElementTree

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from shoal.cloud.providers.api import Billing
from shoal.cloud.providers.aws_query import parse_credentials, read_xml, sign
from shoal_simulators import aws_addresses as elastic
from shoal_simulators import aws_groups as groups
from shoal_simulators.aws_requests import filters, page, read_user_data, values
from shoal_simulators.instances import InstanceOrder, MachineType, Profile, SimulatedInstance
from shoal_simulators.market import SERVER_ERRORS, ApiRejection
from shoal_simulators.server import RateLimit, Simulator, iso_time

NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
ERRORS = {
    "stockout": (500, "InsufficientInstanceCapacity", "We currently do not have sufficient capacity in this zone."),
    "quota": (400, "VcpuLimitExceeded", "You have requested more vCPU capacity than your current vCPU limit of 0."),
    "balance": (400, "Blocked", "Your account is currently blocked."),
    "auth": (401, "AuthFailure", "AWS was not able to validate the provided access credentials"),
    "rate": (503, "RequestLimitExceeded", "Request limit exceeded."),
    "not-found": (400, "InvalidInstanceID.NotFound", "The instance ID '{}' does not exist"),
    **dict.fromkeys(SERVER_ERRORS, (500, "InternalError", "An internal error has occurred")),
}
"""Reason -> status, code, message. Of `invalid`, the detail has the code."""
STATES = {"pending": "pending", "up": "running", "stopped": "stopped", "error": "stopped"}
STATES |= {"stopping": "shutting-down", "gone": "terminated"}
CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopped": 80}
TERMINATED_SHOWN_S = 3600.0
MAX_SKEW_S = 300.0
DEFAULT_QUOTA = 0.0
ZONES = ("us-east-1a", "us-east-1b", "us-west-2a")
AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(\w+)/(\d{8})/([a-z0-9-]+)/(ec2|servicequotas)/aws4_request,"
    r" SignedHeaders=([a-z0-9;-]+), Signature=([0-9a-f]{64})"
)


def _types() -> tuple[MachineType, ...]:
    east, all_zones = {"us-east-1a": 64, "us-east-1b": 64}, dict.fromkeys(ZONES, 64)
    return (
        MachineType("c7i.large", "", 0, 0, 2, 4, 0.0893, places=all_zones),
        MachineType("g4dn.xlarge", "T4", 1, 16, 4, 16, 0.526, 0.33, places=all_zones),
        MachineType("g6.xlarge", "L4", 1, 22, 4, 16, 0.805, 0.77, places=east),
        MachineType("p5.4xlarge", "H100", 1, 80, 16, 256, 6.88, 2.63, places=east),
        MachineType("p5.48xlarge", "H100", 8, 80, 192, 2048, 55.04, 20.3, places={"us-east-1a": 4}),
        MachineType("g5g.xlarge", "T4g", 1, 16, 4, 8, 0.42, arch="arm64", places={"us-west-2a": 8}),
    )


class AwsSimulator(Simulator):
    """The part of EC2 that rents machines out, of all regions at one address."""

    kind = "aws"
    profile = Profile(
        user="ubuntu",
        boot_s=60.0,
        address_s=10.0,
        stop_s=20.0,
        notice_s=120.0,
        billing=Billing(step=1, least=60, from_up=True),
    )
    types = _types()
    quotas: Mapping[str, float] = {
        **{"L-DB2E81BA": 256, "L-417A185B": 768, "L-3819A6DF": 256, "L-C4BD4855": 768},
        "L-1216C47A": 256,
    }
    """vCPUs by the code of the quota; others have the default of new accounts with GPUs."""
    quota_rights = True
    creating = r"POST /RunInstances"
    listing = r"POST /DescribeInstances"

    def routes(self) -> list[BaseRoute]:
        return [Route("/", self._call, methods=["POST"])]

    def limits(self) -> list[RateLimit]:
        return [RateLimit(0.05, slack=5.0)]

    def call_name(self, request: Request, body: bytes) -> str:
        return f"{request.method} /{dict(parse_qsl(body.decode(errors='replace'))).get('Action', '')}"

    def decode(self, content: bytes) -> Any:
        element = ElementTree.fromstring(content)  # nosec B314: what this simulator wrote itself
        return {element.tag.rpartition("}")[2]: read_xml(element)}

    def encode(self, data: Any, status: int) -> Response:
        root, fields = next(iter(data.items()))
        element = ElementTree.Element(root, {"xmlns": NAMESPACE} if root != "Response" else {})
        _write(element, fields)
        return Response(ElementTree.tostring(element, "utf-8", xml_declaration=True), status, media_type="text/xml")

    def authorised(self, request: Request, key: str) -> bool:
        match = AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
        try:
            date = datetime.strptime(request.headers.get("x-amz-date", ""), "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        except ValueError:
            return False
        if match is None or abs(date.timestamp() - time.time()) > MAX_SKEW_S:
            return False
        request.state.region = match[3]
        credentials = parse_credentials(key) if key else None
        if credentials is None:
            return not key
        url = f"http://{request.headers['host']}/"
        target = request.headers.get("x-amz-target", "")
        signed = sign(credentials, match[3], url, request.state.body, date, service=match[4], target=target)
        expected = signed["authorization"]
        return hmac.compare_digest(expected, match[0])

    def error_response(self, reason: str, detail: str = "") -> Response:
        code, _, text = detail.partition(": ")
        status, code, text = ERRORS.get(reason) or (400, code, text)
        error = {"Code": code, "Message": text.replace("{}", detail)}
        return self.encode({"Response": {"Errors": {"Error": error}, "RequestID": str(uuid.uuid4())}}, status)

    async def _call(self, request: Request) -> Response:
        if target := request.headers.get("x-amz-target", ""):
            return self._quota(target.rpartition(".")[2], json.loads(request.state.body))
        form = dict(parse_qsl(request.state.body.decode(errors="replace")))
        addresses, owned = self.stored("addresses"), self.stored("groups")
        actions: dict[str, Callable[[str, dict[str, str]], dict[str, Any]]] = {
            "RunInstances": self._run,
            "TerminateInstances": self._terminate,
            "DescribeInstances": self._instances,
            "DescribeSpotInstanceRequests": self._spot_requests,
            "DescribeInstanceTypes": self._describe_types,
            "DescribeInstanceTypeOfferings": self._offerings,
            "DescribeSpotPriceHistory": self._spot_prices,
            "StartInstances": self._start,
            "DescribeAddresses": lambda where, asked: elastic.describe(where, filters(asked), addresses, self.market),
            "AllocateAddress": lambda where, asked: elastic.allocate(where, asked, addresses, self.market),
            "AssociateAddress": lambda where, asked: elastic.associate(where, asked, addresses, self.market),
            "ReleaseAddress": lambda where, asked: elastic.release(where, asked, addresses, self.market),
            "DescribeSubnets": self._subnets,
            "DescribeImages": self._images,
            "DescribeSecurityGroups": lambda where, asked: groups.describe(where, asked, owned),
            "CreateSecurityGroup": lambda _, asked: groups.create(asked, owned, self.market),
            "AuthorizeSecurityGroupIngress": lambda _, asked: groups.authorize(asked, owned, self.market),
            "RevokeSecurityGroupIngress": lambda _, asked: groups.revoke(asked, owned, self.market),
        }
        action = form.get("Action", "")
        if action not in actions or form.get("Version") != "2016-11-15":
            raise ApiRejection("invalid", f"InvalidAction: The action {action} is not valid for this web service.")
        data = actions[action](request.state.region, form)
        return self.encode({f"{action}Response": {"requestId": str(uuid.uuid4()), **data}}, 200)

    def _quota(self, action: str, asked: dict[str, str]) -> Response:
        """Service Quotas: one that was never changed has only a default."""
        if not self.quota_rights:
            return JSONResponse({"__type": "AccessDeniedException", "message": f"may not servicequotas:{action}"}, 400)
        values = self.quotas if action == "GetServiceQuota" else dict.fromkeys([asked["QuotaCode"]], DEFAULT_QUOTA)
        if (value := values.get(asked["QuotaCode"])) is None:
            return JSONResponse({"__type": "NoSuchResourceException", "message": "the resource is unknown"}, 400)
        return JSONResponse({"Quota": {**asked, "Value": float(value), "Unit": "None"}})

    # Machines

    def _run(self, region: str, form: dict[str, str]) -> dict[str, Any]:
        token, digest = form.get("ClientToken", ""), hashlib.sha256(repr(sorted(form.items())).encode()).hexdigest()
        before = self.stored("tokens").get(f"{region} {token}")
        if token and before:
            if before["digest"] != digest:
                raise ApiRejection("invalid", "IdempotentParameterMismatch: The client token is used already.")
            return {"instancesSet": [self._shown(self.market.instances[before["id"]])]}
        order, id = self._order(region, form), f"i-{uuid.uuid4().hex[:17]}"
        try:
            self.market.order(order, id)
        finally:
            if id in self.market.instances:  # also where the answer is an error
                self.market.instances[id].shown_until = TERMINATED_SHOWN_S
                self.stored("tokens")[f"{region} {token}"] = {"id": id, "digest": digest}
                self.market.save()
        return {"instancesSet": [self._shown(self.market.instances[id])]}

    def _order(self, region: str, form: dict[str, str]) -> InstanceOrder:
        if missing := {"ImageId", "InstanceType", "MinCount", "MaxCount"} - set(form):
            raise ApiRejection("invalid", f"MissingParameter: {', '.join(sorted(missing))}")
        if "SubnetId" in form and "NetworkInterface.1.DeviceIndex" in form:
            raise ApiRejection("invalid", "InvalidParameterCombination: Network interfaces and a subnet ID")
        if not re.fullmatch(r"ami-\w+|resolve:ssm:/aws/service/[\w./-]+", form["ImageId"]):
            raise ApiRejection("invalid", f"InvalidAMIID.Malformed: Invalid id: {form['ImageId']}")
        zone = form.get("NetworkInterface.1.SubnetId", "").removeprefix("subnet-")
        if zone not in ZONES or not zone.startswith(region):
            raise ApiRejection("invalid", f"InvalidSubnetID.NotFound: The subnet ID '{zone}' does not exist")
        if form.get("NetworkInterface.1.SecurityGroupId.1") not in self.stored("groups"):
            raise ApiRejection("invalid", "InvalidGroup.NotFound: The security group does not exist")
        type = self.market.types.get(form["InstanceType"])
        if type is None:
            raise ApiRejection("invalid", "InvalidParameterValue: Invalid value for InstanceType")
        if zone not in type.places:
            raise ApiRejection("invalid", f"Unsupported: {type.name} is not supported in {zone}.")
        keys, script = read_user_data(form.get("UserData", ""))
        tags = {
            form[name]: form[f"{name[:-3]}Value"] for name in form if re.fullmatch(r"Tag\w+\.1\.Tag\.\d+\.Key", name)
        }
        spot = form.get("InstanceMarketOptions.MarketType") == "spot"
        return InstanceOrder(
            tags.get("Name", ""),
            type.name,
            region,
            zone,
            "spot" if spot else "on-demand",
            keys,
            script,
            {"tags": tags, "image": form["ImageId"], "request": f"sir-{uuid.uuid4().hex[:8]}" if spot else ""},
            image=form["ImageId"],
        )

    def _terminate(self, region: str, form: dict[str, str]) -> dict[str, Any]:
        ids = values(form, "InstanceId")
        machines = [self.market.instances.get(id) for id in ids]
        for id, machine in zip(ids, machines, strict=True):
            if machine is None or machine.order.region != region or machine not in self.market.list_instances():
                raise ApiRejection("not-found", id)
        for machine in machines:
            if machine is not None and machine.phase != "gone":
                self.market.delete(machine.id)
        return {"instancesSet": [{"instanceId": id, "currentState": {"code": 32}} for id in ids]}

    def _start(self, region: str, form: dict[str, str]) -> dict[str, Any]:
        for id in values(form, "InstanceId"):
            self.market.start(id)
        return {"instancesSet": [{"instanceId": id} for id in values(form, "InstanceId")]}

    def _instances(self, region: str, form: dict[str, str]) -> dict[str, Any]:
        wanted = filters(form)
        states = wanted.pop("instance-state-name", list(CODES))
        shown = [
            {"reservationId": f"r-{machine.id[2:]}", "instancesSet": [self._shown(machine)]}
            for machine in self.market.list_instances()
            if machine.order.region == region
            and STATES[machine.phase] in states
            and all(machine.order.marks["tags"].get(name.removeprefix("tag:")) in wanted[name] for name in wanted)
        ]
        return page(form, "reservationSet", shown)

    def _spot_requests(self, region: str, form: dict[str, str]) -> dict[str, Any]:
        wanted = filters(form).get("status-code", [])
        rows = []
        for machine in self.market.list_instances():
            code = "marked-for-termination" if machine.preempted and machine.phase == "up" else "fulfilled"
            if machine.order.region == region and machine.order.marks["request"] and code in wanted:
                status = {"code": code, "updateTime": iso_time(self.market.clock())}
                request = {"spotInstanceRequestId": machine.order.marks["request"], "state": "active"}
                rows.append({**request, "instanceId": machine.id, "status": status})
        return page(form, "spotInstanceRequestSet", rows)

    def _shown(self, machine: SimulatedInstance) -> dict[str, Any]:
        state, order = STATES[machine.phase], machine.order
        shown = {
            "instanceId": machine.id,
            "imageId": order.marks["image"],
            "instanceState": {"code": CODES[state], "name": state},
            "instanceType": order.type,
            "launchTime": iso_time(machine.started_at or machine.ordered),
            "placement": {"availabilityZone": order.zone, "tenancy": "default"},
            "privateIpAddress": machine.private_address or None,
            "ipAddress": machine.host if state == "running" and machine.host else None,
            "tagSet": [{"key": key, "value": value} for key, value in order.marks["tags"].items()],
        }
        if order.market == "spot":
            shown |= {"instanceLifecycle": "spot", "spotInstanceRequestId": order.marks["request"]}
        return shown

    # Types and prices

    def _describe_types(self, region: str, form: dict[str, str]) -> dict[str, Any]:
        rows = [_shown_type(type) for type in self._asked(region, form)]
        return page(form, "instanceTypeSet", rows)

    def _offerings(self, region: str, form: dict[str, str]) -> dict[str, Any]:
        rows = [
            {"instanceType": type.name, "locationType": "availability-zone", "location": zone}
            for type in self._asked(region, form)
            for zone in type.places
            if zone.startswith(region)
        ]
        return page(form, "instanceTypeOfferingSet", rows)

    def _spot_prices(self, region: str, form: dict[str, str]) -> dict[str, Any]:
        now = iso_time(self.market.clock())
        rows = [
            {"instanceType": type.name, "availabilityZone": zone, "spotPrice": type.spot_usd_hour, "timestamp": now}
            for type in self._asked(region, form)
            for zone in type.places
            if zone.startswith(region) and type.spot_usd_hour is not None
        ]
        return page(form, "spotPriceHistorySet", rows)

    def _asked(self, region: str, form: dict[str, str]) -> list[MachineType]:
        patterns = filters(form).get("instance-type", ["*"])
        return [
            type
            for type in self.types
            if any(fnmatchcase(type.name, pattern) for pattern in patterns)
            and any(zone.startswith(region) for zone in type.places)
        ]

    # Networks and images

    def _subnets(self, region: str, form: dict[str, str]) -> dict[str, Any]:
        wanted = filters(form).get("subnet-id")
        rows = [
            {"subnetId": f"subnet-{zone}", "vpcId": f"vpc-{region}", "availabilityZone": zone, "defaultForAz": True}
            for zone in ZONES
            if zone.startswith(region) and (wanted is None or f"subnet-{zone}" in wanted)
        ]
        return page(form, "subnetSet", rows)

    def _images(self, region: str, form: dict[str, str]) -> dict[str, Any]:
        return {"imagesSet": [{"imageId": id, "rootDeviceName": "/dev/xvda"} for id in values(form, "ImageId")]}


def _shown_type(type: MachineType) -> dict[str, Any]:
    classes = ["on-demand", *(["spot"] if type.spot_usd_hour is not None else [])]
    shown: dict[str, Any] = {
        "instanceType": type.name,
        "supportedUsageClasses": [*classes, *(["capacity-block"] if type.name.startswith("p5") else [])],
        "processorInfo": {"supportedArchitectures": [type.arch]},
        "vCpuInfo": {"defaultVCpus": type.cpus},
        "memoryInfo": {"sizeInMiB": type.memory_gb * 1024},
    }
    if type.gpus:
        memory = {"sizeInMiB": type.gpu_memory_gb * 1024}
        card = {"name": type.gpu, "manufacturer": "NVIDIA", "count": type.gpus, "memoryInfo": memory}
        shown["gpuInfo"] = {"gpus": [card]}
    return shown


def _write(element: ElementTree.Element, data: Any) -> None:
    if isinstance(data, dict):
        children: Iterable[tuple[str, Any]] = data.items()
    elif isinstance(data, list):
        children = (("item", one) for one in data)
    else:
        element.text = str(data).lower() if isinstance(data, bool) else str(data)
        return
    for name, value in children:
        if value is not None:
            _write(ElementTree.SubElement(element, name), value)
