"""The rules of a VPC that admit others to a cluster's machines at Google: made, corrected, and read again.

A rule is exactly what the file says, not more. A VPC's rules are in the project of the VPC, which may be another one
than that of the machines. Machines that are left in another VPC keep the rules there.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.cloud.providers.api import FailureKind
from shoal.cloud.providers.capabilities import FirewallFix
from shoal.cloud.providers.firewall_ports import PRIVATE, address_range, address_ranges, is_public
from shoal.cloud.providers.google_operations import finish
from shoal.cloud.providers.google_orders import tag_of
from shoal.cloud.providers.http import ApiClient
from shoal.cloud.providers.responses import ApiError, Body

log = logging.getLogger("shoal.elastic")

DEFAULT_NETWORK = "global/networks/default"
INGRESS = "INGRESS"
FOREIGN = ("denied", "sourceServiceAccounts", "targetServiceAccounts", "destinationRanges")
"""Fields that no rule of ours has. A patch cannot take them, the direction or the network from a rule."""


@dataclass(frozen=True)
class FirewallRule:
    """A rule of a VPC. All its parts are sorted, as their sequence means nothing."""

    name: str
    network: str
    """Its name: a rule and its VPC are in the same project."""
    allowed: tuple[str, ...] = ()
    """`tcp:22`, or `tcp` for all ports. Without any, there must be no such rule."""
    ranges: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    """The tags of the machines that it admits."""
    targets: tuple[str, ...] = ()
    """The tags of the machines that it is for."""
    disabled: bool = False
    foreign: tuple[str, ...] = ()

    @classmethod
    def read(cls, answer: Body) -> FirewallRule:
        """A rule as Google shows it."""

        def texts(name: str, row: Body = answer) -> list[str]:
            return sorted(str(one.value) for one in row.rows_or_empty(name))

        allowed = [
            f"{entry.text('IPProtocol')}:{port}".removesuffix(":")
            for entry in answer.rows_or_empty("allowed")
            for port in texts("ports", entry) or [""]
        ]
        foreign = [name for name in FOREIGN if answer.rows_or_empty(name)]
        direction = answer.text("direction", INGRESS)
        return cls(
            answer.text("name"),
            answer.last_part("network"),
            tuple(sorted(allowed)),
            tuple(sorted(map(address_range, texts("sourceRanges")))),
            tuple(texts("sourceTags")),
            tuple(texts("targetTags")),
            answer.flag("disabled", False),
            (*foreign, *([] if direction == INGRESS else [direction])),
        )

    def body(self, project: str) -> dict[str, Any]:
        """The request that makes it, or patches one that `is_patch_of` it."""
        by_protocol: dict[str, list[str]] = {}
        for entry in self.allowed:
            protocol, _, port = entry.partition(":")
            by_protocol.setdefault(protocol, []).extend([port] if port else [])
        sources = {"sourceRanges": [*self.ranges], "sourceTags": [*self.tags]}
        return {
            "name": self.name,
            "network": f"projects/{project}/global/networks/{self.network}",
            "direction": INGRESS,
            "allowed": [_drop_empty({"IPProtocol": one, "ports": ports}) for one, ports in by_protocol.items()],
            **_drop_empty(sources),
            "targetTags": [*self.targets],
            "disabled": False,
        }

    def is_patch_of(self, there: FirewallRule) -> bool:
        """Whether a patch makes that rule this one. It takes no kind of source away, and changes no network."""
        kinds = [(bool(one.ranges), bool(one.tags)) for one in (self, there)]
        return there.network == self.network and not there.foreign and kinds[0] == kinds[1]

    def commands(self, project: str, there: FirewallRule | None) -> str:
        """The gcloud commands that make that rule this one, on one line."""
        sources = {"--source-ranges": self.ranges, "--source-tags": self.tags, "--target-tags": self.targets}
        options = [f"{option}={','.join(values)}" for option, values in sources.items() if values]
        options += [f"--allow={','.join(self.allowed)}"]
        if there is not None and self.allowed and self.is_patch_of(there):
            return self._command("update", project, *options, *(["--no-disabled"] if there.disabled else []))
        delete = [self._command("delete", project, "--quiet")] if there is not None else []
        create = [self._command("create", project, f"--network={self.network}", *options)] if self.allowed else []
        return " && ".join(delete + create)

    def _command(self, verb: str, project: str, *options: str) -> str:
        words = ["gcloud", "compute", "firewall-rules", verb, self.name, f"--project={project}", *options]
        return shlex.join(words)

    def difference(self, there: FirewallRule | None) -> str:
        """How the rule that is there differs, as text; empty where it does not."""
        if there is None:
            return f"{self.name} is missing" if self.allowed else ""
        if not self.allowed:
            return f"{self.name} is of no use any more"
        pairs = {
            "network": (there.network, self.network),
            "ports": (_text(there.allowed), _text(self.allowed)),
            "sources": (_text(there.ranges + there.tags), _text(self.ranges + self.tags)),
            "targets": (_text(there.targets), _text(self.targets)),
            "other conditions": (_text(there.foreign), _text(self.foreign)),
        }
        differ = [f"its {what}: {has}, not {wants}" for what, (has, wants) in pairs.items() if has != wants]
        differ += ["it is disabled"] if there.disabled else []
        return f"{self.name}: {'; '.join(differ)}" if differ else ""


def firewall_rules(
    cluster: str, ports: Sequence[str], network: str, settings: Mapping[str, str]
) -> tuple[FirewallRule, ...]:
    """The rules of a cluster in a VPC: for its ports from outside, for Slurm's in a LAN, and among its machines."""
    tag, sources = tag_of(cluster), address_ranges(settings.get("sources"))
    other = "" if network == "default" else f"-{hashlib.sha256(network.encode()).hexdigest()[:6]}"

    def rule(what: str, allowed: Sequence[str], ranges: Sequence[str] = (), tags: Sequence[str] = ()) -> FirewallRule:
        parts = tuple(sorted({*allowed})), tuple(sorted({*ranges})), tuple(tags)
        return FirewallRule(f"{tag}-{what}{other}", network, *parts, targets=(tag,))

    return (
        rule("ports", [port for port in ports if is_public(port)], sources),
        rule("lan", [port for port in ports if not is_public(port)], PRIVATE),
        rule("inside", ("tcp", "udp", "icmp"), tags=(tag,)),
    )


