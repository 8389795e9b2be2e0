"""Hosts that stay, rented from a provider account: the controller and login hosts of a person without machines.

    listed? ── no ──▶ address reserved ──▶ order written down ──▶ ordered ─┐
      └ yes: adopted; started if it is stopped ────────────────────────────┴─▶ up ─▶ address attached ─▶ SSH ─▶ own key

Each step looks at what the provider has, so a run that was killed is continued by the next. Machines and addresses are
found by their marks; what the order said of a machine is on this machine only as a cache.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import (
    PERMANENT_TOKEN,
    FailureKind,
    Offer,
    ProviderLogin,
    RentalOrder,
    RentalProvider,
    RentedInstance,
)
from shoal.cloud.providers.responses import ApiError
from shoal.cloud.service.machine_keys import ACTIVATE, PREPARE, RELOAD, MachineKey, install_script
from shoal.errors import HostError, HostKeyChanged, ProviderError, ShoalError
from shoal.hosts.api import Connector, Host
from shoal.hosts.provider import HostQuote, Instance, Progress, Request
from shoal.spec.finding import Finding
from shoal.spec.member import RentedMachine
from shoal.verbs.rented_choices import default_identity, find_offers, identity_problem, keeper
from shoal.verbs.rented_record import RentedHostRecord, RentedHostRecords

STATES = {"pending": "starting", "up": "running", "stopping": "stopped", "stopped": "stopped", "error": "starting"}
"""The provider's state -> ours. One in error may be under repair; `create` waits for it, and reports it in the end."""
GONE_TIMEOUT_S = 600.0
SSH_TIMEOUT_S = 300.0
KEY_TIMEOUT_S = 60.0
MAX_PLACES = 4
"""So many zones are tried where one has no machine left."""


@dataclass(frozen=True)
class HostPolling:
    """How often a provider, and a host, is asked."""

    interval_s: float = 3.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    now: Callable[[], float] = time.time


