"""Health of the cluster's services for `shoal status` and `shoal check`: clocks, tracking, accounting, networks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from shoal.agent.client import FactsRequest
from shoal.agent.facts import Facts
from shoal.errors import CommandTimeout, HostError, ShoalError
from shoal.hosts.api import Host
from shoal.network.tailscale import (
    EXPIRES_SOON_S,
    PATH_TIMEOUT_S,
    STATUS_COMMAND,
    Tailnet,
    TailnetNode,
    Way,
    path_command,
    read_status,
    tailnet_name,
    unsettled_paths,
)
from shoal.network.wireguard import INTERFACE, PEERS, peers_in
from shoal.plan.connections import Connections, Fleet
from shoal.roles.accounting import database_host, has_records
from shoal.roles.clock import CONTAINER_MARKS, is_container
from shoal.slurm.accounting import BACKUPS
from shoal.slurm.state import NodeState
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec
from shoal.tracking import login, mlflow
from shoal.verbs.context import Context

TRACKING_TIMEOUT_S = 30.0
CLOCK_TIMEOUT_S = 5.0
"""A host that does not answer in time is left out: other checks report it."""


@dataclass(frozen=True)
class Clocks:
    """How far each host's clock is ahead of the controller's, in seconds, as its agent measured it."""

    ahead: Mapping[str, float] = field(default_factory=dict)
    containers: tuple[str, ...] = ()
    """Hosts that use the clock of the machine they run on."""


@dataclass(frozen=True)
class TrackingHealth:
    kind: str
    uri: str
    well: bool
    said: str = ""
    """The error, where it is not well."""


async def existing_members(context: Context) -> list[Member]:
    """The members that exist, and the controller in any case: without it there is no status."""
    instances = await context.instances() if any(member.provider for member in context.members) else {}
    return [m for m in context.members if not m.provider or m.name in instances or "controller" in m.roles]


async def clocks(fleet: Fleet, names: Iterable[str], controller: str) -> Clocks:
    """Read the clocks of all hosts at once."""

    async def read_clock(name: str) -> Facts | None:
        try:
            async with asyncio.timeout(CLOCK_TIMEOUT_S):
                return await (await fleet.agent(name)).facts(
                    FactsRequest(files=dict.fromkeys(CONTAINER_MARKS, "there"))
                )
        except (TimeoutError, ShoalError):
            return None

    names = list(names)
    answers = dict(zip(names, await asyncio.gather(*map(read_clock, names)), strict=True))
    facts_by_host = {name: facts for name, facts in answers.items() if facts is not None}
    if controller not in facts_by_host:
        return Clocks()
    base = facts_by_host[controller].clock_offset
    offsets = {name: round(facts.clock_offset - base, 3) for name, facts in facts_by_host.items() if name != controller}
    return Clocks(offsets, tuple(name for name, facts in facts_by_host.items() if is_container(facts)))


async def tracking_health(controller: Host, spec: Spec) -> TrackingHealth | None:
    """Whether the tracking server answers the controller, where the spec has one."""
    if spec.tracking is None:
        return None
    variables = await controller.run(login.ADDRESS_COMMAND, timeout=TRACKING_TIMEOUT_S)
    uri = login.job_variables(variables.text).get("MLFLOW_TRACKING_URI", "")
    if not uri:
        return TrackingHealth(spec.tracking.kind, "", False, "not set up yet; run `shoal up`")
    answer = await controller.run(mlflow.health_command(uri, ours=not spec.tracking.url), timeout=TRACKING_TIMEOUT_S)
    output = answer.text.strip()
    return TrackingHealth(spec.tracking.kind, uri, output == "200", "" if output == "200" else output)


ACCOUNTING_TIMEOUT_S = 15.0
BACKUP_MAX_AGE_S = 2 * 86400
"""A backup is made every night, so the newest should not be older."""
ACCOUNTING_COMMAND = (
    "sh",
    "-c",
    "systemctl is-active mariadb slurmdbd; systemctl show -p Result --value shoal-backup; "
    f"find {BACKUPS} -maxdepth 1 -name '*.sql.gz' -printf '%T@\\n' | sort -n | tail -n 1",
)


@dataclass(frozen=True)
class AccountingHealth:
    host: str
    """The member that runs the database."""
    mariadb: str
    """`active`, or what systemd says instead."""
    slurmdbd: str
    last_backup: float | None = None
    """Seconds since the epoch; None while there is none."""
    backup_failed: bool = False
    """Whether the last nightly backup failed."""
    error: str = ""
    """Why the host did not answer."""

    @property
    def well(self) -> bool:
        return self.mariadb == self.slurmdbd == "active"

    @property
    def down(self) -> str:
        """`MariaDB is failed, slurmdbd is inactive`; empty where both run."""
        daemons = (("MariaDB", self.mariadb), ("slurmdbd", self.slurmdbd))
        return ", ".join(f"{name} is {state}" for name, state in daemons if state != "active")

    @property
    def backup_is_missing(self) -> bool:
        """Whether the last nightly backup failed, or did not run."""
        return self.backup_failed or (
            self.last_backup is not None and time.time() - self.last_backup > BACKUP_MAX_AGE_S
        )

    @property
    def newest_backup(self) -> str:
        when = self.last_backup
        return "no backup yet" if when is None else f"newest backup {datetime.fromtimestamp(when):%Y-%m-%d %H:%M}"


async def accounting_health(fleet: Connections, spec: Spec) -> AccountingHealth | None:
    """None where the spec asks for no accounting. A host that does not answer is an `error` in the result."""
    name = database_host(spec)
    if name is None:
        return None
    if name not in fleet.targets:
        return AccountingHealth(name, "unknown", "unknown", error="the host is not made yet")
    try:
        result = await (await fleet.host(name)).run(ACCOUNTING_COMMAND, timeout=ACCOUNTING_TIMEOUT_S)
    except HostError as error:
        return AccountingHealth(name, "unknown", "unknown", error=error.cause)
    mariadb, slurmdbd, backup_result, backup_time = [*result.text.split(), *["unknown"] * 4][:4]
    return AccountingHealth(name, mariadb, slurmdbd, _number(backup_time), backup_result not in ("success", "unknown"))


async def accounting_findings(fleet: Connections, spec: Spec, facts: Mapping[str, Facts]) -> list[Finding]:
    """Problems of the database, once an `up` has made it."""
    name = database_host(spec)
    if name is None or name not in facts or not has_records(facts[name]):
        return []
    health = await accounting_health(fleet, spec)
    if health is None or health.error:
        return []  # other checks report the host
    findings = []
    if not health.well:
        what = "accounting does not work: jobs run on, and slurmctld keeps their records until it does"
        fix = f"run `shoal up`; `shoal ssh {name} journalctl -u mariadb -u slurmdbd` shows why"
        findings.append(Finding("error", what, health.down, fix, host=name))
    if health.backup_is_missing:
        fix = f"`shoal ssh {name} journalctl -u shoal-backup` shows why; is the disk full?"
        what = "the accounting database was not backed up last night"
        findings.append(Finding("warning", what, health.newest_backup, fix, host=name))
    return findings


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


TAILSCALE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class TailnetMember:
    """A member as the controller sees it."""

    name: str
    address: str = ""
    way: Way = "unknown"
    """direct, relayed, idle (no recent packets, so the path is unknown), offline; unknown to the tailnet."""
    relay: str = ""
    """The relay that packets go through, where they do."""
    days: int | None = None
    """Days until its key expires, where that is soon."""


@dataclass(frozen=True)
class TailnetView:
    """The tailnet as the controller sees it."""

    state: str
    """Tailscale's own word: Running, NeedsLogin."""
    problem: str = ""
    members: tuple[TailnetMember, ...] = ()


