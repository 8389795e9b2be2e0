"""Which offers are tried in which order, how long a stockout is remembered, and what the job's owner reads."""

from dataclasses import replace
from typing import Any

from tests.support.cases import cases
from tests.unit.cloud.scene import rented_set

from shoal.cloud.providers.api import FailureKind, Offer, RequestOutcome, Scope
from shoal.cloud.rental import OrderBlock
from shoal.cloud.service.offers import MAX_OFFERS, block_for, candidates, trying_text, why_none
from shoal.spec.rental import OfferChoice, RentedSet

NOW = 1_763_208_000.0  # 12:00 UTC
H100 = Offer("lambda", "gpu_8x_h100", "us-west-1", usd_hour=31.92)
A3 = Offer("gcp", "a3-highgpu-8g", "us-central1", "us-central1-b", usd_hour=87.83)
SPOT = replace(A3, market="spot", usd_hour=26.0)


def choice(provider: str, type: str | None = None, **values: Any) -> OfferChoice:
    return OfferChoice(provider=provider, type=type, **values)


def nodeset(*choices: OfferChoice, prefer: Any = "listed", max_price: float | None = None) -> RentedSet:
    return rented_set("burst", 8, *choices, prefer=prefer, max_price=max_price)


LAMBDA, GCP, GCP_SPOT = choice("lambda"), choice("gcp"), choice("gcp", market="spot")
BOTH = ((LAMBDA, [H100]), (GCP, [A3]), (GCP_SPOT, [SPOT]))


def found(*listed: Any, blocks: Any = (), **values: Any) -> list[Offer]:
    return candidates(nodeset(*(one for one, _ in listed), **values), listed, blocks)


def test_offers_are_tried_in_file_order() -> None:
    assert found(*BOTH) == [H100, A3, SPOT]
    assert found(*reversed(BOTH)) == [SPOT, A3, H100]


def test_prefer_cheapest_sorts_offers_by_price() -> None:
    assert found(*BOTH, prefer="cheapest") == [SPOT, H100, A3]


def test_cheapest_region_of_a_line_is_first_and_unpriced_last() -> None:
    east, west, south = (replace(H100, region=f"us-{name}-1") for name in ("east", "west", "south"))
    dear, unknown = replace(east, usd_hour=40.0), replace(south, usd_hour=None)
    assert found((LAMBDA, [unknown, dear, west])) == [west, dear, unknown]
    assert found((LAMBDA, [unknown, dear, west]), prefer="cheapest") == [west, dear, unknown]


def test_confirmed_availability_is_first_at_equal_price() -> None:
    unknown = replace(H100, region="a", available="unknown")
    low, yes = replace(H100, region="b", available="low"), replace(H100, region="c", available="yes")
    assert found((LAMBDA, [unknown, low, yes])) == [yes, low, unknown]


def test_unavailable_offer_is_last_and_needs_a_named_region() -> None:
    out = replace(H100, available="no", usd_hour=1.0)
    assert found((LAMBDA, [out]), (GCP, [A3])) == [A3]
    named = choice("lambda", region="us-west-1")
    assert found((named, [out]), (GCP, [A3]), prefer="cheapest") == [A3, out]
    assert found((named, [out]), (GCP, [A3])) == [A3, out]


def test_offer_named_by_two_lines_is_tried_once() -> None:
    assert found((LAMBDA, [H100]), (choice("lambda", "gpu_8x_h100"), [H100])) == [H100]


def test_only_offers_matching_the_line_are_tried() -> None:
    other = replace(H100, type="gpu_1x_a10")
    east = replace(H100, region="us-east-1")
    line = choice("lambda", "gpu_8x_h100", region="us-west-1")
    assert found((line, [other, east, H100, replace(H100, market="spot"), A3])) == [H100]
    assert found((choice("gcp", zone="us-central1-c"), [A3])) == []


def test_offers_above_max_price_or_without_a_price_are_skipped() -> None:
    assert found(*BOTH, max_price=31.92) == [H100, SPOT]
    assert found((LAMBDA, [replace(H100, usd_hour=None)]), max_price=100) == []


def test_blocked_offers_are_skipped() -> None:
    blocks = [OrderBlock("lambda"), OrderBlock("gcp", "a3-highgpu-8g", "us-central1-b", "spot")]
    assert found(*BOTH, blocks=blocks) == [A3]


def test_at_most_25_offers_are_tried() -> None:
    assert MAX_OFFERS == 25
    many = [replace(H100, region=f"region-{number:02}") for number in range(40)]
    assert found((LAMBDA, many)) == many[:25]


FREE = ((FailureKind.RATE, "provider"), (FailureKind.TRANSIENT, "offer"), (FailureKind.AMBIGUOUS, "offer"))
ZONE = ("gcp", A3.type, "us-central1-b", "on-demand")


