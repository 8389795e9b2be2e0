"""The part that all simulated clouds share: machines with a life and a price, a bill, and faults on demand.

A provider's simulator is a `server.Simulator`: it turns HTTP into calls of a Market, and machines into JSON. See
docs/adding-a-provider.md. All times are seconds of `Market.clock`; tests pass their own clock and advance it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shoal.cloud.providers.api import Market as PricingModel
from shoal.local_files import write_atomic
from shoal_simulators.backend import HostBackend
from shoal_simulators.instances import Fault, InstanceOrder, MachineType, Profile, SimulatedInstance

SERVER_ERRORS = ("error-before-create", "error-after-create", "list-fails")
REJECTIONS = ("stockout", "quota", "balance", "auth", "rate", *SERVER_ERRORS, "duplicate-name", "invalid", "not-found")
"""The reasons for which a Simulator renders an error."""
PRICE_CHANGE_FACTOR = 2.0
"""The fault `price-change` multiplies the offered price by this."""


class ApiRejection(Exception):
    """The cloud rejects the request; `reason` is one of REJECTIONS."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason, self.detail = reason, detail


class Market:
    """The machines of one simulated cloud."""

    def __init__(
        self,
        profile: Profile,
        types: Iterable[MachineType],
        backend: HostBackend,
        *,
        clock: Callable[[], float] = time.time,
        store: Path | None = None,
    ) -> None:
        """With a `store`, machines and the bill survive this process."""
        self.profile, self.backend, self.clock = profile, backend, clock
        self.types = {type.name: type for type in types}
        self.faults: list[Fault] = []
        self.instances: dict[str, SimulatedInstance] = {}
        self.notes: dict[str, Any] = {}
        """Other state as JSON: keys, networks, scripts. `save` writes it too."""
        self._taken: Counter[tuple[str, str]] = Counter()
        """The number of live machines by type and place."""
        self._names: Counter[str] = Counter()
        """The names of machines that are not gone."""
        self._store = store
        self._saved = ""
        self._load()

    # Requests

    def order(self, order: InstanceOrder, id: str) -> SimulatedInstance:
        """Make a machine. Raises ApiRejection; after `error-after-create` the machine exists."""
        if order.type not in self.types:
            raise ApiRejection("invalid", f"no type {order.type}")
        for reason in ("balance", "quota", "stockout", "error-before-create"):
            if self.take_fault(reason, order):
                raise ApiRejection(reason)
        if self.free(order.type, order.place) <= 0:
            raise ApiRejection("stockout")
        twice = self.take_fault("duplicate-name", order) is not None
        if self.profile.unique_names and (twice or self._names[order.name]):
            raise ApiRejection("duplicate-name", order.name)
        machine = self._make(order, id)
        if twice:
            self._make(order, id[:-4] + format(int(time.time_ns()) % 65536, "04x"))
        self.save()
        if self.take_fault("error-after-create", order):
            raise ApiRejection("error-after-create")
        return machine

    def list_instances(self) -> list[SimulatedInstance]:
        """The machines that the API lists now."""
        self.update()
        now = self.clock()
        return [machine for machine in self.instances.values() if self._is_shown(machine, now)]

    def find(self, id: str) -> SimulatedInstance:
        """One machine that a list shows. Raises ApiRejection with `not-found`."""
        machine = self._now(id)
        if not self._is_shown(machine, self.clock()):
            raise ApiRejection("not-found", id)
        return machine

    def delete(self, id: str) -> SimulatedInstance:
        """Delete a machine: it stops now and is gone later. Raises ApiRejection with `not-found`."""
        machine = self._now(id)
        if machine.phase == "gone":
            raise ApiRejection("not-found", id)
        if machine.live:
            self._stop(machine)
        self.save()
        return machine

    def free(self, type: str, place: str) -> int:
        """The free capacity of a type in a place."""
        return self.types[type].places.get(place, 0) - self._taken[type, place]

    def price(self, type: str, market: PricingModel = "on-demand") -> float:
        """The offered price of an hour."""
        offered = self.types[type]
        return offered.usd_hour if market == "on-demand" or offered.spot_usd_hour is None else offered.spot_usd_hour

    # Events

    def take_fault(self, kind: str, order: InstanceOrder | None = None) -> Fault | None:
        """Take a fault of this kind that is due. Without an order, only faults that name no type."""
        for count, fault in enumerate(self.faults):
            place = (order.region, order.zone) if order else ()
            if fault.kind == kind and fault.times and fault.concerns(order.type if order else "", place):
                if fault.times > 0:
                    self.faults[count] = replace(fault, times=fault.times - 1)
                return fault
        return None

    def preempt(self, id: str) -> SimulatedInstance:
        """Preempt a machine, after the cloud's notice. Raises ApiRejection with `not-found`."""
        machine = self._live(id)
        self._give_notice(machine)
        self.update()
        return machine

    def kill(self, id: str) -> SimulatedInstance:
        """Fail a machine. The cloud shows it in error and bills it until it is deleted."""
        machine = self._live(id)
        self._die(machine)
        self.save()
        return machine

    def stop(self, id: str) -> SimulatedInstance:
        """Stop a machine: its disk stays. Raises ApiRejection with `not-found`."""
        machine = self._live(id)
        if machine.phase != "stopped":
            machine.phase, machine.stopped_at, machine.host = "stopped", self.clock(), ""
            self.backend.stop(machine.id)
        self.save()
        return machine

    def start(self, id: str) -> SimulatedInstance:
        """Start a machine that is stopped, or has shut itself down. Raises ApiRejection with `not-found`."""
        machine = self._live(id)
        if machine.phase in ("stopped", "error"):
            machine.unbilled_s += self.clock() - (machine.stopped_at or self.clock())
            machine.phase, machine.stopped_at, machine.started_at = "pending", None, self.clock()
            self.backend.start(machine.id)
        self.save()
        return machine

    def attach(self, id: str, address: str) -> None:
        """Give a machine a reserved address; an empty one takes it away."""
        machine = self._live(id)
        machine.external_address = machine.host = address
        self.route_addresses()

    def route_addresses(self) -> None:
        """Route all reserved addresses to their machines."""
        live = [one for one in self.instances.values() if one.live and one.external_address]
        self.backend.route({one.external_address: one.id for one in live})
        self.save()

    def update(self) -> None:
        """Apply everything that is due now."""
        now = self.clock()
        for machine in self.instances.values():
            if machine.phase != "gone":
                self._advance(machine, now)
        self.save()

    def bill(self) -> list[dict[str, Any]]:
        """The cost of each machine so far, by the cloud's billing rule."""
        self.update()
        return [self._billed(machine) for machine in self.instances.values()]

    def adopt(self) -> None:
        """Continue an earlier run: machines whose host still exists stay, the others are in error."""
        there = self.backend.adopt(machine.id for machine in self.instances.values() if machine.phase != "gone")
        for machine in self.instances.values():
            if machine.live and machine.id not in there:
                machine.phase = "error"
            elif machine.phase == "stopping":
                self.backend.end(machine.id)
        self.route_addresses()
        self.update()

    def save(self) -> None:
        """Write machines and bill if they changed."""
        if self._store is None:
            return
        machines = [asdict(machine) for machine in self.instances.values()]
        text = json.dumps({"machines": machines, "notes": self.notes})
        if text != self._saved:
            self._store.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._store, text, 0o600)  # orders may hold secrets
            self._saved = text

    def _load(self) -> None:
        if self._store is not None and self._store.exists():
            stored = json.loads(self._store.read_text())
            self.notes = stored["notes"]
            for data in stored["machines"]:
                order = InstanceOrder(**data.pop("order" if "order" in data else "wanted"))  # the key until 0.1
                self._enter(SimulatedInstance(order=replace(order, public_keys=tuple(order.public_keys)), **data))

    def _is_shown(self, machine: SimulatedInstance, now: float) -> bool:
        return now >= machine.unseen_until and (machine.phase != "gone" or now < machine.shown_until)

    def _enter(self, machine: SimulatedInstance) -> None:
        self.instances[machine.id] = machine
        self._names[machine.order.name] += machine.phase != "gone"
        self._taken[machine.order.type, machine.order.place] += machine.live

    def _now(self, id: str) -> SimulatedInstance:
        """A machine, updated. Raises ApiRejection with `not-found`."""
        if id not in self.instances:
            raise ApiRejection("not-found", id)
        machine = self.instances[id]
        if machine.phase != "gone":
            self._advance(machine, self.clock())
        return machine

    def _live(self, id: str) -> SimulatedInstance:
        machine = self._now(id)
        if not machine.live:
            raise ApiRejection("not-found", id)
        return machine

    def _make(self, order: InstanceOrder, id: str) -> SimulatedInstance:
        now = self.clock()
        slow, lag = self.take_fault("slow-boot", order), self.take_fault("lagging-list", order)
        late = self.take_fault("late-address", order)
        factor = PRICE_CHANGE_FACTOR if self.take_fault("price-change", order) else 1.0
        machine = SimulatedInstance(
            id=id,
            order=order,
            usd_hour=self.price(order.type, order.market) * factor,
            ordered=now,
            boot_seconds=self.profile.boot_s + (slow.after if slow else 0.0),
            unseen_until=now + lag.after if lag else 0.0,
            shown_until=lag.after if lag else 0.0,
            reachable=self.take_fault("never-reachable", order) is None,
            late_address_s=late.after if late else 0.0,
            gpu_works=self.take_fault("bad-gpu", order) is None,
            runs_user_data=self.take_fault("other-host-key", order) is None,
        )
        for fate in ("dies", "preempt"):
            if not machine.fate and (fault := self.take_fault(fate, order)):
                machine.fate, machine.fate_after = fate, fault.after
        self._enter(machine)
        self.backend.begin(machine, self.types[order.type], self.profile)
        return machine

    def _advance(self, machine: SimulatedInstance, now: float) -> None:
        status = self.backend.status(machine.id)
        shown_at = machine.ordered + self.profile.address_s + machine.late_address_s
        if machine.phase in ("pending", "up", "error") and now >= shown_at and status.host:
            machine.host = machine.external_address or status.host
            machine.port, machine.private_address = status.port, status.private_address
        # The cloud shows an unreachable machine as up.
        if machine.phase == "pending" and now >= machine.ordered + machine.boot_seconds:
            if status.state == "up" or (status.state == "making" and not machine.reachable):
                machine.phase, machine.up = "up", now
                machine.first_up = machine.first_up or now
            elif status.state == "dead":
                machine.phase = "error"
        if machine.phase == "up" and status.state == "dead":
            machine.phase = "error"
        if machine.phase == "up" and machine.fate and now >= (machine.up or now) + machine.fate_after:
            fate, machine.fate = machine.fate, ""
            (self._give_notice if fate == "preempt" else self._die)(machine)
        lifetime = machine.order.lifetime
        ends = [machine.ordered + lifetime if lifetime else None, machine.takes_away]
        if machine.live and any(end is not None and now >= end for end in ends):
            self._stop(machine)
        stopped = (machine.stopping or now) + self.profile.stop_s
        if machine.phase == "stopping" and now >= stopped and status.state == "gone":
            machine.phase = "gone"
            self._names[machine.order.name] -= 1
            machine.shown_until = now + machine.shown_until if machine.shown_until else 0.0

    def _give_notice(self, machine: SimulatedInstance) -> None:
        machine.preempted = True
        ordered = machine.order.notice_s
        machine.takes_away = self.clock() + (self.profile.notice_s if ordered is None else ordered)
        if self.profile.notice_shuts_down:
            self.backend.shut_down(machine.id)

    def _die(self, machine: SimulatedInstance) -> None:
        machine.phase = "error"
        self.backend.kill(machine.id)

    def _stop(self, machine: SimulatedInstance) -> None:
        machine.phase, machine.stopping, machine.ended = "stopping", self.clock(), self.clock()
        self._taken[machine.order.type, machine.order.place] -= 1
        self.backend.end(machine.id)
        if machine.external_address:
            self.route_addresses()

    def _billed(self, machine: SimulatedInstance) -> dict[str, Any]:
        billing = self.profile.billing
        started = machine.first_up if billing.from_up else machine.ordered
        until = machine.ended if machine.ended is not None else self.clock()
        until = until if machine.stopped_at is None else min(until, machine.stopped_at)
        seconds = billing.seconds(until - started - machine.unbilled_s) if started is not None else 0
        return {
            **{name: getattr(machine, name) for name in ("id", "usd_hour", "phase", "ordered", "ended")},
            **{name: getattr(machine.order, name) for name in ("name", "type", "region", "zone", "market")},
            "started": started,
            "seconds": seconds,
            "usd": round(seconds * machine.usd_hour / 3600, 6),
        }
