"""`shoal try`: rent the cheapest machine of a provider for minutes, and report how every step went.

The machine is a node of the running cluster, to which a nodeset `try` is added meanwhile. So the trial goes the way of
every rental: the rental service orders, joins and checks the machine, Slurm runs a job on it, the service
releases it, and the ledger has the bill. The report has no key and no address.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address

from shoal.cloud.providers import abilities, rental_provider
from shoal.cloud.providers.api import Offer, ProviderLogin, Query, RentalProvider, RentedInstance
from shoal.cloud.rental import dollars
from shoal.errors import ProviderError, ShoalError, UsageError
from shoal.hosts.api import Host
from shoal.spec.hosts import NodeSet
from shoal.spec.model import Spec
from shoal.spec.partitions import Partition
from shoal.verbs.context import Context, note_at_exit
from shoal.verbs.cost import cost
from shoal.verbs.provider_accounts import Open, ask_all, offers, open_accounts
from shoal.verbs.rentals import rented_view
from shoal.verbs.up import up

NODESET, NODE = "try", "try1"
MAX_LIFETIME_S = 3600
JOB_S = 300
"""Beside the time that a machine may take to join, so much is left for its job."""
RELEASE_TIMEOUT_S = 600.0
COMMAND_TIMEOUT_S = 60.0
GPU_COMMAND = 'echo "$CUDA_VISIBLE_DEVICES"; test -n "$CUDA_VISIBLE_DEVICES"'
"""The job: Slurm gave it a GPU. Whether CUDA can open each GPU is checked before the node takes jobs."""
FACTS = {"OS": "system", "Version": "slurmd", "CPUTot": "CPUs", "RealMemory": "memory in MB", "Gres": "GPUs"}
"""Fields of `scontrol show node`, and their names in the report."""
MIN_SECRET_LENGTH = 8
"""Shorter parts of a secret are words of its format."""
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")
_IPV6 = re.compile(r"(?<!\w)[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:]*(?!\w)")
UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


@dataclass(frozen=True)
class TrialPlan:
    """What a trial rents, and what it can cost at most."""

    account: ProviderLogin
    offer: Offer
    lifetime_s: int
    """The machine is deleted after this time whatever happens."""
    most_usd: float


@dataclass(frozen=True)
class TrialStep:
    """A step of the trial."""

    name: str
    seconds: float
    error: str = ""
    """Empty where it succeeded."""


@dataclass(frozen=True)
class TryResult:
    """The report of a trial, which may be published."""

    cluster: str
    provider: str
    """The kind of provider."""
    type: str
    place: str
    market: str
    usd_hour: float
    steps: tuple[TrialStep, ...] = ()
    node: Mapping[str, str] = field(default_factory=dict)
    """What Slurm saw of the machine."""
    usd: float | None = None
    """The cost in the ledger; None where it is unknown."""
    passed: bool = False


@dataclass(frozen=True)
class TrialPolling:
    """How often the cluster and the provider are asked."""

    interval_s: float = 3.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


async def plan_trial(
    context: Context, account: str, max_cost: float, type: str = "", opened: Open = rental_provider
) -> TrialPlan:
    """Choose the cheapest machine with a GPU, or of the named type. Rents nothing."""
    if NODESET in context.spec.nodesets:
        raise UsageError(f"the file has a nodeset {NODESET}", hint="rename it: the trial adds one of that name")
    accounts = open_accounts(context.spec, [account])
    for error in accounts.failures.values():
        raise error
    login = accounts.usable[0]
    query = Query(types=(type,)) if type else Query(gpus=1)
    result = await offers(context, query, [login.name], opened)
    for error in result.failures.values():
        raise error
    usable = [one for one in result.offers if one.available != "no" and one.usd_hour and one.provider == login.name]
    if not usable:
        what = type or "machine with a GPU"
        raise ProviderError(f"{login.name} offers no {what} with a known price now", hint="see `shoal offers`")
    offer = usable[0]
    able = abilities(login.kind)
    wanted = min(MAX_LIFETIME_S, able.boot_s + JOB_S)
    most = able.billing.seconds(wanted) * (offer.usd_hour or 0.0) / 3600
    if most > max_cost:
        raise UsageError(
            f"the cheapest, {offer.type} in {offer.place} for ${offer.usd_hour:.2f} an hour, can cost ${most:.2f}",
            hint=f"use --max-cost {most + 0.005:.2f}",
        )
    return TrialPlan(login, offer, wanted, most)


async def try_provider(
    context: Context, plan: TrialPlan, opened: Open = rental_provider, polling: TrialPolling | None = None
) -> TryResult:
    """Go through the trial. Whatever happens, the machine is released, and the nodeset removed, before this ends."""
    trial = _Trial(context, plan, opened, polling or TrialPolling())
    left = f"a machine of {plan.account.name} may be rented; run `shoal reap`, then `shoal up`"
    with note_at_exit(lambda: left):
        try:
            await trial.go()
        finally:
            await trial.clean()
    return trial.report()


class _Trial:
    def __init__(self, context: Context, plan: TrialPlan, opened: Open, polling: TrialPolling) -> None:
        self._context, self._plan, self._opened, self._polling = context, plan, opened, polling
        self._spec = with_nodeset(context.spec, plan)
        self._steps: list[TrialStep] = []
        self._facts: dict[str, str] = {}
        self._usd: float | None = None
        self._job = ""

    async def go(self) -> None:
        """The steps until the job has ended. An error ends it and is in the report."""
        try:
            with self._step("add a nodeset to the cluster"):
                await self._apply(replace(self._context, known=self._spec))
            async with self._context.controller_host() as controller:
                with self._step("order"):
                    self._job = await self._submit(controller)
                    await self._wait(controller, lambda state: state in ("made", "joined"))
                with self._step("boot, join and check of its GPUs"):
                    await self._wait(controller, lambda state: state == "joined")
                    self._facts = await self._read_facts(controller)
                with self._step("job"):
                    await self._finish_job(controller)
        except ShoalError:
            return  # it is in the report

    async def clean(self) -> None:
        """Release the machine, read its bill, and remove the nodeset."""
        with suppress(ShoalError), self._step("release"):  # an error is in the report
            await self._release()
        with suppress(ShoalError), self._step("bill"):
            result = await cost(replace(self._context, known=self._spec))
            self._usd = dollars(result.costs.nodesets.get(NODESET, 0))
        with suppress(ShoalError), self._step("remove the nodeset"):
            await self._apply(self._context)

    async def _apply(self, context: Context) -> None:
        result = await up(context)
        for name, error in result.failures.items():
            raise ProviderError(f"{name}: {error.message}", hint=error.hint)

    def report(self) -> TryResult:
        offer = self._plan.offer
        passed = not any(step.error for step in self._steps)
        return TryResult(
            self._context.cluster,
            self._plan.account.kind,
            offer.type,
            offer.place,
            offer.market,
            offer.usd_hour or 0.0,
            tuple(self._steps),
            self._facts,
            self._usd,
            passed,
        )

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        begun, error = time.monotonic(), "stopped"
        with self._context.progress.phase(name, 1):
            try:
                yield
                error = ""
            except ShoalError as problem:
                text = ": ".join(filter(None, (problem.message, problem.hint)))
                error = publishable(text, self._plan.account.secret)
                raise
            finally:
                self._steps.append(TrialStep(name, round(time.monotonic() - begun, 1), error))

    async def _submit(self, controller: Host) -> str:
        gpus = self._plan.offer.gpus
        line = ["sbatch", "--parsable", f"--nodelist={NODE}", "--nodes=1", "--time=5", "--output=/dev/null"]
        shown = await _run(controller, "scontrol", "-o", "show", "node", NODE)
        if partition := re.search(r"\bPartitions=([^ ,]+)", shown):  # containers are moved to one of their own
            line.append(f"--partition={partition[1]}")
        line += [f"--gpus-per-node={gpus}", f"--wrap={GPU_COMMAND}"] if gpus else ["--wrap=true"]
        return (await _run(controller, *line)).strip()

    async def _wait(self, controller: Host, arrived: Callable[[str], bool]) -> None:
        """Wait for a state of the machine; raise the reason where there will be none."""
        ends, reason = time.monotonic() + self._plan.lifetime_s, ""
        while time.monotonic() < ends:
            view = await rented_view(self._spec, controller)
            if view is not None:
                nodes = [node for node in view.nodes if node.name == NODE]
                if any(arrived(node.state) for node in nodes):
                    return
                reason = view.waiting.get(self._job) or next((node.problem for node in nodes), "") or reason
                reason = view.accounts.get(self._plan.account.name, "") or reason
            if await self._job_state(controller) not in UNFINISHED:
                return  # so fast that no status showed it; what the job says counts
            await self._polling.sleep(self._polling.interval_s)
        raise ProviderError(reason or "no machine within the time that this trial may take")

    async def _finish_job(self, controller: Host) -> None:
        ends = time.monotonic() + self._plan.lifetime_s
        while (state := await self._job_state(controller)) in UNFINISHED:
            if time.monotonic() > ends:
                raise ProviderError(f"job {self._job} is {state} and did not end")
            await self._polling.sleep(self._polling.interval_s)
        if state != "COMPLETED":
            raise ProviderError(f"job {self._job} ended as {state}")

    async def _job_state(self, controller: Host) -> str:
        match = re.search(r"\bJobState=(\w+)", await _run(controller, "scontrol", "-o", "show", "job", self._job))
        return match[1] if match else "unknown"

    async def _read_facts(self, controller: Host) -> dict[str, str]:
        text = await _run(controller, "scontrol", "-o", "show", "node", NODE)
        found = {key: re.search(rf"\b{key}=(.*?)(?= \w+=|$)", text) for key in FACTS}
        return {FACTS[key]: match[1].strip() for key, match in found.items() if match}

    async def _release(self) -> None:
        """Have the service release the machine, and delete what is left in the provider's list."""
        with suppress(ShoalError):  # without the controller, the provider is asked below
            async with self._context.controller_host() as controller:
                if self._job:
                    await controller.run(("scancel", self._job), timeout=COMMAND_TIMEOUT_S)
                down = ("scontrol", "update", f"nodename={NODE}", "state=power_down_force")
                await controller.run(down, timeout=COMMAND_TIMEOUT_S)
        ends = time.monotonic() + RELEASE_TIMEOUT_S
        asked = 0
        while machines := await self._machines(delete=asked > 20):
            asked += 1
            if time.monotonic() > ends:
                ids = ", ".join(machine.id for machine in machines)
                raise ProviderError(f"{ids} is still there", hint="run `shoal reap`")
            await self._polling.sleep(self._polling.interval_s)
        async with self._context.controller_host() as controller:  # the ledger learns of it from the next list
            while time.monotonic() < ends:
                view = await rented_view(self._spec, controller)
                if view is None or all(node.name != NODE for node in view.nodes):
                    return
                await self._polling.sleep(self._polling.interval_s)

    async def _machines(self, *, delete: bool) -> list[RentedInstance]:
        """The machines of the trial that the provider lists, after they were deleted once more where asked."""

        async def question(account: ProviderLogin, client: RentalProvider) -> list[RentedInstance]:
            listed = [one for one in await client.instances(self._context.cluster) if one.node == NODE]
            if delete and listed:
                await client.delete(listed)
            return listed

        accounts = open_accounts(self._context.spec, [self._plan.account.name])
        answers, failures = await ask_all(accounts, question, self._opened)
        for error in failures.values():
            raise error
        return answers[self._plan.account.name]


