"""Ids of services, and of users without one in the file: free ones, which stay; and findings where none fits."""

from dataclasses import replace

import pytest
from tests.support.cases import cases
from tests.support.fake_clusters import AT_ONCE, context_of
from tests.support.fake_world import LAB, lab, spec_of

from shoal.agent.document import User
from shoal.agent.facts import Facts, FileFact, UnixIds
from shoal.errors import ShoalError
from shoal.roles.component import AccountIds, ServiceIds, choose_ids
from shoal.roles.user_ids import RECORD, choose_user_ids, user_id_conflicts
from shoal.verbs.up import plan, up

PEOPLE = "users:\n  alice: {}\n  bob: {}\n"


def host(users: dict[str, int] | None = None, groups: dict[str, int] | None = None, record: str = "") -> Facts:
    return Facts(
        users={name: UnixIds(number) for name, number in (users or {}).items()},
        groups={name: UnixIds(number) for name, number in (groups or {}).items()},
        files={RECORD: FileFact(text=record)},
    )


def ids(people: str, **facts: Facts) -> dict[str, int]:
    return {name: ids.uid for name, ids in choose_user_ids(spec_of(LAB + people), facts, "c1").items()}


def conflicts(people: str, **facts: Facts) -> list[str]:
    spec = spec_of(LAB + people)
    return [str(finding) for finding in user_id_conflicts(spec, facts, choose_user_ids(spec, facts, "c1"))]


@cases(
    "people, facts, expected",
    (PEOPLE, {"c1": host(), "n1": host()}, {"alice": 2000, "bob": 2001}),
    (
        PEOPLE + "  carol: {uid: 2003}\n  dave: {uid: 2900, gid: 2004}\n",
        {"c1": host({"zoe": 2000}), "n1": host({}, {"team": 2001}), "n2": host({"mallory": 2002})},
        {"alice": 2005, "bob": 2006, "carol": 2003, "dave": 2900},
    ),
    (PEOPLE, {"c1": host(record="# by shoal\ncarol 2000\n")}, {"alice": 2001, "bob": 2002}),
    (PEOPLE, {"c1": host(), "n1": host(record="alice 2040\n")}, {"alice": 2040, "bob": 2000}),
    ids=["in the order of the file", "taken on any host or in the file", "a former user's", "of a run that failed"],
)
def test_users_get_free_ids(people: str, facts: dict[str, Facts], expected: dict[str, int]) -> None:
    assert ids(people, **facts) == expected


def test_user_keeps_the_id_whatever_the_order_of_the_file() -> None:
    created = host({"alice": 2000, "bob": 2001}, {"alice": 2000, "bob": 2001}, "alice 2000\nbob 2001\n")
    people = "users:\n  carol: {}\n  bob: {}\n  alice: {}\n"
    assert ids(people, c1=created, n1=host()) == {"carol": 2002, "bob": 2001, "alice": 2000}
    assert conflicts(people, c1=created, n1=host()) == []


def test_user_that_all_hosts_have_with_one_id_keeps_it() -> None:
    there, spec = host({"alice": 1005}, {"alice": 1006}), spec_of(LAB + PEOPLE)
    assert choose_user_ids(spec, {"c1": there, "n1": there}, "c1")["alice"] == AccountIds(1005, 1006)
    assert conflicts(PEOPLE, c1=there, n1=there) == []


def test_unrelated_unix_user_of_some_hosts_is_not_taken() -> None:
    assert conflicts(PEOPLE, c1=host(), n1=host({"alice": 1001})) == [
        "n1 users.alice: alice is a Unix user of this host only, and not from this file, found id 1001, "
        "if this is the same person, set `uid: 1001`; else give the user another name"
    ]
    assert conflicts("users: {alice: {uid: 1001}}\n", c1=host(), n1=host({"alice": 1001})) == []


def test_different_ids_on_hosts_are_reported_with_the_id_to_set() -> None:
    created = host({"alice": 2000}, record="alice 2000\n")
    assert conflicts("users: {alice: {}}\n", c1=host({"alice": 1001}), n1=created) == [
        "c1 users.alice: alice has the id 2000 on other hosts, found id 1001, if this is the same person, set "
        "`uid: 2000`: `shoal up` then changes the id on this host; else give the user another name"
    ]


def test_system_user_of_that_name_is_never_taken() -> None:
    games = host({"games": 5}, {"games": 60})
    assert ids("users: {games: {}}\n", c1=games, n1=games) == {"games": 2000}
    assert conflicts("users: {games: {}}\n", c1=games) == [
        "c1 users.games: games is a system user of this host, found id 5, give the user another name"
    ]


def test_new_host_where_another_user_has_the_id_is_reported() -> None:
    created = host({"alice": 2000}, record="alice 2000\n")
    assert conflicts("users: {alice: {}}\n", c1=created, n1=host({"zoe": 2000})) == [
        "n1 users.alice: the id 2000 of alice belongs to another user of this host, found zoe, give zoe another id on "
        "this host (`usermod -u`, then chown its files), or set `uid` of alice to an id that is free on all hosts"
    ]


async def test_plan_shows_the_id_and_the_next_up_from_elsewhere_keeps_it() -> None:
    world = lab(LAB + PEOPLE, n2={"users": {"zoe": UnixIds(2000)}})
    planned = await plan(context_of(world))
    users = {
        item for host in planned.hosts for _, document in host.stages for item in document if isinstance(item, User)
    }
    assert {user.uid for user in users if user.name == "alice"} == {2001} and not world.applied()
    assert (await up(context_of(world), AT_ONCE)).whole
    world.look_again()
    agent = world.agents["n2"]
    agent.facts = replace(agent.facts, users={})
    assert (await up(context_of(world), AT_ONCE)).unchanged


async def test_up_changes_nothing_while_no_id_fits_all_hosts() -> None:
    world = lab(LAB + PEOPLE, n1={"users": {"alice": UnixIds(1001)}})
    with pytest.raises(ShoalError) as caught:
        await up(context_of(world), AT_ONCE)
    assert str(caught.value) == (
        "n1: alice is a Unix user of this host only, and not from this file (id 1001)\nnothing was changed\n"
        "  fix: if this is the same person, set `uid: 1001`; else give the user another name"
    )
    assert not world.applied()


EMPTY = host({}, {})
BOTH = {"munge": 104, "slurm": 999}


@cases(
    "controller, other, slurm, munge",
    (EMPTY, EMPTY, (64030, 64030), (980, 980)),
    (EMPTY, host({"backup": 980}, {"printers": 979}), (64030, 64030), (978, 978)),
    (host(BOTH, {"munge": 110, "slurm": 998}), host({"munge": 117}, {"munge": 120}), (999, 998), (104, 110)),
    (host({"munge": 104}, {"munge": 110}), host({"sshd": 104}, {}), (64030, 64030), (980, 980)),
    (EMPTY, host({"munge": 104}, {"munge": 110}), (64030, 64030), (104, 110)),
    ids=["Debian's and a free one", "taken elsewhere", "the controller's", "a conflict", "another host's"],
)
def test_ids_of_daemons_fit_all_hosts(
    controller: Facts, other: Facts, slurm: tuple[int, int], munge: tuple[int, int]
) -> None:
    chosen = choose_ids("c", {"n": other, "c": controller})
    assert chosen == ServiceIds(slurm=AccountIds(*slurm), munge=AccountIds(*munge))
