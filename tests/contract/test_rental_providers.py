"""What every rental provider guarantees, over real sockets against its simulator; rental_providers.py has the table."""

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.contract.recorded_errors import RECORDED, UNREADABLE
from tests.contract.rental_providers import (
    BAD_ANSWERS,
    CASES,
    CLUSTER,
    JSON_ANSWERS,
    KEY,
    PUBLIC_KEY,
    REFUSALS,
    Case,
    Trial,
    http,
    renting,
    saying,
    trial,
)

from shoal.cloud.providers.api import FailureKind, Query
from shoal.errors import ProviderError


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
async def it(case: Case) -> AsyncIterator[Trial]:
    async with trial(case) as made:
        yield made


# Offers


async def test_offer_has_region_shape_and_price(it: Trial) -> None:
    wanted = it.case.offer
    [found] = [
        one
        for one in await it.renter.offers(Query(types=(wanted.type,), market=wanted.market))
        if one.place == wanted.place
    ]
    assert (found.provider, found.type, found.market) == ("acme", wanted.type, wanted.market)
    assert found.usd_hour == pytest.approx(wanted.usd_hour)
    assert found.cpus > 0
    assert found.memory_gb > 0


async def test_only_matching_offers_are_returned(it: Trial) -> None:
    wanted = it.case.offer
    every = await it.renter.offers(Query())
    most = max(one.gpus for one in every)
    assert min(one.gpus for one in every) < most
    assert {one.gpus for one in await it.renter.offers(Query(gpus=most))} == {most}
    assert {one.type for one in await it.renter.offers(Query(types=(wanted.type,)))} == {wanted.type}
    assert {one.region for one in await it.renter.offers(Query(regions=(wanted.region,)))} == {wanted.region}
    named = await it.renter.offers(Query(gpu="h100"))
    assert named
    assert all("h100" in one.gpu.lower() for one in named)
    assert await it.renter.offers(Query(gpu="no such gpu")) == []


# A machine's life


async def test_machine_is_ordered_boots_and_is_deleted(it: Trial) -> None:
    outcome = await it.create()
    assert outcome.ok, outcome
    assert outcome.id
    [found] = await it.listed()
    assert (found.id, found.cluster, found.node, found.token) == (outcome.id, CLUSTER, "gpu1", "t0ken1")
    assert found.state == "pending"
    assert (found.type, found.region) == (it.case.offer.type, it.case.offer.region)

    it.boot()
    [found] = await it.listed()
    assert found.state == "up"
    assert found.host
    assert found.user == it.renter.abilities.user

    [deleted] = await it.renter.delete([found])
    assert deleted.ok, deleted
    assert [one.state for one in await it.listed()] in ([], ["stopping"])
    it.clock.now += it.market.profile.stop_s + 1
    assert await it.listed() == []
    assert [(one["id"], one["ended"] is None) for one in it.market.bill()] == [(outcome.id, False)]


async def test_provider_reports_creation_time_and_price(it: Trial) -> None:
    outcome = await it.create()
    it.boot()
    [found] = await it.listed()
    told = outcome.usd_hour if it.case.price_from == "create" else found.usd_hour
    if it.case.price_from != "nowhere":
        assert told == pytest.approx(it.case.offer.usd_hour)
    assert found.created is not None


async def test_simulator_bills_by_the_rule_that_costs_are_computed_with(it: Trial) -> None:
    assert it.market.profile.billing == it.renter.abilities.billing


async def test_cluster_lists_only_its_own_machines(it: Trial) -> None:
    await it.create("gpu1", "t1")
    await it.create("gpu1", "t2", cluster="lagoon")
    assert [one.token for one in await it.listed()] == ["t1"]
    assert [one.token for one in await it.listed("lagoon")] == ["t2"]
    assert await it.listed("ree") == []


async def test_every_machine_is_listed_at_any_number(it: Trial) -> None:
    order = await it.order()
    many = max(it.market.types[order.offer.type].places.values())
    taken = 0
    while taken < min(many, 60):
        now = min(it.renter.abilities.at_once, min(many, 60) - taken)
        names = [f"gpu{count}" for count in range(taken, taken + now)]
        made = await it.renter.create([replace(order, node=name, token=f"t-{name}") for name in names])
        assert all(one.ok for one in made), made
        taken += now
    assert len({one.id for one in await it.listed()}) == taken


async def test_machines_ordered_together_have_outcomes_in_order(it: Trial) -> None:
    order = await it.order()
    count = min(3, it.renter.abilities.at_once)
    orders = [replace(order, node=f"gpu{n}", token=f"tok-{n}") for n in range(count)]
    outcomes = await it.renter.create(orders)
    assert [one.ok for one in outcomes] == [True] * count
    by_id = {one.id: one.token for one in await it.listed()}
    assert [by_id[one.id] for one in outcomes] == [order.token for order in orders]