def publishable(text: str, secret: str) -> str:
    """A text without the secret, each part of one such as `id:key` or a JSON file, and addresses of machines."""
    parts = re.findall(rf'[^\s":,{{}}]{{{MIN_SECRET_LENGTH},}}', secret)
    for part in sorted({secret, *parts} - {""}, key=len, reverse=True):
        text = text.replace(part, "***")
    return _IPV6.sub(lambda match: "***" if _is_address(match[0]) else match[0], _IPV4.sub("***", text))


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def with_nodeset(spec: Spec, plan: TrialPlan) -> Spec:
    """The cluster with one more nodeset, of one machine. Its shape is the least, so that any machine has it."""
    offer = plan.offer
    fields = {
        "provider": plan.account.name,
        "type": offer.type,
        "region": offer.region or None,
        "zone": offer.zone or None,
        "market": offer.market,
        "max": 1,
        "idle": "1m",
        "lifetime": f"{plan.lifetime_s}s",
        "max_price": round((offer.usd_hour or 0.0) * 1.001, 6),
        "cpus": 1,
        "memory": "1G",
        "gpus": offer.gpus,
    }
    nodeset = NodeSet.model_validate({name: value for name, value in fields.items() if value is not None})
    changes: dict[str, object] = {"nodesets": {**spec.nodesets, NODESET: nodeset}}
    if spec.partitions:
        changes["partitions"] = {**spec.partitions, NODESET: Partition.model_validate({"nodesets": [NODESET]})}
    return spec.model_copy(update=changes)


async def _run(controller: Host, *command: str) -> str:
    result = await controller.run(command, timeout=COMMAND_TIMEOUT_S)
    if result.status != 0:
        raise ProviderError(f"{command[0]} on {controller.name}: {result.error_text.strip() or result.status}")
    return result.text
