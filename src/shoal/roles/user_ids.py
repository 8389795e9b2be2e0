"""The ids of the users: those of the spec, else those that the users have on the hosts, else free ones. Pure.

A user has one id on all hosts. Hosts record the users that Shoal created, so that each later run chooses the same ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shoal.agent.facts import Facts
from shoal.roles.component import AccountIds
from shoal.spec.finding import Finding
from shoal.spec.model import Spec

RECORD = "/etc/shoal/users"
"""The users of earlier runs on a host: their ids stay, and a later run locks those that the spec no longer names."""
SYSTEM_ID_LIMIT = 1000
FIRST_USER, LAST_USER = 2000, 59999
"""Ids for users without one. Installers give 1000 and the next ones to people, with other names on each host."""


def recorded_users(facts: Facts) -> dict[str, int]:
    """The users that Shoal created on a host, with their ids."""
    pairs = (line.split() for line in facts.text(RECORD).splitlines() if not line.startswith("#"))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def choose_user_ids(spec: Spec, facts: Mapping[str, Facts], controller: str) -> dict[str, AccountIds]:
    """The ids of each user and of the group of the same name, in the order of the spec."""
    hosts = [facts[name] for name in sorted(facts, key=lambda name: name != controller)]
    uids = {name: user.uid or _present_id(name, hosts) for name, user in spec.users.items()}
    gids = {
        name: user.gid or user.uid or _present_group(name, hosts) or uids[name] for name, user in spec.users.items()
    }
    taken = {number for number in (*uids.values(), *gids.values()) if number} | _ids_in_use(hosts)
    free = (number for number in range(FIRST_USER, LAST_USER + 1) if number not in taken)
    ids = {}
    for name, uid in uids.items():
        number = uid or next(free)
        ids[name] = AccountIds(number, gids[name] or number)
    return ids


def _ids_in_use(hosts: Iterable[Facts]) -> set[int]:
    """The ids of all users and groups of all hosts, and of those that Shoal created: their files may still exist."""
    numbers: set[int] = set()
    for facts in hosts:
        numbers.update(account.id for table in (facts.users, facts.groups) for account in table.values())
        numbers.update(recorded_users(facts).values())
    return numbers


def _present_id(name: str, hosts: Iterable[Facts]) -> int | None:
    """The id that the user has: where Shoal created the user, else where there is a Unix user of that name."""
    ordered = sorted(hosts, key=lambda facts: name not in recorded_users(facts))
    numbers = [facts.users[name].id for facts in ordered if name in facts.users]
    numbers += [number for facts in ordered if (number := recorded_users(facts).get(name))]
    return next((number for number in numbers if number >= SYSTEM_ID_LIMIT), None)


def _present_group(name: str, hosts: Iterable[Facts]) -> int | None:
    numbers = (facts.groups[name].id for facts in hosts if name in facts.groups)
    return next((number for number in numbers if number >= SYSTEM_ID_LIMIT), None)


def user_id_conflicts(spec: Spec, facts: Mapping[str, Facts], ids: Mapping[str, AccountIds]) -> Iterator[Finding]:
    """Users without `uid` in the spec for whom no id fits all hosts: Shoal does not guess who is who."""
    for name, user in spec.users.items():
        if user.uid is not None:
            continue
        present = {host: fact.users[name].id for host, fact in facts.items() if name in fact.users}
        created = any(name in recorded_users(fact) for fact in facts.values())
        for host, fact in facts.items():
            conflict = _conflict(name, ids[name].uid, fact, created or len(present) == len(facts))
            if conflict:
                yield Finding("error", *conflict, path=f"users.{name}", host=host)


def _conflict(name: str, uid: int, facts: Facts, is_cluster_user: bool) -> tuple[str, str, str] | None:
    """What is wrong on a host, what was found, and the fix. `is_cluster_user`: not only some hosts have the user."""
    number = facts.users[name].id if name in facts.users else None
    if number is not None and number < SYSTEM_ID_LIMIT:
        return f"{name} is a system user of this host", f"id {number}", "give the user another name"
    if number is not None and not is_cluster_user:
        fix = f"if this is the same person, set `uid: {number}`; else give the user another name"
        return f"{name} is a Unix user of this host only, and not from this file", f"id {number}", fix
    if number is not None and number != uid:
        fix = (
            f"if this is the same person, set `uid: {uid}`: `shoal up` then changes the id on this host; else give the "
            "user another name"
        )
        return f"{name} has the id {uid} on other hosts", f"id {number}", fix
    other = next((other for other, account in facts.users.items() if account.id == uid and other != name), None)
    if other is not None:
        fix = (
            f"give {other} another id on this host (`usermod -u`, then chown its files), or set `uid` of {name} to an "
            "id that is free on all hosts"
        )
        return f"the id {uid} of {name} belongs to another user of this host", other, fix
    return None