async def test_deleting_a_missing_machine_succeeds(it: Trial) -> None:
    await it.create()
    it.boot()
    found = await it.listed()
    assert [one.ok for one in await it.renter.delete(found)] == [True]
    it.clock.now += it.market.profile.stop_s + 1
    assert await it.listed() == []
    assert [one.ok for one in await it.renter.delete(found)] == [True]
    assert await it.renter.delete([]) == []


async def test_missing_machine_does_not_stop_other_deletes(it: Trial) -> None:
    await it.create("gpu1", "t1")
    await it.create("gpu2", "t2")
    it.boot()
    found = await it.listed()
    it.market.delete(found[0].id)
    it.clock.now += it.market.profile.stop_s + 1
    assert [one.ok for one in await it.renter.delete(found)] == [True, True]
    it.clock.now += it.market.profile.stop_s + 1
    assert await it.listed() == []


async def test_key_is_registered_once(it: Trial) -> None:
    first = await it.renter.ensure_key(CLUSTER, PUBLIC_KEY)
    notes = repr(it.market.notes)
    assert await it.renter.ensure_key(CLUSTER, PUBLIC_KEY + " another comment") == first
    assert repr(it.market.notes) == notes


# Faults


@pytest.mark.parametrize("fault", REFUSALS)
async def test_rejected_order_has_a_reason_and_creates_nothing(it: Trial, fault: str) -> None:
    order = await it.order()
    it.fault(fault)
    [outcome] = await it.renter.create([order])
    assert outcome.failure is REFUSALS[fault], outcome
    assert outcome.message
    assert it.made == 0
    if outcome.failure in (FailureKind.AUTH, FailureKind.BALANCE):
        assert outcome.scope == "provider"
    if outcome.failure is FailureKind.RATE:
        assert outcome.retry_after > 0
    [again] = await it.renter.create([replace(order, token="t0ken2")])
    assert again.ok, again


async def test_machine_created_before_an_error_is_listed_by_its_token(it: Trial) -> None:
    order = await it.order()
    it.fault("error-after-create")
    [outcome] = await it.renter.create([order])
    assert outcome.failure is FailureKind.AMBIGUOUS, outcome
    assert it.made == 1
    assert [one.token for one in await it.listed()] == [order.token]


async def test_error_without_a_machine_lists_nothing(it: Trial) -> None:
    order = await it.order()
    it.fault("error-before-create")
    [outcome] = await it.renter.create([order])
    assert outcome.failure in (FailureKind.AMBIGUOUS, FailureKind.TRANSIENT), outcome
    assert it.made == 0
    assert await it.listed() == []


async def test_repeated_order_creates_nothing_twice_where_the_provider_is_idempotent(it: Trial) -> None:
    if it.renter.abilities.idempotent == "none":
        pytest.skip("this provider promises nothing")
    order = await it.order()
    it.fault("error-after-create")
    await it.renter.create([order])
    [outcome] = await it.renter.create([order])
    assert outcome.ok or outcome.failure is FailureKind.CONFLICT
    assert it.made == 1


async def test_failed_list_is_an_error_and_never_empty(it: Trial) -> None:
    await it.create()
    it.fault("list-fails")
    with pytest.raises(ProviderError, match=r"^acme: "):
        await it.listed()
    assert len(await it.listed()) == 1


@pytest.mark.parametrize("fault", ["auth", "rate"])
async def test_rejected_read_is_an_error(it: Trial, fault: str) -> None:
    it.fault(fault)
    with pytest.raises(ProviderError, match=r"^acme: "):
        await it.listed()
    assert await it.listed() == []


async def test_rejected_delete_is_an_outcome_and_can_be_repeated(it: Trial) -> None:
    await it.create()
    it.boot()
    found = await it.listed()
    it.fault("rate")
    [outcome] = await it.renter.delete(found)
    assert outcome.failure is FailureKind.RATE
    assert (await it.renter.delete(found))[0].ok


async def test_list_can_lag(it: Trial) -> None:
    it.fault("lagging-list", seconds=40)
    assert (await it.create()).ok
    assert await it.listed() == []
    it.clock.now += 41
    assert [one.token for one in await it.listed()] == ["t0ken1"]


async def test_slow_boot_stays_pending(it: Trial) -> None:
    it.fault("slow-boot", seconds=500)
    await it.create()
    it.boot()
    assert [one.state for one in await it.listed()] == ["pending"]
    it.clock.now += 500
    assert [one.state for one in await it.listed()] == ["up"]


