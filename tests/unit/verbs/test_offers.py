"""`shoal offers`: all providers side by side, cheapest first; one that is down hides no other."""

import json
from dataclasses import replace
from functools import partial

import pytest
from tests.support.cases import cases
from tests.support.errors import error_of
from tests.support.fake_renters import RENTING, FakeRenter, context, opener
from tests.support.fake_world import LAB
from tests.support.screens import screen_text

from shoal.cli.output import dump
from shoal.cli.rental_commands import ROWS, show_offers
from shoal.cloud.providers.api import Offer, ProviderLogin, Query
from shoal.cloud.providers.prices import prices
from shoal.errors import ProviderError, ShoalError, UsageError
from shoal.verbs import provider_accounts as accounts
from shoal.verbs import up as up_verb
from shoal.verbs.provider_accounts import OffersResult, offers, open_accounts, release_findings

H100 = Offer("lambda", "gpu_8x_h100_sxm5", "us-west-1", usd_hour=31.92, gpu="H100", gpus=8, available="yes")
A10 = Offer("lambda", "gpu_1x_a10", "us-east-1", usd_hour=1.29, gpu="A10", gpus=1, available="yes")
A3 = Offer("cloud", "a3-highgpu-8g", "us-central1", "us-central1-b")
SPOT = replace(A3, market="spot")
EVERY = Query()


async def offered(lambda_: list[Offer], cloud: list[Offer], query: Query = EVERY, text: str = RENTING) -> OffersResult:
    """What two providers offer."""
    renters = opener(**{"lambda": FakeRenter(lambda_), "cloud": FakeRenter(cloud)})
    return await offers(context(text), query, opened=renters)


def text_of(result: OffersResult, width: int = 160) -> str:
    return "\n".join(line.rstrip() for line in screen_text(show_offers, result, width=width).splitlines())


async def test_offers_of_all_providers_are_cheapest_first_with_table_prices() -> None:
    result = await offered([H100], [A3, SPOT], Query(gpu="h100", gpus=8))
    assert [(one.type, one.market, one.usd_hour, one.as_of) for one in result.offers] == [
        ("gpu_8x_h100_sxm5", "on-demand", 31.92, ""),
        ("a3-highgpu-8g", "spot", 52.6991, "2026-08-22"),
        ("a3-highgpu-8g", "on-demand", 87.83246, "2026-08-22"),
    ]
    assert [one.gpu for one in result.offers] == ["H100", "H100", "H100"]  # from the table, too
    assert result.failures == {}


async def test_unmatched_offers_are_omitted() -> None:
    for query, expected in (
        (Query(gpu="A10"), A10),
        (Query(market="spot"), SPOT),
        (Query(regions=("us-east-1",)), A10),
    ):
        [found] = (await offered([H100, A10], [A3, SPOT], query)).offers
        assert (found.type, found.market, found.region) == (expected.type, expected.market, expected.region)


async def test_unavailable_offers_are_last_after_unpriced_offers_outside_any_budget() -> None:
    out = replace(A10, region="us-west-1", available="no", usd_hour=0.5)
    odd = Offer("lambda", "gpu_1x_moon", "us-west-1", gpu="Moon", gpus=1, available="yes")
    result = await offered([out, odd, A10], [])
    found = [(one.type, one.available) for one in result.offers]
    assert found == [("gpu_1x_a10", "yes"), ("gpu_1x_moon", "yes"), ("gpu_1x_a10", "no")]
    assert text_of(result).splitlines()[2].split()[-3:-1] == ["?", "?"]
    assert text_of(result).endswith(
        "\n?: neither the provider nor Shoal's table has a price. With a budget or a max_price it is not rented."
    )
    assert "?" not in text_of(await offered([A10], []))


async def test_unavailable_provider_is_reported_beside_the_others() -> None:
    lambda_, cloud = FakeRenter([H100]), FakeRenter(down=True)
    result = await offers(context(), Query(), opened=opener(**{"lambda": lambda_, "cloud": cloud}))
    assert [one.type for one in result.offers] == ["gpu_8x_h100_sxm5"]
    assert text_of(result).startswith(
        "✗ cloud: cannot be reached: connection refused\n    fix: see that it is up\nprovider "
    )
    assert (lambda_.closed, cloud.closed) == (1, 1)


async def test_silent_provider_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts.ask_all, "__defaults__", (accounts.rental_provider, 0.01))
    renters = opener(**{"lambda": FakeRenter([H100]), "cloud": FakeRenter(slow=True)})
    result = await offers(context(), Query(), opened=renters)
    assert len(result.offers) == 1
    assert str(result.failures["cloud"]) == "cloud does not answer within 0 s\n  fix: try again later"


