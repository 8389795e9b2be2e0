"""`shoal reap`: no machine of a cluster is left at any provider, or the result names it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.support.cases import cases
from tests.support.fake_renters import RENTING, FakeRenter, NoSleep, context, controller, machine, opener
from tests.support.screens import screen_text

from shoal.cli.rental_commands import show_preview, show_reap
from shoal.cloud.providers.api import PERMANENT_TOKEN, Abilities, FailureKind, RentedInstance
from shoal.plan.progress import NoProgress, Phase
from shoal.verbs.reap import MAX_LISTS, Polling, ReapPreview, ReapResult, preview, reap
from shoal.verbs.rentals import LedgerRental
from shoal_simulators.fake_host import FakeHost

GRACE = Abilities(grace_s=300)
_OTHER_OFFER = ", {provider: cloud, type: g2-standard-4, image: debian-12}"
ONE_ACCOUNT = RENTING.replace("  cloud: {kind", "  #").replace(_OTHER_OFFER, "")


def ids(found: tuple[RentedInstance, ...]) -> list[tuple[str, str]]:
    return [(one.account, one.id) for one in found]


async def reaped(**renters: FakeRenter) -> ReapResult:
    return await reap(context(), clouds(**renters), Polling(sleep=NoSleep()))


def clouds(**renters: FakeRenter):  # type: ignore[no-untyped-def]
    return opener(**{"lambda": FakeRenter(abilities=GRACE), "cloud": FakeRenter(abilities=GRACE), **renters})


def held(id: str, state: str = "made", age: float = 0.0) -> LedgerRental:
    return LedgerRental(
        f"token-{id}", "burst1", account="lambda", id=id if state != "intended" else "", state=state, age=age
    )


async def test_only_machines_with_the_cluster_tag_are_deleted() -> None:
    lambda_ = FakeRenter(machines=[machine("a"), machine("b", "burst2"), machine("c", cluster="other")])
    cloud = FakeRenter(machines=[machine("d", state="stopped")])
    result = await reaped(**{"lambda": lambda_, "cloud": cloud})
    assert ids(result.gone) == [("lambda", "a"), ("lambda", "b"), ("cloud", "d")]
    assert result.clean
    assert [one.id for one in lambda_.machines] == ["c"]
    assert (lambda_.closed, cloud.closed) == (1, 1)


async def test_listed_machines_of_other_clusters_are_never_deleted() -> None:
    class Lists(FakeRenter):
        async def instances(self, cluster: str) -> list[RentedInstance]:
            await super().instances(cluster)
            return self.machines

    theirs = [machine("b", cluster="other"), machine("c", cluster="", node="", token="")]
    everybodys = Lists(machines=[machine("a"), *theirs])
    found = await preview(context(), clouds(**{"lambda": everybodys}), Polling(sleep=NoSleep()))
    assert ids(found.found) == [("lambda", "a")]
    result = await reaped(**{"lambda": everybodys})
    assert (ids(result.gone), result.clean, everybodys.machines) == ([("lambda", "a")], True, theirs)


async def test_rented_hosts_that_stay_are_left_to_down() -> None:
    controller_machine = replace(machine("c"), node="controller", token=f"{PERMANENT_TOKEN}0123456789ab")
    cloud = FakeRenter(machines=[controller_machine, machine("d")])
    seen = await preview(context(), clouds(cloud=cloud), Polling(sleep=NoSleep()))
    assert (ids(seen.found), ids(seen.hosts)) == ([("cloud", "d")], [("cloud", "c")])
    result = await reaped(cloud=cloud)
    assert ids(result.hosts) == [("cloud", "c")]
    assert ids(result.gone) == [("cloud", "d")]
    assert result.clean
    assert cloud.machines == [controller_machine]


class Broken(FakeRenter):
    async def instances(self, cluster: str) -> list[RentedInstance]:
        raise KeyError("items")


@cases(
    "renter, words",
    (Broken(), "lambda: its client failed: KeyError"),
    (FakeRenter(machines=[machine("a")], down=True), "cloud: cannot be reached: connection refused"),
)
async def test_account_that_fails_is_reported_and_the_others_are_cleared(renter: FakeRenter, words: str) -> None:
    result = await reaped(**{"lambda": renter, "cloud": FakeRenter(machines=[machine("d")])})
    assert ids(result.gone) == [("cloud", "d")] and not result.clean
    assert {name: error.message for name, error in result.failures.items()} == {"lambda": words}


async def test_preview_deletes_nothing() -> None:
    lambda_ = FakeRenter(machines=[machine("a")])
    time = NoSleep()
    renters = clouds(**{"lambda": lambda_, "cloud": FakeRenter(down=True)})
    seen = await preview(context(ledger=controller(None)), renters, Polling(sleep=time))
    assert ids(seen.found) == [("lambda", "a")]
    assert list(seen.failures) == ["cloud"]
    assert lambda_.deleted == []
    assert time.slept == 0


@cases(
    "behaviour, deletes",
    ({"lag": 1, "deletes_that_fail": 2}, 1),  # a machine that is stopping is not deleted again with every list
    ({"lag": 20}, 4),
    ({"hidden": 1}, 1),
    ({"lists_that_fail": 2}, 1),
)
async def test_reap_repeats_until_the_lists_are_empty(behaviour: dict[str, int], deletes: int) -> None:
    lambda_ = FakeRenter(machines=[machine("a")], **behaviour)
    result = await reaped(**{"lambda": lambda_})
    assert result.clean and ids(result.gone) == [("lambda", "a")]
    assert lambda_.deleted == ["a"] * deletes


async def test_provider_lost_midway_leaves_its_last_list_as_remaining() -> None:
    class Silent(FakeRenter):
        async def delete(self, instances):  # type: ignore[no-untyped-def]
            self.down = True
            return await super().delete(instances)

    result = await reaped(**{"lambda": Silent(machines=[machine("a")])})
    assert (ids(result.gone), ids(result.remaining)) == ([], [("lambda", "a")])
    assert list(result.failures) == ["lambda"]


@cases(
    "behaviour, words",
    (
        {"deletes_that_fail": 1000},
        f"1 machines are still there after {MAX_LISTS} lists: try again\n  fix: delete them in the provider's console",
    ),
    ({"refuses": FailureKind.AUTH}, "you may not delete\n  fix: check that the key is valid and may delete"),
)
async def test_remaining_machine_is_reported_with_the_provider_message(behaviour: dict[str, Any], words: str) -> None:
    result = await reaped(**{"lambda": FakeRenter(machines=[machine("a")], **behaviour)})
    assert (ids(result.remaining), str(result.failures["lambda"])) == ([("lambda", "a")], words)


# ---- lists lag


@cases(
    "known, seconds",
    ((), 5),
    (None, 300),
    ([held("a", "intended")], 300),
    ([held("a", "made")], 300),
    ([held("a", "failed", age=200)], 100),
    ([held("a", "failed", age=4000)], 5),
    ([held("a", "releasing", age=86400)], 5),
    ([replace(held("a"), account="another")], 5),
)
async def test_empty_list_is_accepted_without_recent_orders(known: list[LedgerRental] | None, seconds: float) -> None:
    for verb in (preview, reap):
        time = NoSleep()
        one = context(ONE_ACCOUNT, controller(known))
        result = await verb(one, clouds(), Polling(sleep=time))
        doubted = ["lambda"] if known and known[0].confirmed and known[0].account == "lambda" else []
        assert (list(result.failures), time.slept) == (doubted, seconds), verb


async def test_machine_listed_minutes_late_is_reported_by_the_preview_and_deleted() -> None:
    for known in (None, [held("a", "intended")]):
        late = FakeRenter(machines=[machine("a")], hidden=50, abilities=GRACE)
        one, renters, polling = context(ledger=controller(known)), clouds(**{"lambda": late}), Polling(sleep=NoSleep())
        seen = await preview(one, renters, polling)
        assert (ids(seen.found), late.deleted) == ([("lambda", "a")], [])
        late.hidden = 50
        result = await reap(one, renters, polling)
        assert (ids(result.gone), result.clean) == ([("lambda", "a")], True)


async def test_wait_shows_its_remaining_time() -> None:
    said: list[str] = []

    class Listening(NoProgress):
        @contextmanager
        def phase(self, title: str, total: int) -> Iterator[Phase]:
            with super().phase(title, total) as phase:
                phase.update = lambda host, text: said.append(f"{title} {total} {host}: {text}")  # type: ignore[method-assign]
                yield phase

    one = replace(context(ledger=controller([held("a")])), progress=Listening())
    await reap(one, clouds(), Polling(interval_s=100, sleep=NoSleep()))
    assert [line for line in said if "lambda" in line] == [
        f"providers cleared 2 lambda: lists none; one may still appear for {rest} s" for rest in (300, 200, 100)
    ]


def struck(host: FakeHost) -> list[dict[str, list[object]]]:
    """The ended rentals that the ledger received, in all calls with any."""
    return [ended for call in host.calls if (ended := json.loads(call.stdin)["ended"])]


@cases(
    "rows, gone, remaining",
    ([held("a")], ["a"], []),
    ([held("a", "releasing", age=86400)], [], []),
    ([held("a", "joined"), held("i-1", "joined"), held("b", "intended")], ["a"], ["i-1"]),
    ids=["a listed machine is not awaited", "its delete was accepted", "beside an unlisted one"],
)
async def test_deleted_machine_is_ended_in_the_ledger(
    rows: list[LedgerRental], gone: list[str], remaining: list[str]
) -> None:
    host, time = controller(rows), NoSleep()
    renters = clouds(**{"lambda": FakeRenter(machines=[machine(id) for id in gone], abilities=GRACE)})
    seen = await preview(context(ledger=host), renters, Polling(sleep=NoSleep()))
    assert ([one.id for one in seen.found], struck(host)) == (gone, []), "a preview changes nothing"
    result = await reap(context(ledger=host), renters, Polling(sleep=time))
    assert ([one.id for one in result.gone], [one.id for one in result.remaining]) == (gone, remaining)
    assert [[*told] for told in struck(host)] == [["token-a"]]
    assert remaining or time.slept < 60


async def test_only_proved_releases_are_ended_in_the_ledger() -> None:
    host = controller(
        [held("a", "joined"), held("b", "intended"), held("c", "failed"), replace(held("d"), account="cloud")]
    )
    renters = {"lambda": FakeRenter(machines=[machine("a")]), "cloud": FakeRenter(down=True)}
    await reap(context(ledger=host), opener(**renters), Polling(sleep=NoSleep()))
    [told] = struck(host)
    assert {token: state for token, (state, _) in told.items()} == {"token-a": "joined", "token-b": "intended"}
    stays = controller([held("a", "joined")])
    renters["lambda"] = FakeRenter(machines=[machine("a")], deletes_that_fail=1000)
    await reap(context(ledger=stays), opener(**renters), Polling(sleep=NoSleep()))
    assert struck(stays) == []


# ---- what only the ledger has


@cases("state", "made", "joined", "releasing")
async def test_machine_only_in_the_ledger_remains(state: str) -> None:
    host = controller([held("i-1", state), held("b", "intended")])
    for verb in (preview, reap):
        result = await verb(context(ledger=host), clouds(), Polling(sleep=NoSleep()))
        assert str(result.failures["lambda"]) == (
            "the ledger has lambda i-1, this key's list does not show it: is it the right key or project?\n"
            "  fix: use the key and project that rented it; a service that runs on the controller removes what is "
            "gone; or make sure that nothing is left, and use `shoal reap --force`"
        )
        assert ids(result.unlisted if isinstance(result, ReapPreview) else result.remaining) == [("lambda", "i-1")]
    assert isinstance(result, ReapResult) and not result.clean
    assert struck(host) == [], "nor is an order proved to have made nothing, by a list that may be another's"


async def test_force_ends_the_ledger_row_with_a_report() -> None:
    host = controller([held("i-1", "joined"), held("b", "intended")])
    result = await reap(context(ledger=host), clouds(), Polling(sleep=NoSleep()), force=True)
    assert (result.clean, result.remaining, result.failures) == (True, (), {})
    assert [str(finding) for finding in result.findings] == [
        "removed from the ledger, although no list ever showed it, found lambda i-1, look in the provider's console"
    ]
    [told] = struck(host)
    assert set(told) == {"token-i-1", "token-b"}


async def test_machines_of_an_account_missing_from_the_file_are_reported() -> None:
    host = controller([replace(held("i-9", "joined"), account="tide")])
    for verb in (preview, reap):
        result = await verb(context(ledger=host), clouds(), Polling(sleep=NoSleep()))
        assert [(one.level, str(one)) for one in result.findings] == [
            (
                "error",
                "c1: rented machines would never be released, as the file has no account tide any more, found "
                "burst1 (tide i-9), put it back until they are released, or run `shoal reap` with the old file",
            )
        ]
        show = show_preview if isinstance(result, ReapPreview) else show_reap
        assert "account tide" in screen_text(show, result) and "no provider has" not in screen_text(show, result)
    assert isinstance(result, ReapResult) and not result.clean
    assert struck(host) == []


# ---- what a person sees


@cases(
    "result, said",
    (ReapResult("reef", (machine("a"),)), "1 machine released; no provider lists any more"),
    (ReapResult("reef", (), (machine("a"),)), "0 machines released; run `shoal reap` again"),
)
def test_screen_shows_the_machines_and_the_result(result: ReapResult, said: str) -> None:
    assert screen_text(show_reap, result).splitlines()[-1].endswith(f"reef: {said}")
    text = screen_text(show_preview, ReapPreview("reef", (replace(machine("i-1", zone=""), account="lambda"),)))
    assert text.splitlines()[1].split() == ["lambda", "i-1", "burst1", "gpu_1x_a10", "us-west-1", "active", "$1.29"]
    assert screen_text(show_preview, ReapPreview("reef", ())) == "reef: no provider lists a machine of this cluster\n"
