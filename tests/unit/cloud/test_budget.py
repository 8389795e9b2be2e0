"""Budgets are hard limits: open orders count, a gang counts whole, and an offer without a price is not ordered."""

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.support.cases import cases
from tests.unit.cloud.rentals import rental

from shoal.cloud.providers.api import Billing, Offer
from shoal.cloud.rental import Rental, cost, cost_between, cost_of_time, dollars, format_dollars, micros
from shoal.cloud.service.budget import WARNING_LEAD_S, Purchase, exhausted_nodesets, ledger_start, refusal
from shoal.contract import GRACE_S
from shoal.spec.rental import Budget

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC).timestamp()
HOUR = 3600.0
TEN = Offer("lambda", "big", "us-west-1", usd_hour=10.0)
LATE = datetime(2026, 11, 15, 23, 45, tzinfo=UTC).timestamp()
LAST_HOUR = datetime(2026, 11, 30, 23, 30, tzinfo=UTC).timestamp()
BY_HOUR = Billing(step=3600)


def made(token: str, hours_ago: float, nodeset: str = "burst", usd: float = 10.0, **values: Any) -> Rental:
    begun = NOW - hours_ago * HOUR
    one = rental(token, offer=TEN, state="made", id=token, usd_hour=usd, intended_at=begun, made_at=begun)
    return replace(one, nodeset=nodeset, **values)


def asked(whole: Budget | None, *rentals: Rental, now: float = NOW, **values: Any) -> str | None:
    wish = replace(Purchase("burst", TEN, 1), **values)
    return refusal(wish, whole, {}, rentals, now)


def test_no_order_is_rejected_without_a_budget() -> None:
    assert asked(None, made("a", 1000), count=1000) is None
    assert asked(Budget(), made("a", 1000), count=1000) is None
    assert asked(None, offer=replace(TEN, usd_hour=None)) is None


def test_hourly_limit_can_be_reached_but_not_exceeded() -> None:
    assert asked(Budget(per_hour=20), made("a", 1)) is None
    assert asked(Budget(per_hour=19.99), made("a", 1)) == (
        "the budget of $19.99 an hour: $10.00 is in use, and big costs $10.00 an hour"
        " (raise `budget` and run `shoal up`, or wait until others end)"
    )


def test_machine_being_released_counts_until_its_billing_ends() -> None:
    leaving = made("a", 1, state="releasing")
    assert asked(Budget(per_hour=10), leaving) is not None
    assert asked(Budget(per_hour=10), replace(leaving, billed_until=NOW - 1)) is None
    assert asked(Budget(per_hour=10), replace(leaving, state="gone", gone_at=NOW - 1)) is None
    assert asked(Budget(per_hour=10), replace(leaving, state="failed", made_at=None, gone_at=NOW - 1)) is None


def test_gang_counts_as_a_whole() -> None:
    assert asked(Budget(per_hour=80), count=8) is None
    assert asked(Budget(per_hour=79), count=8) == (
        "the budget of $79.00 an hour: $0.00 is in use, and 8 × big costs $80.00 an hour"
        " (raise `budget` and run `shoal up`, or wait until others end)"
    )


@cases("budget", Budget(per_hour=1), Budget(per_day=1000), Budget(per_month=1000))
def test_offer_without_a_price_is_rejected_under_a_budget(budget: Budget) -> None:
    said = (
        "the price of big at lambda us-west-1 is unknown, so no budget can cover it"
        " (run `shoal up` if `shoal offers` has its price; else rent another type, or remove the budget)"
    )
    assert asked(budget, offer=replace(TEN, usd_hour=None)) == said
    own = refusal(Purchase("burst", replace(TEN, usd_hour=None), 1), None, {"burst": budget}, [], NOW)
    assert own == said


def test_daily_limit_reserves_an_hour_for_running_machines() -> None:
    # $40 is spent today, an hour of both costs $20.
    assert asked(Budget(per_day=60), made("a", 4)) is None
    assert asked(Budget(per_day=59.99), made("a", 4)) == (
        "the budget of $59.99 a day: $40.00 is spent, and an hour of what runs and of big costs $20.00"
        " (raise `budget` and run `shoal up`, or wait until 16 November 00:00 UTC)"
    )