async def tailnet_view(context: Context, host: Host) -> Tailnet | None:
    """The status of Tailscale on the controller; None on other networks."""
    if context.spec.network.kind != "tailscale":
        return None
    tailnet = await _tailnet_status(host)
    names = {tailnet_name(context.cluster, member.name) for member in context.members}
    member_addresses = [node.addresses[0] for node in tailnet.peers if node.name in names and node.addresses]
    if unsettled_addresses := unsettled_paths(tailnet, member_addresses):
        with contextlib.suppress(CommandTimeout):
            await host.run(path_command(unsettled_addresses), timeout=PATH_TIMEOUT_S)
        tailnet = await _tailnet_status(host)
    return tailnet


async def _tailnet_status(host: Host) -> Tailnet:
    try:
        result = await host.run(STATUS_COMMAND, timeout=TAILSCALE_TIMEOUT_S)
    except CommandTimeout:
        return Tailnet(problem=f"does not answer within {TAILSCALE_TIMEOUT_S:g} s")
    try:
        return read_status(json.loads(result.text))
    except (ValueError, AttributeError):
        return Tailnet(problem=(result.error_text.strip().splitlines() or ["does not answer"])[-1])


def tailnet_members(
    context: Context, tailnet: Tailnet | None, nodes: Sequence[NodeState], now: float | None = None
) -> TailnetView | None:
    """The members in the tailnet, found by the address that Slurm has, or else by name."""
    if tailnet is None:
        return None
    addresses = {node.name: node.address for node in nodes}
    by_name = {node.name: node for node in tailnet.peers}
    members = []
    for member in context.members:
        if member == context.controller:
            node: TailnetNode | None = tailnet.own
        else:
            peer = tailnet.at(addresses.get(member.name, ""))
            node = peer or by_name.get(tailnet_name(context.cluster, member.name))
        members.append(_member(member.name, node, member == context.controller, time.time() if now is None else now))
    return TailnetView(tailnet.state, tailnet.problem, tuple(members))


