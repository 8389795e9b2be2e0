"""`shoal try` before it rents: what it chooses, what it refuses, and the nodeset that it adds."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.rental_providers import CASES, trial
from tests.support.cases import cases

from shoal.cloud.providers.api import Offer, ProviderLogin
from shoal.errors import ProviderError, ShoalError, UsageError
from shoal.spec.loader import load_text
from shoal.spec.members import rented_sets
from shoal.verbs.context import Context
from shoal.verbs.provider_trial import TrialPlan, plan_trial, publishable, with_nodeset

HEAD = "cluster: reef\ncontroller: {host: desktop, compute: true}\n"
PLAN = TrialPlan(
    ProviderLogin("acme", "lambda"), Offer("acme", "gpu_1x_a10", "us-west-1", usd_hour=1.29, gpus=1), 2100, 1.0
)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with trial(CASES["lambda"]) as made:
        yield made.url


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACME_KEY", "sk-0123456789")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def context(url: str, more: str = "") -> Context:
    accounts = (
        f'providers: {{acme: {{kind: lambda, key: env:ACME_KEY, url: "{url}", settings: {{request_interval: 0}}}}}}\n'
    )
    return Context(load_text(HEAD + accounts + more, "shoal.yaml"))


async def test_cheapest_machine_with_a_gpu_is_chosen_with_the_most_that_it_can_cost(url: str) -> None:
    plan = await plan_trial(context(url), "acme", 2.0)
    assert (plan.offer.type, plan.account.kind) == ("gpu_1x_a10", "lambda")
    assert plan.lifetime_s == 2100  # Lambda's machines may take half an hour to join
    assert plan.most_usd == pytest.approx(1.29 * 2100 / 3600)
    named = await plan_trial(context(url), "lambda", 5.0, "gpu_1x_h100_sxm5")
    assert named.offer.type == "gpu_1x_h100_sxm5", "the account by its kind, the machine by its type"


@cases(
    "account, most, type, more, kind, message, hint",
    ("acme", 0.5, "", "", UsageError, "can cost \\$0.75", "use --max-cost 0.76"),
    ("acme", 5.0, "gpu_9x", "", ProviderError, "offers no gpu_9x", "see `shoal offers`"),
    ("other", 5.0, "", "", UsageError, "has no provider account other", "use one of acme"),
    ("acme", 5.0, "", "nodesets: {try: {hosts: [a]}}\n", UsageError, "has a nodeset try", "rename it"),
)
async def test_what_cannot_be_tried_is_refused_with_the_fix(
    url: str, account: str, most: float, type: str, more: str, kind: type[ShoalError], message: str, hint: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        await plan_trial(context(url, more), account, most, type)
    assert caught.value.hint.startswith(hint)


@cases("more", "", "partitions: {p: {nodesets: [controller]}}\n")
def test_added_nodeset_ends_in_time_and_leaves_the_others_alone(more: str) -> None:
    spec = load_text(HEAD + "providers: {acme: {kind: lambda, key: env:ACME_KEY}}\n" + more, "shoal.yaml")
    changed = with_nodeset(spec, PLAN)
    [added] = rented_sets(changed).values()
    assert added.nodes == ("try1",)
    assert (added.lifetime, added.gpus, added.max_price) == (2100, 1, 1.29129)
    assert added.offers[0].type == "gpu_1x_a10"
    assert set(changed.partitions) == ({"p", "try"} if more else set())
    assert not spec.nodesets


@cases(
    "text, secret, shown",
    ("acme: key sk-12345678 is invalid", "sk-12345678", "acme: key *** is invalid"),
    ("AKIDEXAMPLE may not; wJalrXUtnFEMI", "AKIDEXAMPLE:wJalrXUtnFEMI", "*** may not; ***"),
    ("login of robot@reefs.example", '{"client_email": "robot@reefs.example"}', "login of ***"),
    ("cannot reach 203.0.113.9:22 of try1", "", "cannot reach ***:22 of try1"),
    ("cannot reach [2001:db8::9]:22, fe80::1", "", "cannot reach [***]:22, ***"),
    ("Slurm 24.11.5 at 12:30:45, std::max", "", "Slurm 24.11.5 at 12:30:45, std::max"),
)
def test_report_has_no_part_of_the_secret_and_no_address(text: str, secret: str, shown: str) -> None:
    assert publishable(text, secret) == shown