@dataclass
class RentedHosts:
    """Implements `shoal.hosts.provider.Provider` with the machines of one provider account."""

    cluster: str
    account: str
    login: Callable[[], ProviderLogin]
    """Reads the account's key. Raises UsageError."""
    connect: Callable[[], Connector]
    ports: tuple[str, ...] = ()
    """What the provider's firewall must admit."""
    identities: Mapping[str, Path | None] = field(default_factory=dict)
    """The private keys that the file names, by host."""
    opened: Callable[[ProviderLogin], RentalProvider] = rental_provider
    polling: HostPolling = field(default_factory=HostPolling)
    _offers: dict[str, list[Offer]] = field(default_factory=dict)
    """What was quoted, by host: the same is ordered."""

    def check(self, requests: Sequence[Request]) -> list[Finding]:
        problems = dict.fromkeys(identity_problem(self.identities.get(request.name)) for request in requests)
        return [problem for problem in problems if problem is not None]

    async def quote(self, requests: Sequence[Request]) -> list[HostQuote]:
        """What hosts would cost. Those without a place of their own go where the first one is."""
        async with self._client() as (client, login):
            placed = [machine for machine in await self._machines(client) if machine.zone or machine.region]
            near = (placed[0].region, placed[0].zone) if placed else ("", "")
            quotes = []
            for request in requests:
                machine = _machine(request)
                offers = await find_offers(client, login.name, machine, near)
                self._offers[request.name] = offers
                near = near if near[0] else (offers[0].region, offers[0].zone)
                price = machine.usd_hour if machine.usd_hour is not None else offers[0].usd_hour
                place, size = offers[0].place, (machine.disk_gb, machine.keep_address)
                quotes.append(HostQuote(request.name, login.name, machine.type, place, *size, price))
            return quotes

    async def instances(self, cluster: str) -> list[Instance]:
        async with self._client() as (client, _):
            machines = await self._machines(client)
        records = RentedHostRecords.read(cluster)
        for name in {*records.hosts} - {machine.node for machine in machines}:
            if records.hosts[name].id and records.hosts[name].account == self.account:
                records.remove(name)  # it was deleted elsewhere
        return [self._instance(records, machine) for machine in self._one_each(records, machines).values()]

    async def create(self, cluster: str, requests: Sequence[Request], progress: Progress) -> list[Instance]:
        missing = [request for request in requests if request.name not in self._offers]
        listed = {instance.name for instance in await self.instances(cluster)}
        if unquoted := [request for request in missing if request.name not in listed]:
            await self.quote(unquoted)
        async with self._client() as (client, login):
            run = _Run(self, client, login, RentedHostRecords.read(cluster), progress)
            outcomes = await asyncio.gather(*(run.bring_up(request) for request in requests), return_exceptions=True)
        failures: dict[str, str] = {}
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, ShoalError):
                failures[request.name] = "; ".join(filter(None, (outcome.message, outcome.hint)))
            elif isinstance(outcome, BaseException):
                raise outcome
        if failures:
            text = "; ".join(f"{name}: {cause}" for name, cause in failures.items())
            hint = "run `shoal up` again: it continues with what is rented; `shoal down` releases it"
            raise ProviderError(f"cannot rent {text}", hint=hint, hosts=failures)
        return [outcome for outcome in outcomes if isinstance(outcome, Instance)]

    async def delete(self, cluster: str, names: Sequence[str], progress: Progress) -> None:
        await self._remove(names, progress)

    async def destroy(self, cluster: str, progress: Progress) -> None:
        await self._remove(None, progress)

    async def _remove(self, names: Sequence[str] | None, progress: Progress) -> None:
        """Delete machines, then give their addresses back, until the provider lists neither. None: all of them."""
        records = RentedHostRecords.read(self.cluster)
        ends, problem = self.polling.now() + GONE_TIMEOUT_S, ""
        async with self._client() as (client, login):
            while True:
                machines = [one for one in await self._machines(client) if names is None or one.node in names]
                reserved = await keeper(client, login).addresses(self.cluster)
                addresses = [one for one in reserved if names is None or one.node in names]
                if not machines and not addresses:
                    break
                if self.polling.now() > ends:
                    left = ", ".join([*(one.id for one in machines), *(one.address for one in addresses)])
                    why = f": {problem}" if problem else ""
                    hint = "run it again, or delete them in its console"
                    raise ProviderError(f"{login.name} still has {left}{why}", hint=hint)
                progress(f"{len(machines)} machines and {len(addresses)} addresses to go", 0.5)
                due = [one for one in machines if one.state != "stopping"]
                for outcome in await client.delete(due) if due else []:
                    if outcome.failure is FailureKind.AUTH:
                        raise ProviderError(outcome.message, hint="check that the key is valid and may delete")
                    problem = outcome.message if not outcome.ok else problem
                for address in addresses if not machines else ():
                    try:
                        await keeper(client, login).release_address(address)
                    except ApiError as error:  # for a while it may still count as used
                        if error.failure is FailureKind.AUTH:
                            raise
                        problem = error.message
                await self.polling.sleep(self.polling.interval_s)
        for name, record in list(records.hosts.items()):
            if record.account == self.account and (names is None or name in names):
                records.remove(name)
        progress("machines released", 1.0)

    async def _machines(self, client: RentalProvider) -> list[RentedInstance]:
        """The hosts of the cluster that stay, oldest first."""
        listed = await client.instances(self.cluster)
        machines = [one for one in listed if one.cluster == self.cluster and one.permanent]
        return sorted(machines, key=lambda one: (one.created or 0.0, one.id))

    def _one_each(self, records: RentedHostRecords, machines: Sequence[RentedInstance]) -> dict[str, RentedInstance]:
        """One machine of each host: the one that is known here, else the oldest."""
        chosen: dict[str, RentedInstance] = {}
        for machine in machines:
            record = records.hosts.get(machine.node, RentedHostRecord())
            if machine.node not in chosen or (record.id and machine.id == record.id):
                chosen[machine.node] = machine
        return chosen

    def _instance(self, records: RentedHostRecords, machine: RentedInstance) -> Instance:
        name, host = machine.node, records.hosts.get(machine.node, RentedHostRecord())
        identity = str(self.identities.get(name) or default_identity() or "")
        keys = {} if host.token == machine.token else {"token": machine.token, "host_key": "", "next_key": ""}
        address = machine.host or host.address
        place = {"id": machine.id, "address": address, "port": machine.port, "user": machine.user}
        host = records.update(name, **keys, **place, identity=identity, account=self.account)
        is_unfinished = not machine.host or (host.ordered_at > 0 and not host.ready)  # a run was killed after its order
        state = STATES[machine.state] if machine.state != "up" or not is_unfinished else "starting"
        return Instance(name, state, host.target(name), type=machine.type, place=machine.zone or machine.region)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[tuple[RentalProvider, ProviderLogin]]:
        login = self.login()
        client = self.opened(login)
        try:
            keeper(client, login)
            yield client, login
        finally:
            await client.close()


