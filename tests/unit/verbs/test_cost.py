"""`shoal cost`: the costs in the controller's ledger, beside the limits in the file."""

import json
from io import StringIO

import pytest
from rich.console import Console
from tests.contract.rental_providers import CASES, trial
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_clusters import context_of
from tests.support.fake_renters import RENTING
from tests.support.fake_world import LAB, World, lab, spec_of

from shoal.cli.cluster_screens import show_down
from shoal.cli.rental_commands import cost_json, show_cost
from shoal.cloud.providers.api import PERMANENT_TOKEN, Offer, RentalOrder
from shoal.cloud.rental import micros
from shoal.cloud.service.costs import CostReport, JobCost, TotalCost, encode
from shoal.errors import LedgerError, UsageError
from shoal.hosts.api import Result
from shoal.spec.rental import Budget
from shoal.verbs.context import Context
from shoal.verbs.cost import COMMAND, CostResult, cost, final_cost
from shoal.verbs.down import DownResult, RentedCost

COSTS = CostReport(
    at=1000.0,
    month="2026-11",
    per_hour=micros("31.92"),
    machines=1,
    today=micros("12.345"),
    total=micros("100.10"),
    nodesets={"burst": micros("100.10")},
    users={"ann": micros("60.05"), "bob": micros("20.03")},
    jobs=(JobCost("7", "ann", "train", micros("60.05")), JobCost("8", "bob", "eval", micros("20.03"))),
    starting=micros("5"),
    idle=micros("15.02"),
)


HOSTS_ONLY = """
cluster: reef
network: wireguard
controller: {provider: gcp, type: e2-standard-2, zone: us-central1-a, usd_hour: 0.5}
nodesets: {lab: {hosts: [n1]}}
providers: {gcp: {key: env:PATH, url: "URL", project: p}}
"""


def world(answer: object, text: str = RENTING) -> World:
    made = lab(text)
    made.hosts["c1"].answers |= {COMMAND[:1]: answer}  # type: ignore[dict-item]
    return made


async def asked(answer: object, month: str | None = None, text: str = RENTING) -> CostResult:
    return await cost(context_of(world(answer, text)), month)


def shown(result: CostResult) -> list[str]:
    out = StringIO()
    show_cost(Console(file=out, width=100), result)
    return [" ".join(line.split()) for line in out.getvalue().splitlines() if line.strip()]


async def test_cost_runs_as_root_on_the_controller_and_includes_the_limits() -> None:
    made = world(encode(COSTS).encode())
    assert await cost(context_of(made)) == CostResult("reef", COSTS, Budget(per_hour=20, per_month=500))
    [call] = made.hosts["c1"].calls
    assert tuple(call.argv) == COMMAND and call.root
    await cost(context_of(made), "2026-10")
    assert made.hosts["c1"].calls[-1].argv[-2:] == ("--month", "2026-10")


@cases(
    "month, text, said",
    *(
        (month, RENTING, f"--month {month} is not a month\n  fix: write it as 2026-11")
        for month in ("2026", "2026-13", "10-2026", "last; rm -rf /")
    ),
    (None, LAB, "cluster reef rents no machines\n  fix: `shoal usage` shows what your own GPUs cost"),
)
async def test_invalid_month_or_cluster_without_rentals_is_rejected(month: str | None, text: str, said: str) -> None:
    assert await error_of(UsageError, asked(b"", month, text)) == said


@cases(
    "answer, said",
    (Result(127, b"", b"sh: not found"), "c1 has no Shoal of its own yet\n  fix: run `shoal up`"),
    (
        Result(1, json.dumps({"error": "the ledger is broken", "fix": "keep a copy"}).encode()),
        "c1: the ledger is broken\n  fix: keep a copy",
    ),
    (
        Result(1, b"", b"Traceback\nImportError: no module"),
        "cannot read the costs on c1: ImportError: no module\n  fix: run `shoal up`",
    ),
    (Result(0, b""), "cannot read the costs on c1: no output\n  fix: run `shoal up`"),
)
async def test_controller_error_is_reported(answer: Result, said: str) -> None:
    assert await error_of(LedgerError, asked(answer)) == said


