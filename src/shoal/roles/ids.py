"""The user and group ids that must be the same on every host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.agent.facts import Account, Facts

# Debian gives Slurm this id by policy; munge gets whatever is free at install time, which differs from host to host.
SLURM_FIRST_CHOICE = 64030
MUNGE_FIRST_CHOICE = 980


@dataclass(frozen=True)
class Pair:
    """A user id and the id of the group of the same name."""

    uid: int
    gid: int


@dataclass(frozen=True)
class Ids:
    slurm: Pair
    munge: Pair


def choose_ids(controller: str, facts: Mapping[str, Facts]) -> Ids:
    """The ids to align on: the controller's where it has some, else another host's, else ids free on every host."""
    ordered = [facts[name] for name in sorted(facts, key=lambda host: host != controller)]
    return Ids(
        slurm=_choose("slurm", SLURM_FIRST_CHOICE, ordered),
        munge=_choose("munge", MUNGE_FIRST_CHOICE, ordered),
    )


def choose_pair(name: str, first_choice: int, controller: str, facts: Mapping[str, Facts]) -> Pair:
    """The same for another account and its group."""
    return _choose(name, first_choice, [facts[host] for host in sorted(facts, key=lambda host: host != controller)])


def _choose(name: str, first_choice: int, facts: list[Facts]) -> Pair:
    users = [fact.users for fact in facts]
    groups = [fact.groups for fact in facts]
    for fact in facts:
        user, group = fact.users.get(name), fact.groups.get(name)
        if user and group and not _taken(user.id, name, users) and not _taken(group.id, name, groups):
            return Pair(uid=user.id, gid=group.id)
    wanted = first_choice
    while _taken(wanted, name, users) or _taken(wanted, name, groups):
        wanted -= 1
    return Pair(uid=wanted, gid=wanted)


def _taken(number: int, name: str, tables: list[Mapping[str, Account]]) -> bool:
    """Whether somebody else has this id on any host."""
    return any(account.id == number and other != name for table in tables for other, account in table.items())