def test_monthly_limit_shows_when_the_next_month_starts() -> None:
    assert asked(Budget(per_month=60), made("a", 4)) is None
    said = asked(Budget(per_month=59), made("a", 4))
    assert said is not None and said.endswith("or wait until 1 December 00:00 UTC)")
    assert "of $59.00 a month" in said


def test_earlier_days_and_months_do_not_count() -> None:
    yesterday = made("a", 24, state="gone", gone_at=NOW - 13 * HOUR)  # ended at 23:00
    assert asked(Budget(per_day=10), yesterday) is None
    assert asked(Budget(per_month=119.99), yesterday) is not None  # 11 hours, and one to come
    assert asked(Budget(per_month=120), yesterday) is None
    october = made("a", 24 * 20, state="gone", gone_at=NOW - 24 * 15 * HOUR)
    assert asked(Budget(per_month=10), october) is None


def test_month_of_the_ledger_starts_with_the_month() -> None:
    assert ledger_start(LAST_HOUR) == datetime(2026, 11, 1, tzinfo=UTC).timestamp()
    assert ledger_start(LAST_HOUR + HOUR) == datetime(2026, 12, 1, tzinfo=UTC).timestamp()


@cases(
    "limit, enough, rentals, options",
    ("per_hour", 20, [rental("a", offer=TEN, usd_hour=10.0, intended_at=NOW)], {}),  # an order that is not filled yet
    ("per_day", 140, [made("a", 24)], {}),  # over midnight: 12 hours today, and two to come
    ("per_day", 2.5, [], {"now": LATE}),  # a quarter of an hour until midnight
    ("per_month", 10, [], {"now": LATE}),
    ("per_month", 5, [], {"now": LAST_HOUR}),
    ("per_day", 10, [], {"now": LATE, "billing": BY_HOUR}),
    ("per_day", 30, [made("a", 0.5, billing=BY_HOUR)], {}),  # one hour is billed, the next begins in 30 minutes
    ("per_day", 50, [made("a", 4, state="releasing")], {}),  # which needs no reserve
)
def test_limit_can_be_reached_but_not_exceeded(
    limit: str, enough: float, rentals: list[Rental], options: dict[str, Any]
) -> None:
    assert asked(Budget(**{limit: enough}), *rentals, **options) is None
    assert asked(Budget(**{limit: enough - 0.01}), *rentals, **options) is not None


def test_each_nodeset_has_its_own_limit_and_machines() -> None:
    mine, other = made("a", 1, "burst"), made("b", 1, "spot")
    own = {"burst": Budget(per_hour=20), "spot": Budget(per_hour=1)}
    assert refusal(Purchase("burst", TEN, 1), None, own, [mine, other], NOW) is None
    said = refusal(Purchase("burst", TEN, 2), None, own, [mine, other], NOW)
    assert said is not None
    assert said.startswith("the budget of nodeset burst of $20.00 an hour: $10.00 is in use, and 2 × big costs $20.00")
    assert refusal(Purchase("free", TEN, 9), None, own, [mine, other], NOW) is None


def test_cluster_budget_counts_machines_of_all_nodesets() -> None:
    mine, other = made("a", 1, "burst"), made("b", 1, "spot")
    own = {"burst": Budget(per_hour=1000)}
    said = refusal(Purchase("burst", TEN, 1), Budget(per_hour=25), own, [mine, other], NOW)
    assert said is not None and said.startswith("the budget of $25.00 an hour: $20.00 is in use")


def test_budget_with_refuse_ends_no_nodeset() -> None:
    assert exhausted_nodesets(Budget(per_day=1), {"burst": Budget(per_day=1)}, [made("a", 4)], NOW) == {}


def test_budget_with_end_ends_its_nodesets_before_the_limit() -> None:
    limit = dollars(micros(40) + cost_of_time(micros(10), int(WARNING_LEAD_S) + 4))
    budget = Budget(per_day=limit, then="end")
    assert exhausted_nodesets(budget, {}, [made("a", 4)], NOW) == {}
    later = NOW + 4
    assert exhausted_nodesets(budget, {}, [made("a", 4)], later) == {
        "burst": f"the budget of ${limit:.2f} a day is used up: $40.01 is spent"
    }
    assert exhausted_nodesets(budget, {}, [made("a", 4)], later, ahead=0) == {}