def test_screen_shows_sums_users_and_jobs() -> None:
    result = CostResult("reef", COSTS, Budget(per_hour=40, per_month=500), {"burst": Budget(per_month=300)})
    assert shown(result) == [
        "reef: 1 machine",
        "of",
        "now, an hour $31.92 $40.00",
        "today (UTC) $12.35",
        "2026-11 $100.10 $500.00",
        "nodeset cost of",
        "burst $100.10 $300.00",
        "user cost",
        "ann $60.05",
        "bob $20.03",
        "(starting) $5.00",
        "(idle) $15.02",
        "job user name cost",
        "7 ann train $60.05",
        "8 bob eval $20.03",
    ]


def test_unknown_price_is_never_shown_as_zero_dollars() -> None:
    odd = CostReport(1.0, "2026-11", 0, 0, 0, 0, unpriced=("burst1",), unattributed="scontrol does not answer")
    assert shown(CostResult("reef", odd))[-2:] == [
        "not included, because the price is unknown: burst1",
        "! cannot be split by user and job: scontrol does not answer",
    ]
    odd = CostReport(1.0, "2026-11", 0, 1, 0, 0, unpriced=("burst1",), unpriced_now=1, unpriced_today=1)
    assert [row for row in shown(CostResult("reef", odd)) if "price unknown" in row] == [
        f"{when} price unknown" for when in ("now, an hour", "today (UTC)", "2026-11")
    ]
    partly = CostReport(1.0, "2026-11", 1_290_000, 2, 0, 5_000_000, unpriced=("burst1",), unpriced_now=1)
    rows = {*shown(CostResult("reef", partly))}
    assert {"now, an hour at least $1.29", "today (UTC) $0.00", "2026-11 at least $5.00"} <= rows


def test_json_amounts_are_in_dollars() -> None:
    found = cost_json(CostResult("reef", COSTS, Budget(per_month=500)))
    assert (found["per_hour"], found["total"], found["idle"]) == (31.92, 100.10, 15.02)
    assert found["jobs"][0] == {"id": "7", "user": "ann", "name": "train", "usd": 60.05}
    assert found["budget"] == {"per_month": 500.0}


async def test_cost_of_rented_hosts_without_rented_nodesets_is_asked_of_the_provider() -> None:
    async with trial(CASES["gcp"]) as it:
        spec = spec_of(HOSTS_ONLY.replace("URL", it.url.partition("/compute")[0]))
        offer = Offer("gcp", "e2-standard-2", "us-central1", "us-central1-a")
        order = RentalOrder("reef", "controller", f"{PERMANENT_TOKEN}1", offer, "ssh-ed25519 AAAA a", permanent=True)
        [outcome] = await it.renter.create([order])
        assert outcome.ok, outcome
        result = await cost(Context(spec))
    assert (result.costs.machines, result.costs.per_hour) == (1, micros("0.5"))
    assert "1 machine" in shown(result)[0]


# The end of a cluster


async def test_final_cost_is_the_sum_of_the_ledger() -> None:
    made = world(Result(0, b'{"nodes": 350000, "hosts": 1020000, "unpriced": ["a1"]}', b""))
    assert await final_cost(context_of(made)) == TotalCost(350000, 1020000, ("a1",))
    [call] = [call for call in made.hosts["c1"].calls if call.argv[:1] == COMMAND[:1]]
    assert tuple(call.argv) == (*COMMAND, "--total") and call.root


@cases("answer", b"", b"{}", b'{"nodes": "x"}', b"no ledger")
async def test_final_cost_that_cannot_be_read_is_an_error(answer: bytes) -> None:
    made = world(Result(0, answer, b""))
    with pytest.raises(LedgerError, match="cannot read the costs on c1"):
        await final_cost(context_of(made))


@cases(
    "spent, line",
    (RentedCost(1.37, 1.02, 0.35), "what was rented cost $1.37: hosts $1.02, nodes $0.35"),
    (RentedCost(0.0, 0.0, 0.0), "what was rented cost $0.00"),
    (
        RentedCost(None, 0.0, 0.35, ("a1", "a2")),
        "what was rented cost at least $0.35: nodes $0.35; a[1-2]: price unknown",
    ),
    (RentedCost(None, 0.0, 0.0, ("a1",)), "what was rented: a1: price unknown"),
)
def test_down_prints_what_was_rented(spent: RentedCost, line: str) -> None:
    out = StringIO()
    show_down(Console(file=out, width=120), DownResult("reef", released=("c1",), cost=spent))
    assert out.getvalue().splitlines()[0] == line