@cases(
    "kind, scope, where, seconds, why",
    (FailureKind.CAPACITY, "offer", ZONE, 600, "gcp us-central1-b out of a3-highgpu-8g"),
    (FailureKind.CAPACITY, "zone", ZONE, 600, "gcp us-central1-b out of a3-highgpu-8g"),
    (
        FailureKind.CAPACITY,
        "region",
        ("gcp", A3.type, "us-central1", "on-demand"),
        600,
        "gcp us-central1 out of a3-highgpu-8g",
    ),
    (FailureKind.CAPACITY, "provider", ("gcp", A3.type, "", "on-demand"), 600, "gcp out of a3-highgpu-8g"),
    (
        *(FailureKind.QUOTA, "region", ("gcp", A3.type, "us-central1", ""), 3600),
        "gcp us-central1 has no more a3-highgpu-8g for us: our quota is used up",
    ),
    (FailureKind.QUOTA, "provider", ("gcp",), 3600, "gcp has no more for us: our quota is used up"),
    (
        *(FailureKind.BALANCE, "provider", ("gcp",), 3600),
        "gcp has no money left of ours (top it up; it is tried again every hour)",
    ),
    (*(FailureKind.AUTH, "provider", ("gcp",), None), "gcp does not accept our key (replace it, then run `shoal up`)"),
    (
        *(FailureKind.INVALID, "offer", ZONE, 3600),
        "gcp us-central1-b does not take an order for a3-highgpu-8g: no such image",
    ),
    *((kind, scope, (), 0, "") for kind, scope in FREE),
)
def test_each_failure_kind_blocks_its_scope_for_its_time(
    kind: FailureKind, scope: Scope, where: tuple[str, ...], seconds: int | None, why: str
) -> None:
    said = "no such image" if kind is FailureKind.INVALID else "their own words"
    expected = OrderBlock(*where, until=NOW + seconds if seconds else None, why=why) if where else None  # type: ignore[misc]
    assert block_for(A3, RequestOutcome(failure=kind, scope=scope, message=said), NOW) == expected


def test_spot_stockout_leaves_on_demand_open() -> None:
    out = block_for(SPOT, RequestOutcome(failure=FailureKind.CAPACITY), NOW)
    assert out is not None
    assert out.why == "gcp us-central1-b out of a3-highgpu-8g spot"
    assert out.covers(SPOT) and not out.covers(A3)


def test_quota_block_covers_both_markets_and_all_zones() -> None:
    full = block_for(SPOT, RequestOutcome(failure=FailureKind.QUOTA, scope="zone"), NOW)
    assert full is not None
    assert full.covers(A3) and full.covers(replace(A3, zone="us-central1-c"))
    assert not full.covers(replace(A3, region="us-east1", zone="us-east1-b"))


def test_job_comment_names_the_stockout_and_the_next_offer() -> None:
    out = block_for(H100, RequestOutcome(failure=FailureKind.CAPACITY), NOW)
    assert out is not None
    assert trying_text(A3, out.why) == "lambda us-west-1 out of gpu_8x_h100, trying gcp us-central1-b"
    assert trying_text(SPOT) == "trying gcp us-central1-b spot"


def test_job_comment_names_all_reasons_and_the_next_try() -> None:
    first = block_for(H100, RequestOutcome(failure=FailureKind.CAPACITY), NOW)
    second = block_for(A3, RequestOutcome(failure=FailureKind.QUOTA, scope="region"), NOW)
    assert first is not None and second is not None
    listed = ((LAMBDA, [H100]), (GCP, [A3]))
    assert why_none(nodeset(LAMBDA, GCP), listed, [first, second], NOW) == (
        "lambda us-west-1 out of gpu_8x_h100; gcp us-central1 has no more a3-highgpu-8g for us: our quota is used up;"
        " next try at 12:10 UTC",
        NOW + 600,
    )


def test_block_that_needs_the_operator_has_no_next_try() -> None:
    closed = block_for(H100, RequestOutcome(failure=FailureKind.AUTH), NOW)
    assert closed is not None
    said = ("lambda does not accept our key (replace it, then run `shoal up`)", None)
    assert why_none(nodeset(LAMBDA), ((LAMBDA, [H100]),), [closed], NOW) == said
    # It also stays where the provider lists nothing, as for a key without access.
    assert why_none(nodeset(LAMBDA), ((LAMBDA, []),), [closed], NOW) == said


def test_block_of_another_region_is_not_a_reason() -> None:
    line = choice("lambda", "gpu_8x_h100", region="us-east-1")
    out = block_for(H100, RequestOutcome(failure=FailureKind.CAPACITY), NOW)
    assert out is not None
    said, again = why_none(nodeset(line), ((line, []),), [out], NOW)
    assert said == "lambda us-east-1 gpu_8x_h100 offers nothing now; next try at 12:10 UTC"
    assert again == NOW + 600


@cases(
    "offer, max_price, said",
    (H100, 20.0, "lambda costs $31.92 an hour, and max_price is $20.00; next try at 12:10 UTC"),
    (replace(H100, usd_hour=None), 20.0, "lambda gives no price, and max_price is $20.00; next try at 12:10 UTC"),
    (replace(H100, available="no"), None, "lambda has none left; next try at 12:10 UTC"),
)
def test_price_limit_and_stockout_have_different_reasons(offer: Offer, max_price: float | None, said: str) -> None:
    assert why_none(nodeset(LAMBDA, max_price=max_price), ((LAMBDA, [offer]),), [], NOW)[0] == said


def test_long_reason_list_is_shortened() -> None:
    lines = [choice("lambda", region=f"us-{number}") for number in range(5)]
    said, _ = why_none(nodeset(*lines), [(line, []) for line in lines], [], NOW)
    assert said == (
        "lambda us-0 offers nothing now; lambda us-1 offers nothing now; lambda us-2 offers nothing now and 2 more;"
        " next try at 12:10 UTC"
    )