async def test_only_named_providers_are_queried_by_account_or_kind() -> None:
    lambda_, cloud = FakeRenter([H100]), FakeRenter([A3])
    renters = opener(**{"lambda": lambda_, "cloud": cloud})
    for word in ("cloud", "gcp"):
        result = await offers(context(), Query(), [word], renters)
        assert [one.provider for one in result.offers] == ["cloud"]
    assert lambda_.closed == 0
    unknown = "cluster reef has no provider account azure\n  fix: use one of lambda, cloud"
    assert await error_of(UsageError, offers(context(), Query(), ["azure"], renters)) == unknown
    assert await error_of(UsageError, offers(context(LAB), Query())) == (
        "cluster reef has no provider account\n"
        "  fix: add one to the file, as in `providers: {lambda: {key: env:LAMBDA_API_KEY}}`"
    )


SIMULATED = RENTING.replace("lambda: {key: env:PATH}", "lambda: {key: env:PATH, url: 'http://127.0.0.1:1'}")


@cases("text, price", (RENTING, 20.0), (SIMULATED, 31.92))
async def test_prices_of_a_provider_are_stored_and_those_of_a_simulator_are_not(text: str, price: float) -> None:
    await offered([replace(H100, usd_hour=20.0)], [], text=text)
    found = prices().find("lambda", H100.type, H100.region, "on-demand")
    assert found is not None and found.usd_hour == price


async def test_missing_key_affects_only_its_account(monkeypatch: pytest.MonkeyPatch) -> None:
    text = RENTING.replace("lambda: {key: env:PATH}", "lambda: {key: env:SHOAL_TEST_KEY}")
    result = await offered([H100], [A3], text=text)
    assert [one.provider for one in result.offers] == ["cloud"]
    assert str(result.failures["lambda"]) == (
        "providers.lambda.key is env:SHOAL_TEST_KEY, and SHOAL_TEST_KEY is not set\n  fix: export SHOAL_TEST_KEY=..."
    )
    monkeypatch.setenv("SHOAL_TEST_KEY", "sk-very-secret")
    made = open_accounts(context(text).spec)
    assert made.usable[0].secret == "sk-very-secret"
    assert "sk-very-secret" not in repr(made)
    assert (made.usable[1].kind, made.usable[1].settings) == ("gcp", {"project": "p"})


async def test_missing_package_for_release_is_an_error_of_check_plan_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ProviderError("cloud needs the package google-auth, which is not installed", hint="run `pip`")

    def refuse(login: ProviderLogin) -> FakeRenter:
        if login.name == "cloud":
            raise error
        return FakeRenter([])

    [finding] = await release_findings(context(RENTING).spec, refuse)
    assert (finding.level, finding.path, finding.fix) == ("error", "providers.cloud", "run `pip`")
    assert finding.what == (
        "machines of cloud could not be released from here: cloud needs the package google-auth, which is not installed"
    )
    unused = LAB + "providers: {cloud: {kind: gcp, key: env:PATH, project: p}}\n"
    assert await release_findings(context(unused).spec, refuse) == [], "nothing is rented there"
    monkeypatch.setattr(up_verb, "release_findings", partial(release_findings, opened=refuse))
    with pytest.raises(ProviderError) as caught:
        await up_verb.up(context(RENTING))
    assert caught.value.message == f"{finding.what}; nothing was changed" and caught.value.hint == "run `pip`"


async def test_table_shows_region_price_and_date() -> None:
    result = await offered([H100], [A3])
    lines = [" ".join(line.split()) for line in text_of(result).splitlines()]
    assert lines == [
        "provider type market GPUs price of stock $/hour $/GPU where",
        "lambda gpu_8x_h100_sxm5 on-demand 8 × H100 now yes 31.92 3.99 us-west-1",
        "cloud a3-highgpu-8g on-demand 8 × H100 2026-08-22 unknown 87.83 10.98 us-central1-b",
    ]
    assert json.loads(dump(result))["offers"][1]["as_of"] == "2026-08-22"


def test_equal_machines_share_a_row_and_a_narrow_table_omits_repeated_values() -> None:
    found = OffersResult("reef", (A10, replace(A10, region="us-south-1"), H100))
    wide = text_of(found).splitlines()
    assert len(wide) == 3 and f"{A10.region}, us-south-1" in wide[1]
    narrow = text_of(found, 76).splitlines()
    assert narrow[0] == "all of them: provider lambda, market on-demand, price of now, stock yes"
    assert narrow[2].split() == ["type", "GPUs", "$/hour", "$/GPU", "where"]
    assert [line.split()[0] for line in narrow[3:]] == [A10.type, H100.type]


def test_long_table_is_truncated_with_a_hint() -> None:
    many = tuple(replace(A10, type=f"t{number}") for number in range(ROWS + 3))
    assert text_of(OffersResult("reef", many)).endswith("and 3 more; --json shows all")
    assert text_of(OffersResult("reef", ())) == "no such offers"
    silent = OffersResult("reef", (), {"lambda": ShoalError("cannot be reached")})
    assert text_of(silent).endswith("no such offers from the providers that answered")