class VpcFirewall:
    """The firewall of the VPC where an account's machines are."""

    def __init__(self, api: ApiClient, project: str) -> None:
        self._api, self._own_project, self._settings = api, project, api.account.settings
        self._verified: set[str] = set()
        """Clusters whose rules were found, or made, as the file says."""
        self._changing = asyncio.Lock()

    async def ensure(self, cluster: str, ports: Sequence[str]) -> None:
        """Make and correct the rules, once. What is not possible is logged with its reason, and tried again.

        No order fails by it: rules of the user may admit what is needed, as those of the default network do.
        """
        async with self._changing:
            if cluster in self._verified or not ports:
                return
            try:
                project, network = await self._network()
            except ApiError as error:
                log.warning("cannot make firewall rules of cluster %s: %s", cluster, error.message)
                return
            rules = firewall_rules(cluster, ports, network, self._settings)
            fixes = [fix for rule in rules if (fix := await self._ensure(project, rule)) is not None]
            for fix in fixes:
                log.warning("%s: %s; fix: %s", self._api.account.name, fix.reason, fix.command)
            if not fixes:
                self._verified.add(cluster)

    async def fixes(self, cluster: str, ports: Sequence[str]) -> list[FirewallFix]:
        """What differs from the file, and the commands that correct it. Changes nothing."""
        project, network = await self._network()
        rules = firewall_rules(cluster, ports, network, self._settings)
        return [fix for rule in rules if (fix := await self._fix(project, rule)) is not None]

    async def _network(self) -> tuple[str, str]:
        """The project and the name of the VPC. A subnetwork decides on it, and only Google knows of which VPC it is."""
        network = self._settings.get("network", DEFAULT_NETWORK)
        if subnetwork := self._settings.get("subnetwork"):
            path = re.sub(r"^https://[^/]+/compute/\w+/", "", subnetwork)
            path = path if path.startswith("projects/") else f"projects/{self._own_project}/{path}"
            network = (await self._api.request("GET", f"/{path}")).text("network")
        project = re.search(r"projects/([^/]+)/", network)
        return project[1] if project else self._own_project, network.rpartition("/")[2]

    async def _fix(self, project: str, rule: FirewallRule) -> FirewallFix | None:
        try:
            there = await self._read(project, rule.name)
        except ApiError as error:
            if error.failure is not FailureKind.AUTH or error.status != 403:  # the key itself, or no answer
                raise
            return _fix(error.message, rule.commands(project, None))
        return _fix(rule.difference(there), rule.commands(project, there))

    async def _ensure(self, project: str, rule: FirewallRule) -> FirewallFix | None:
        there = None
        try:
            there = await self._read(project, rule.name)
            if rule.difference(there):
                await self._change(project, rule, there)
                there = await self._read(project, rule.name)
        except ApiError as error:
            return _fix(error.message, rule.commands(project, there))
        return _fix(rule.difference(there), rule.commands(project, there))

    async def _read(self, project: str, name: str) -> FirewallRule | None:
        try:
            return FirewallRule.read(await self._api.request("GET", f"/projects/{project}/global/firewalls/{name}"))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _change(self, project: str, rule: FirewallRule, there: FirewallRule | None) -> None:
        path = f"/projects/{project}/global/firewalls"
        if there is not None and rule.allowed and rule.is_patch_of(there):
            await self._send("PATCH", f"{path}/{rule.name}", project, rule.body(project))
            return
        if there is not None:
            await self._send("DELETE", f"{path}/{rule.name}", project)
        if rule.allowed:
            await self._send("POST", path, project, rule.body(project))

    async def _send(self, method: str, path: str, project: str, body: Mapping[str, Any] | None = None) -> None:
        operation = await self._api.request(method, path, json=body)
        await finish(self._api, operation, f"/projects/{project}/global")


def _fix(reason: str, command: str) -> FirewallFix | None:
    """None where nothing is wrong, or nothing known is to be done."""
    return FirewallFix(reason, command) if reason and command else None


def _drop_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _text(values: Sequence[str]) -> str:
    return ", ".join(values) or "none"
