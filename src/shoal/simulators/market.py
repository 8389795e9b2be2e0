"""What every simulated cloud has: machines with a life and a price, a bill, and faults on demand.

A provider's simulator is a `server.Cloud`: it turns HTTP into calls of a Market, and machines into its own JSON.

    class Example(Cloud):
        kind, base = "example", "/v1"
        profile = Profile(boot_seconds=60, billing=Billing(step=60, from_up=True))
        types = (MachineType("big", gpu="H100", gpus=8, usd_hour=20.0, places={"us-1": 4}),)
        creating, listing = r"POST /v1/machines", r"GET /v1/machines"

        def routes(self):
            return [Route("/v1/machines", self.list, methods=["GET"]), ...]

        async def create(self, request):
            wanted = Wanted(name=..., type=..., region=..., public_keys=(...,), marks={"tag": ...})
            machine = self.market.order(wanted, id=...)      # raises Refused, which becomes self.refuse(why)
            return JSONResponse({"id": machine.id})

        async def list(self, request):
            return JSONResponse([self.shown(machine) for machine in self.market.listed()])

        def refuse(self, why, detail=""):                    # `why` is one of REFUSALS
            status, code = {"stockout": (400, "no-capacity"), ...}[why]
            return JSONResponse({"error": code}, status)

All times are seconds of `Market.clock`; tests give it a clock of their own and move that.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shoal.providers.rental import Market as Buying
from shoal.simulators.faults import Fault
from shoal.simulators.ground import Ground
from shoal.simulators.machines import Machine, MachineType, Profile, Wanted

REFUSALS = (
    "stockout", "quota", "balance", "auth", "rate", "error-before-create", "error-after-create", "list-fails",
    "duplicate-name", "invalid", "not-found",
)  # fmt: skip
"""Every reason for which a Cloud is asked for its own error."""
DEARER = 2.0
"""A price change makes machines cost so many times what was offered."""


class Refused(Exception):
    """The cloud does not do it; `why` is one of REFUSALS."""

    def __init__(self, why: str, detail: str = "") -> None:
        super().__init__(detail or why)
        self.why, self.detail = why, detail


class Market:
    """The machines of one simulated cloud."""

    def __init__(
        self,
        profile: Profile,
        types: Iterable[MachineType],
        ground: Ground,
        *,
        clock: Callable[[], float] = time.time,
        store: Path | None = None,
    ) -> None:
        """With a `store`, machines and the bill outlive this process."""
        self.profile, self.ground, self.clock = profile, ground, clock
        self.types = {one.name: one for one in types}
        self.faults: list[Fault] = []
        self.machines: dict[str, Machine] = {}
        self.notes: dict[str, Any] = {}
        """What else the cloud remembers, as JSON has it: keys, networks, scripts. `save` writes it too."""
        self._taken: Counter[tuple[str, str]] = Counter()
        """How many live machines there are of each type in each place."""
        self._names: Counter[str] = Counter()
        """The names of machines that are not gone."""
        self._store = store
        self._saved = ""
        self._load()

    # What the cloud is asked for

    def order(self, wanted: Wanted, id: str) -> Machine:
        """Make a machine. Raises Refused, with `error-after-create` when it was made all the same."""
        if wanted.type not in self.types:
            raise Refused("invalid", f"no type {wanted.type}")
        for why in ("balance", "quota", "stockout", "error-before-create"):
            if self.take(why, wanted):
                raise Refused(why)
        if self.room(wanted.type, wanted.place) <= 0:
            raise Refused("stockout")
        twice = self.take("duplicate-name", wanted) is not None
        if self.profile.unique_names and (twice or self._names[wanted.name]):
            raise Refused("duplicate-name", wanted.name)
        machine = self._make(wanted, id)
        if twice:
            self._make(wanted, id[:-4] + format(int(time.time_ns()) % 65536, "04x"))
        self.save()
        if self.take("error-after-create", wanted):
            raise Refused("error-after-create")
        return machine

    def listed(self) -> list[Machine]:
        """What a list of the API shows now."""
        self.look()
        now = self.clock()
        return [one for one in self.machines.values() if self._is_shown(one, now)]

    def find(self, id: str) -> Machine:
        """One machine that a list shows. Raises Refused with `not-found`."""
        machine = self._now(id)
        if not self._is_shown(machine, self.clock()):
            raise Refused("not-found", id)
        return machine

    def delete(self, id: str) -> Machine:
        """Give a machine back. It stops at once, and is gone a little later. Raises Refused with `not-found`."""
        machine = self._now(id)
        if machine.phase == "gone":
            raise Refused("not-found", id)
        if machine.live:
            self._stop(machine)
        self.save()
        return machine

    def room(self, type: str, place: str) -> int:
        """How many more machines of a type there are in a place."""
        return self.types[type].places.get(place, 0) - self._taken[type, place]

    def price(self, type: str, market: Buying = "on-demand") -> float:
        """What is asked for an hour of it, as offered."""
        found = self.types[type]
        return found.usd_hour if market == "on-demand" or found.spot_usd_hour is None else found.spot_usd_hour

    # What happens to machines

    def take(self, kind: str, wanted: Wanted | None = None) -> Fault | None:
        """A fault of the kind that is due, which is then spent. Without an order, only those that name no type."""
        for count, fault in enumerate(self.faults):
            place = (wanted.region, wanted.zone) if wanted else ()
            if fault.kind == kind and fault.times and fault.concerns(wanted.type if wanted else "", place):
                if fault.times > 0:
                    self.faults[count] = replace(fault, times=fault.times - 1)
                return fault
        return None

    def preempt(self, id: str) -> Machine:
        """Take a machine away, after the cloud's notice. Raises Refused with `not-found`."""
        machine = self._live(id)
        self._give_notice(machine)
        self.look()
        return machine

    def kill(self, id: str) -> Machine:
        """Let a machine die. The cloud shows it in error, and charges for it until it is deleted."""
        machine = self._live(id)
        self._die(machine)
        self.save()
        return machine

    def look(self) -> None:
        """Let time pass: what is due now happens."""
        now = self.clock()
        for machine in self.machines.values():
            if machine.phase != "gone":
                self._advance(machine, now)
        self.save()

    def bill(self) -> list[dict[str, Any]]:
        """What each machine has cost so far, by the cloud's own rule."""
        self.look()
        return [self._billed(machine) for machine in self.machines.values()]

    def adopt(self) -> None:
        """Go on with what a former run left: machines whose host is there live on, the others are in error."""
        there = self.ground.adopt(one.id for one in self.machines.values() if one.phase != "gone")
        for machine in self.machines.values():
            if machine.live and machine.id not in there:
                machine.phase = "error"
            elif machine.phase == "stopping":
                self.ground.end(machine.id)
        self.look()

    def save(self) -> None:
        """Write machines and bill, where something changed."""
        if self._store is None:
            return
        machines = [asdict(machine) for machine in self.machines.values()]
        text = json.dumps({"machines": machines, "notes": self.notes})
        if text != self._saved:
            self._store.parent.mkdir(parents=True, exist_ok=True)
            beside = self._store.with_suffix(".new")
            beside.touch(mode=0o600)  # orders may carry what is not for everybody
            beside.write_text(text)
            beside.rename(self._store)
            self._saved = text

    def _load(self) -> None:
        if self._store is not None and self._store.exists():
            stored = json.loads(self._store.read_text())
            self.notes = stored["notes"]
            for data in stored["machines"]:
                wanted = Wanted(**{**data.pop("wanted")})
                self._enter(Machine(wanted=replace(wanted, public_keys=tuple(wanted.public_keys)), **data))

    def _is_shown(self, machine: Machine, now: float) -> bool:
        return now >= machine.unseen_until and (machine.phase != "gone" or now < machine.shown_until)

    def _enter(self, machine: Machine) -> None:
        self.machines[machine.id] = machine
        self._names[machine.wanted.name] += machine.phase != "gone"
        self._taken[machine.wanted.type, machine.wanted.place] += machine.live

    def _now(self, id: str) -> Machine:
        """A machine as it is now. Raises Refused with `not-found`."""
        if id not in self.machines:
            raise Refused("not-found", id)
        machine = self.machines[id]
        if machine.phase != "gone":
            self._advance(machine, self.clock())
        return machine

    def _live(self, id: str) -> Machine:
        machine = self._now(id)
        if not machine.live:
            raise Refused("not-found", id)
        return machine

    def _make(self, wanted: Wanted, id: str) -> Machine:
        now = self.clock()
        slow, lag = self.take("slow-boot", wanted), self.take("lagging-list", wanted)
        machine = Machine(
            id=id,
            wanted=wanted,
            usd_hour=self.price(wanted.type, wanted.market) * (DEARER if self.take("price-change", wanted) else 1.0),
            ordered=now,
            boot_seconds=self.profile.boot_seconds + (slow.after if slow else 0.0),
            unseen_until=now + lag.after if lag else 0.0,
            shown_until=lag.after if lag else 0.0,
            reachable=self.take("never-reachable", wanted) is None,
            gpu_works=self.take("bad-gpu", wanted) is None,
        )
        for fate in ("dies", "preempt"):
            if not machine.fate and (fault := self.take(fate, wanted)):
                machine.fate, machine.fate_after = fate, fault.after
        self._enter(machine)
        self.ground.begin(machine, self.types[wanted.type], self.profile)
        return machine

    def _advance(self, machine: Machine, now: float) -> None:
        stand = self.ground.stand(machine.id)
        if machine.live and now >= machine.ordered + self.profile.address_seconds and stand.host:
            machine.host, machine.port, machine.private_address = stand.host, stand.port, stand.private_address
        # A machine that nobody can reach is one that the cloud believes to be up.
        if machine.phase == "pending" and now >= machine.ordered + machine.boot_seconds:
            if stand.state == "up" or (stand.state == "making" and not machine.reachable):
                machine.phase, machine.up = "up", now
            elif stand.state == "dead":
                machine.phase = "error"
        if machine.phase == "up" and stand.state == "dead":
            machine.phase = "error"
        if machine.phase == "up" and machine.fate and now >= (machine.up or now) + machine.fate_after:
            fate, machine.fate = machine.fate, ""
            (self._give_notice if fate == "preempt" else self._die)(machine)
        lifetime = machine.wanted.lifetime
        if machine.live and lifetime and now >= machine.ordered + lifetime:
            self._stop(machine)
        if machine.live and machine.takes_away is not None and now >= machine.takes_away:
            self._stop(machine)
        stopped = (machine.stopping or now) + self.profile.stop_seconds
        if machine.phase == "stopping" and now >= stopped and stand.state == "gone":
            machine.phase = "gone"
            self._names[machine.wanted.name] -= 1
            machine.shown_until = now + machine.shown_until if machine.shown_until else 0.0

    def _give_notice(self, machine: Machine) -> None:
        machine.preempted = True
        machine.takes_away = self.clock() + self.profile.notice_seconds
        self.ground.notice(machine.id, machine.takes_away)

    def _die(self, machine: Machine) -> None:
        machine.phase = "error"
        self.ground.kill(machine.id)

    def _stop(self, machine: Machine) -> None:
        machine.phase, machine.stopping, machine.ended = "stopping", self.clock(), self.clock()
        self._taken[machine.wanted.type, machine.wanted.place] -= 1
        self.ground.end(machine.id)

    def _billed(self, machine: Machine) -> dict[str, Any]:
        billing = self.profile.billing
        started = machine.up if billing.from_up else machine.ordered
        until = machine.ended if machine.ended is not None else self.clock()
        seconds = billing.seconds(until - started) if started is not None else 0
        return {
            "id": machine.id,
            "name": machine.wanted.name,
            "type": machine.wanted.type,
            "region": machine.wanted.region,
            "zone": machine.wanted.zone,
            "market": machine.wanted.market,
            "usd_hour": machine.usd_hour,
            "phase": machine.phase,
            "ordered": machine.ordered,
            "started": started,
            "ended": machine.ended,
            "seconds": seconds,
            "usd": round(seconds * machine.usd_hour / 3600, 6),
        }