async def test_dead_machine_is_not_listed_as_up(it: Trial) -> None:
    it.fault("dies", seconds=10)
    await it.create()
    it.boot()
    assert [one.state for one in await it.listed()] == ["up"]
    it.clock.now += 11
    assert [one.state for one in await it.listed()] == [it.case.dead_state]


async def test_preempted_machine_disappears(it: Trial) -> None:
    it.fault("preempt", seconds=10)
    await it.create()
    it.boot()
    await it.listed()
    it.clock.now += 11
    noticed = all(one.ending or one.state != "up" for one in await it.listed())
    assert noticed or it.renter.abilities.notice_url, "only the machine itself reads it"
    it.clock.now += max(it.market.profile.notice_s, it.renter.abilities.notice_s)
    await it.listed()
    it.clock.now += it.market.profile.stop_s + 1
    assert await it.listed() == []
    assert [one["ended"] is None for one in it.market.bill()] == [False]


async def test_changed_price_is_reported(it: Trial) -> None:
    if it.case.price_from == "nowhere":
        pytest.skip("the API tells no prices")
    it.fault("price-change")
    outcome = await it.create()
    it.boot()
    [found] = await it.listed()
    told = outcome.usd_hour if it.case.price_from == "create" else found.usd_hour
    assert told == pytest.approx(2 * (it.case.offer.usd_hour or 0))


async def test_price_of_zero_is_unknown(it: Trial) -> None:
    it.simulation.rewrite = lambda line, data: _priced_zero(data, it.case.prices)
    [outcome] = await it.renter.create([replace(await it.order(), offer=replace(it.case.offer, usd_hour=None))])
    it.boot()
    [found] = await it.listed()
    assert (outcome.usd_hour, found.usd_hour) == (None, None)
    offers = await it.renter.offers(Query())
    assert offers
    for offer in offers:
        assert offer.usd_hour is None or (offer.usd_hour > 0 and offer.as_of), offer


async def test_taken_name_is_a_conflict_or_a_second_machine_with_the_token(it: Trial) -> None:
    it.fault("duplicate-name")
    outcome = await it.create()
    found = await it.listed()
    if it.market.profile.unique_names:
        assert outcome.failure is FailureKind.CONFLICT
        assert found == []
    else:
        assert outcome.ok
        assert [one.token for one in found] == ["t0ken1", "t0ken1"]
        assert len({one.id for one in found}) == 2


async def test_invalid_key_is_rejected_and_never_shown(it: Trial) -> None:
    it.simulation.key = it.case.secret
    assert await it.listed() == []
    async with renting(it.case, it.url, secret=it.case.secret.replace(KEY, "sk-wrong-secret-value")) as other:
        with pytest.raises(ProviderError) as caught:
            await other.instances(CLUSTER)
        assert "sk-wrong" not in str(caught.value)
        assert "sk-wrong" not in repr(vars(other))
        [outcome] = await other.create([await it.order()])
        assert (outcome.failure, outcome.scope) == (FailureKind.AUTH, "provider")


async def test_provider_rate_limit_is_enforced_and_reported(case: Case) -> None:
    async with trial(case, limited=True) as it:
        limits = it.simulation.simulator.limits()
        if not limits:
            pytest.skip("no limit is known")
        failures = set()
        for count in range(400):
            try:
                await it.listed()
            except ProviderError as error:
                failures.add(getattr(error, "failure", None))
                assert count > 0
                break
        assert failures == {FailureKind.RATE}


# Answers that are none


@pytest.mark.parametrize("answer", sorted(BAD_ANSWERS))
async def test_invalid_answer_to_a_read_is_an_error(case: Case, answer: str) -> None:
    async with saying(BAD_ANSWERS[answer]) as url, renting(case, url) as bad:
        asked = [lambda: bad.instances(CLUSTER), lambda: bad.offers(Query())]
        asked += [lambda: bad.ensure_key(CLUSTER, PUBLIC_KEY)] if "ensure_key" in case.required else []
        for ask in asked:
            with pytest.raises(ProviderError, match=r"^acme: ") as caught:
                await ask()
            assert "s3cret-of-theirs" not in str(caught.value)
            assert KEY not in str(caught.value)


@pytest.mark.parametrize("answer", sorted(set(BAD_ANSWERS) - {"redirect"}))
async def test_invalid_answer_to_an_order_is_ambiguous(it: Trial, answer: str) -> None:
    if not it.case.http:
        pytest.skip("an answer of gRPC is whole or an error")
    order = await it.order()
    creating = it.simulation.simulator.creating
    async with saying(BAD_ANSWERS[answer], creating, it.url) as url, renting(it.case, url) as bad:
        [outcome] = await bad.create([order])
    assert outcome.failure is FailureKind.AMBIGUOUS, outcome
    assert outcome.message.startswith("acme: ")


