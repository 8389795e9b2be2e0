"""`shoal reap`: nothing of a cluster is left at any provider, or it is said what is."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from tests.unit.verbs.fake_renters import FakeRenter, context, machine, no_sleep, opener

from shoal.cli.render_money import show_look, show_reap
from shoal.providers.rental import Trouble
from shoal.verbs.reap import ROUNDS, Holding, Look, ReapResult, look, reap


def ids(found: tuple[Holding, ...]) -> list[tuple[str, str]]:
    return [(one.account, one.machine.id) for one in found]


async def reaped(**renters: FakeRenter) -> ReapResult:
    return await reap(context(), opener(**{"lambda": FakeRenter(), "cloud": FakeRenter(), **renters}), no_sleep)


async def test_everything_with_the_clusters_mark_goes_and_nothing_else() -> None:
    lambda_ = FakeRenter(machines=[machine("a"), machine("b", "burst2"), machine("c", cluster="other")])
    cloud = FakeRenter(machines=[machine("d", state="stopped")])
    result = await reaped(**{"lambda": lambda_, "cloud": cloud})
    assert ids(result.gone) == [("lambda", "a"), ("lambda", "b"), ("cloud", "d")]
    assert result.clean
    assert [one.id for one in lambda_.machines] == ["c"]
    assert (lambda_.closed, cloud.closed) == (1, 1)


async def test_looking_touches_nothing() -> None:
    lambda_ = FakeRenter(machines=[machine("a")])
    seen = await look(context(), opener(**{"lambda": lambda_, "cloud": FakeRenter(down=True)}))
    assert ids(seen.found) == [("lambda", "a")]
    assert list(seen.failures) == ["cloud"]
    assert lambda_.deleted == []


async def test_it_goes_on_until_the_lists_are_clean() -> None:
    lambda_ = FakeRenter(machines=[machine("a")], lag=1, deletes_that_fail=2)
    result = await reaped(**{"lambda": lambda_})
    assert result.clean and ids(result.gone) == [("lambda", "a")]
    assert lambda_.deleted == ["a"]  # what is going is not asked to go with every look


async def test_a_machine_that_says_it_goes_and_stays_is_deleted_again() -> None:
    lambda_ = FakeRenter(machines=[machine("a")], lag=20)
    assert (await reaped(**{"lambda": lambda_})).clean
    assert lambda_.deleted == ["a", "a", "a", "a"]


async def test_a_machine_that_a_lagging_list_shows_late_goes_too() -> None:
    lambda_ = FakeRenter(machines=[machine("a")], hidden=1)
    result = await reaped(**{"lambda": lambda_})
    assert ids(result.gone) == [("lambda", "a")]


async def test_a_list_that_fails_now_and_then_is_asked_again() -> None:
    result = await reaped(**{"lambda": FakeRenter(machines=[machine("a")], lists_that_fail=2)})
    assert result.clean and len(result.gone) == 1


async def test_a_provider_that_cannot_be_asked_is_told_and_does_not_keep_the_others() -> None:
    cloud = FakeRenter(machines=[machine("d")], down=True)
    result = await reaped(**{"lambda": FakeRenter(machines=[machine("a")]), "cloud": cloud})
    assert ids(result.gone) == [("lambda", "a")]
    assert not result.clean
    assert result.failures["cloud"].message == "cloud: cannot be reached: connection refused"


async def test_one_that_goes_silent_halfway_leaves_what_it_last_listed_as_remaining() -> None:
    class Silent(FakeRenter):
        async def delete(self, rented):  # type: ignore[no-untyped-def]
            self.down = True
            return await super().delete(rented)

    result = await reaped(**{"lambda": Silent(machines=[machine("a")])})
    assert (ids(result.gone), ids(result.remaining)) == ([], [("lambda", "a")])
    assert list(result.failures) == ["lambda"]


async def test_what_stays_in_spite_of_all_is_told_with_the_providers_words() -> None:
    lambda_ = FakeRenter(machines=[machine("a")], deletes_that_fail=1000)
    result = await reaped(**{"lambda": lambda_})
    assert ids(result.remaining) == [("lambda", "a")]
    assert str(result.failures["lambda"]) == (
        f"1 machines are still there after {ROUNDS} looks: try again\n  fix: delete them in the provider's console"
    )


async def test_a_key_that_may_not_delete_is_told_at_once() -> None:
    lambda_ = FakeRenter(machines=[machine("a")], refuses=Trouble.AUTH)
    result = await reaped(**{"lambda": lambda_})
    assert str(result.failures["lambda"]) == "you may not delete\n  fix: see that the key is right and may delete"
    assert ids(result.remaining) == [("lambda", "a")]


def shown(show: object, value: object) -> str:
    out = StringIO()
    show(Console(file=out, width=120), value)  # type: ignore[operator]
    return out.getvalue()


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (ReapResult("reef", (Holding("lambda", machine("a")),)), "1 machine given back; no provider has one any more"),
        (
            ReapResult("reef", (), (Holding("lambda", machine("a")),)),
            "0 machines given back; run `shoal reap` again",
        ),
    ],
)
def test_the_last_line_says_whether_it_is_done(result: ReapResult, said: str) -> None:
    assert shown(show_reap, result).splitlines()[-1].endswith(f"reef: {said}")


def test_a_person_sees_what_is_about_to_go() -> None:
    text = shown(show_look, Look("reef", (Holding("lambda", machine("i-1", zone="")),)))
    assert text.splitlines()[1].split() == ["lambda", "i-1", "burst1", "gpu_1x_a10", "us-west-1", "active", "$1.29"]
    assert shown(show_look, Look("reef", ())) == "reef: no provider has a machine of this cluster\n"