def _member(name: str, node: TailnetNode | None, is_own: bool, now: float) -> TailnetMember:
    if node is None or not node.addresses:
        return TailnetMember(name)
    seconds_left = node.expires - now if node.expires is not None else None
    return TailnetMember(
        name,
        node.addresses[0],
        "direct" if is_own else node.way,
        node.relay if not is_own and node.way == "relayed" else "",
        max(0, int(seconds_left / 86400)) if seconds_left is not None and seconds_left < EXPIRES_SOON_S else None,
    )


WG_TIMEOUT_S = 10.0
HANDSHAKE_MAX_AGE_S = 360
"""Slurm sends to every node within 100 s, and WireGuard renews the handshake every 120 s while packets flow."""
MARK = "---"
HANDSHAKES_COMMAND = (
    "sh",
    "-c",
    f"date +%s; echo {MARK}; cat {PEERS}; echo {MARK}; wg show {INTERFACE} latest-handshakes",
)


@dataclass(frozen=True)
class WireGuardView:
    """The WireGuard network as the controller sees it."""

    heard: Mapping[str, int | None] = field(default_factory=dict)
    """Seconds since the last handshake with each member; None where there was none."""
    problem: str = ""

    @property
    def quiet(self) -> tuple[str, ...]:
        """Members without a recent handshake."""
        return tuple(name for name, age_s in self.heard.items() if age_s is None or age_s > HANDSHAKE_MAX_AGE_S)


async def wireguard_view(spec: Spec, controller: Host) -> WireGuardView | None:
    """The output of `wg` on the controller; None on other networks."""
    if spec.network.kind != "wireguard":
        return None
    try:
        result = await controller.run(HANDSHAKES_COMMAND, timeout=WG_TIMEOUT_S)
    except CommandTimeout:
        return WireGuardView(problem="wg does not answer")
    if result.status != 0:
        output = result.error_text.strip().splitlines()
        return WireGuardView(problem=output[-1] if output else "wg does not answer")
    return parse_handshakes(result.text)


def parse_handshakes(text: str) -> WireGuardView:
    now, peers, handshakes = text.split(f"{MARK}\n", 2)
    pairs = [line.split() for line in handshakes.splitlines()]
    handshake_times = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    members = peers_in(peers)
    return WireGuardView(
        {
            name: max(0, int(now) - handshake_times[peer.public_key]) if handshake_times.get(peer.public_key) else None
            for name, peer in members.items()
        }
    )