@dataclass
class _Run:
    """One run of `create`."""

    hosts: RentedHosts
    client: RentalProvider
    login: ProviderLogin
    records: RentedHostRecords
    progress: Progress

    async def bring_up(self, request: Request) -> Instance:
        name, machine = request.name, await self._find(request.name)
        if machine is None:
            await self._order(request)
            machine = await self._wait_for(name, lambda one: True, self._lag_s, "it does not list the machine")
        machine = await self._delete_twins(name, machine)
        machine = await self._wait_for(name, lambda one: not _is_stopping(one), GONE_TIMEOUT_S, "it does not stop")
        if machine.state == "stopped":
            self.progress(f"starting {name}", 0.3)
            await keeper(self.client, self.login).start(machine)
        machine = await self._wait_for(name, lambda one: one.state == "up", self._boot_s, "it does not come up")
        if _machine(request).keep_address:
            await self._attach(name, machine)
        machine = await self._wait_for(name, lambda one: bool(one.host), self._boot_s, "it has no address")
        instance = self.hosts._instance(self.records, machine)
        await self._log_in(name)
        self.records.update(name, ready=True)
        self.progress(f"host {name} is up", 1.0)
        return replace(instance, state="running")

    @property
    def _lag_s(self) -> float:
        return self.client.abilities.grace_s

    @property
    def _boot_s(self) -> float:
        return self.client.abilities.boot_s

    async def _listed(self, name: str) -> list[RentedInstance]:
        return [one for one in await self.hosts._machines(self.client) if one.node == name]

    async def _find(self, name: str) -> RentedInstance | None:
        """The machine of a host. One that was ordered lately may not be listed yet."""
        record = self.records.hosts.get(name, RentedHostRecord())
        until = record.ordered_at + self._lag_s if record.token and not record.id else 0.0
        while True:
            if machines := await self._listed(name):
                return self.hosts._one_each(self.records, machines)[name]
            if self.hosts.polling.now() >= until:
                return None
            self.progress(f"looking for the machine that was ordered for {name}", 0.1)
            await self.hosts.polling.sleep(self.hosts.polling.interval_s)

    async def _wait_for(
        self, name: str, arrived: Callable[[RentedInstance], bool], seconds: float, problem: str
    ) -> RentedInstance:
        ends, state = self.hosts.polling.now() + seconds, "not listed"
        while True:
            machines = self.hosts._one_each(self.records, await self._listed(name))
            if name in machines:
                if arrived(machines[name]):
                    return machines[name]
                state = machines[name].raw_state
            if self.hosts.polling.now() > ends:
                raise ProviderError(f"{self.login.name}: {problem} after {seconds:.0f} s: {state}")
            self.progress(f"{name} is {state}", 0.4)
            await self.hosts.polling.sleep(self.hosts.polling.interval_s)

    async def _order(self, request: Request) -> None:
        """Order a machine, in the next zone of the region where one has none."""
        name, wanted = request.name, _machine(request)
        offers = self.hosts._offers[name]
        identity = self.hosts.identities.get(name) or default_identity()
        assert identity is not None  # checked before
        public_key = identity.with_name(f"{identity.name}.pub").read_text(encoding="utf-8").strip()
        address = ""
        if wanted.keep_address:
            addresses = keeper(self.client, self.login)
            address = (await addresses.reserve_address(self.hosts.cluster, name, offers[0].region)).address
        key_name = await self.client.ensure_key(self.hosts.cluster, public_key)
        for offer in [offer for offer in offers if offer.region == offers[0].region][:MAX_PLACES]:
            token, key = f"{PERMANENT_TOKEN}{uuid.uuid4().hex[:12]}", MachineKey.make()
            order = RentalOrder(
                self.hosts.cluster,
                name,
                token,
                offer,
                public_key,
                key_name,
                user_data=f"#!/bin/sh\n{install_script(key, RELOAD)}",
                image=wanted.image,
                disk_gb=wanted.disk_gb,
                ports=self.hosts.ports,
                permanent=True,
                address=address,
            )
            self.progress(f"ordering {offer.type} in {offer.place} for {name}", 0.2)
            fresh = RentedHostRecord(self.hosts.account, token, self.hosts.polling.now(), host_key=key.public)
            self.records.update(name, **{key: getattr(fresh, key) for key in fresh.__dataclass_fields__})
            [outcome] = await self.client.create([order])
            if outcome.ok or outcome.failure is FailureKind.AMBIGUOUS:
                return  # a lost answer: the list shows whether it was made
            if outcome.failure is not FailureKind.CAPACITY:
                break
        self.records.remove(name)
        raise ProviderError(f"{self.login.name} does not rent it out: {outcome.message}")

    async def _delete_twins(self, name: str, kept: RentedInstance) -> RentedInstance:
        """Delete younger machines of the same host, which two runs at once may have ordered."""
        twins = [one for one in await self._listed(name) if one.id != kept.id and one.state != "stopping"]
        if older := [one.id for one in twins if (one.created or 0.0) < (kept.created or 0.0)]:
            ids = ", ".join((kept.id, *older))
            raise ProviderError(f"{name} has several machines: {ids}", hint="delete all but one in the console")
        if twins:
            await self.client.delete(twins)
        return kept

    async def _attach(self, name: str, machine: RentedInstance) -> None:
        addresses = keeper(self.client, self.login)
        address = await addresses.reserve_address(self.hosts.cluster, name, machine.region)
        await addresses.attach_address(address, machine)
        for other in await addresses.addresses(self.hosts.cluster):  # two runs at once may have reserved two
            if other.node == name and other.id != address.id and not other.instance:
                await addresses.release_address(other)
        if address.address != machine.host:
            await self._wait_for(name, lambda one: one.host == address.address, self._boot_s, "it has another address")

    async def _log_in(self, name: str) -> None:
        """Wait for SSH, and give the machine a host key that its provider does not know."""
        ends = self.hosts.polling.now() + SSH_TIMEOUT_S
        while True:
            try:
                return await self._secure(name)
            except HostError as error:
                if self.hosts.polling.now() > ends:
                    raise
                self.progress(f"{name}: {error.cause}", 0.8)
            await self.hosts.polling.sleep(self.hosts.polling.interval_s)

    async def _secure(self, name: str) -> None:
        record = self.records.hosts[name]
        if not record.host_key:
            await (await self._connect(name, None)).close()
            return
        if record.next_key:  # an earlier run was killed around the replacement
            try:
                await (await self._connect(name, record.next_key)).close()
                self.records.update(name, host_key=record.next_key, next_key="")
                return
            except HostKeyChanged:
                pass
        host = await self._connect(name, record.host_key)
        try:
            key = await _output(host, PREPARE)
            if key == record.host_key:
                return  # since an earlier run
            self.records.update(name, next_key=key)
            await _output(host, ACTIVATE)
        finally:
            await host.close()
        await (await self._connect(name, key)).close()
        self.records.update(name, host_key=key, next_key="")

    async def _connect(self, name: str, key: str | None) -> Host:
        return await self.hosts.connect().connect(self.records.hosts[name].target(name, key))


async def _output(host: Host, command: tuple[str, ...]) -> str:
    result = await host.run(command, timeout=KEY_TIMEOUT_S)
    if result.status != 0:
        raise HostError(host.name, f"cannot replace its host key: {result.error_text.strip()}")
    return result.text.strip()


def _machine(request: Request) -> RentedMachine:
    assert request.machine is not None  # only rented members are asked of a provider account
    return request.machine


def _is_stopping(machine: RentedInstance) -> bool:
    """Whether it is on its way to `stopped`, or to its end. A provider does not start it until it is there."""
    return machine.state == "stopping" or machine.raw_state.lower() == "stopping"