@pytest.mark.parametrize("answer", sorted(BAD_ANSWERS))
async def test_invalid_answer_to_a_delete_is_an_outcome_and_the_machine_stays_listed(it: Trial, answer: str) -> None:
    await it.create()
    it.boot()
    found = await it.listed()
    async with saying(BAD_ANSWERS[answer]) as url, renting(it.case, url) as bad:
        [outcome] = await bad.delete(found)
    assert outcome.ok or outcome.message.startswith("acme: "), outcome
    assert not outcome.ok or answer in JSON_ANSWERS, "what is no answer of an API cannot say that it is done"
    assert [one.id for one in await it.listed()] == [one.id for one in found]


async def test_recorded_provider_rejections_are_mapped(it: Trial) -> None:
    order, creating = await it.order(), it.simulation.simulator.creating
    for one in (*RECORDED.get(it.case.kind, ()), *(UNREADABLE if it.case.http else ())):
        async with saying(http(one.line, one.data), creating, it.url) as url, renting(it.case, url) as refused:
            [outcome] = await refused.create([order])
        assert (outcome.failure, outcome.scope) == (one.failure, one.scope), (one, outcome)
        assert outcome.message.startswith("acme: ") and one.words in outcome.message, (one, outcome)
    assert it.made == 0


async def test_unknown_fields_are_tolerated(it: Trial) -> None:
    it.simulation.rewrite = lambda line, data: _with_more(data, it.case.maps)
    outcome = await it.create()
    assert outcome.ok, outcome
    it.boot()
    [found] = await it.listed()
    assert found.state == "up"
    assert await it.renter.offers(Query())
    assert await it.renter.ensure_key(CLUSTER, PUBLIC_KEY) == await it.renter.ensure_key(CLUSTER, PUBLIC_KEY)
    assert (await it.renter.delete([found]))[0].ok


async def test_missing_field_is_named(it: Trial) -> None:
    await it.create()
    it.boot()
    found = await it.listed()
    order = await it.order("gpu2", "t0ken2")

    async def asked(call: str) -> str:
        """What the call complains of."""
        if call in ("create", "delete"):
            [outcome] = await (it.renter.create([order]) if call == "create" else it.renter.delete(found))
            assert outcome.failure is (FailureKind.AMBIGUOUS if call == "create" else FailureKind.TRANSIENT), outcome
            return outcome.message
        with pytest.raises(ProviderError) as caught:
            if call == "offers":
                await it.renter.offers(Query(types=(it.case.offer.type,)))
            elif call == "ensure_key":
                await it.renter.ensure_key(CLUSTER, PUBLIC_KEY)
            else:
                await it.listed()
        return caught.value.message

    creating = re.compile(it.simulation.simulator.creating)
    for call, names in it.case.required.items():
        for name in names:
            it.simulation.rewrite = lambda line, data, name=name, call=call: (
                data if call == "create" and not creating.fullmatch(line) else _without(data, name)
            )
            assert re.search(rf"lacks .*\b{name}\b", await asked(call)), (call, name)
    it.simulation.rewrite = None


async def test_unreachable_provider_creates_nothing(case: Case) -> None:
    async with trial(case) as it:
        order = await it.order()
    async with renting(case, it.url) as away:
        [outcome] = await away.create([order])
        assert outcome.failure in (FailureKind.TRANSIENT, FailureKind.AMBIGUOUS)
        with pytest.raises(ProviderError, match=r"^acme: .*cannot be reached"):
            await away.instances(CLUSTER)


def _with_more(data: Any, maps: frozenset[str], here: str = "") -> Any:
    """The same answer with a field in every object that no documentation has."""
    if isinstance(data, list):
        return [_with_more(one, maps, here) for one in data]
    if not isinstance(data, dict):
        return data
    same = {name: _with_more(value, maps, name) for name, value in data.items()}
    return same if here in maps else {**same, "zzNew": {"a": [1]}}


def _priced_zero(data: Any, names: tuple[str, ...], here: str = "") -> Any:
    """The same answer with 0 for every price."""
    if isinstance(data, dict):
        return {name: _priced_zero(value, names, here if here in names else name) for name, value in data.items()}
    if isinstance(data, list):
        return [_priced_zero(one, names, here) for one in data]
    return type(data)(0) if here in names and isinstance(data, int | float | str) else data


def _without(data: Any, gone: str) -> Any:
    if isinstance(data, dict):
        return {name: _without(value, gone) for name, value in data.items() if name != gone}
    return [_without(one, gone) for one in data] if isinstance(data, list) else data