def test_warning_lead_covers_the_job_grace_and_deletes() -> None:
    assert WARNING_LEAD_S == GRACE_S + 60


def test_only_nodesets_with_machines_end() -> None:
    budget = Budget(per_month=10, then="end")
    rentals = [made("a", 1, "burst"), made("b", 1, "spot"), made("c", 2, "old", state="gone", gone_at=NOW - 1)]
    assert set(exhausted_nodesets(budget, {}, rentals, NOW)) == {"burst", "spot"}
    assert exhausted_nodesets(None, {"burst": budget, "old": budget}, rentals, NOW) == {
        "burst": "the budget of nodeset burst of $10.00 a month is used up: $10.00 is spent"
    }


# What one rental costs.


@cases(
    "seconds, billing, usd",
    (3600, Billing(), "10"),
    (1, Billing(), "0.002778"),
    (0.2, Billing(), "0.002778"),
    (61, Billing(60), "0.333333"),
    (60, Billing(60), "0.166667"),
    (1, Billing(3600), "10"),
    (3601, Billing(3600), "20"),
    (5, Billing(1, 60), "0.166667"),
    (61, Billing(1, 60), "0.169444"),
)
def test_cost_follows_the_billing_rule_of_the_provider(seconds: float, billing: Billing, usd: str) -> None:
    one = made("a", 0, billing=billing)
    assert cost(one, NOW + seconds) == micros(usd)


def test_billing_runs_between_the_times_of_the_provider() -> None:
    one = made("a", 2, billed_from=NOW - HOUR, billed_until=NOW - HOUR / 2, gone_at=NOW, state="gone")
    assert cost(one, NOW) == micros(5)
    assert cost(replace(one, billed_until=None), NOW + HOUR) == micros(10)
    assert cost(replace(one, billed_from=None, billed_until=None), NOW + HOUR) == micros(20)


def test_order_costs_nothing_but_counts_for_the_budget_from_its_submission() -> None:
    order = rental("a", offer=TEN, usd_hour=10.0, intended_at=NOW - HOUR)
    assert cost(order, NOW) == 0
    assert cost(order, NOW, whole=True) == micros(10)
    assert cost(replace(order, state="failed", gone_at=NOW), NOW, whole=True) == 0
    assert cost(made("a", 1, usd_hour=None), NOW) == 0


def test_machine_that_never_started_is_free_where_billing_starts_at_boot() -> None:
    never = made("a", 1, billing=Billing(60, from_up=True))
    assert cost(never, NOW) == 0
    assert cost(never, NOW, whole=True) == micros(10)  # it may be up: it was not listed yet
    assert cost(replace(never, state="gone", gone_at=NOW), NOW, whole=True) == 0
    assert cost(replace(never, billed_from=NOW - 60), NOW) == micros("0.166667")
    assert cost(replace(never, joined_at=NOW - 60), NOW) == micros(10)  # it was up, and the ledger has no time


@given(
    price=st.integers(0, 100_000_000),
    cuts=st.lists(st.floats(0, 1e6), max_size=8),
    billing=st.builds(Billing, st.sampled_from([1, 60, 3600]), st.sampled_from([0, 60])),
    length=st.floats(0, 1e6),
)
def test_partial_costs_add_up_to_the_total(price: int, cuts: list[float], billing: Billing, length: float) -> None:
    one = made("a", 0, usd=dollars(price), billing=billing, state="gone", gone_at=NOW + length)
    times = [NOW - 1, *sorted(NOW + cut for cut in cuts), NOW + 2e6]
    parts = [cost_between(one, begin, end) for begin, end in pairwise(times)]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == cost(one, NOW + 2e6) == cost_of_time(price, billing.seconds(NOW + length - NOW))


@cases(
    "amount, text",
    (0, "$0.00"),
    (4999, "$0.00"),
    (5000, "$0.01"),
    (31_920_000, "$31.92"),
    (1_234_567_890_000, "$1,234,567.89"),
)
def test_dollars_are_formatted_to_the_cent(amount: int, text: str) -> None:
    assert format_dollars(amount) == text
    assert format_dollars(-31_920_000) == "-$31.92"


@given(st.decimals(0, 100_000, places=6))
def test_price_round_trips_through_micros(price: Any) -> None:
    assert micros(dollars(micros(price))) == micros(price) == int(price * 1_000_000)
