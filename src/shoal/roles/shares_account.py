"""The account by which hosts get at shares over SSH: the same number on all of them, as files belong to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.agent.document import Group, Item, User
from shoal.agent.facts import Facts
from shoal.roles.ids import Pair, choose_pair
from shoal.storage import sshfs, stage

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

ACCOUNT_FIRST_CHOICE = 979


def shares_account(cluster: Cluster) -> list[Item]:
    ids = shares_ids(cluster)
    return [Group(sshfs.ACCOUNT, ids.gid), User(sshfs.ACCOUNT, ids.uid, group=sshfs.ACCOUNT, home="/")]


def shares_ids(cluster: Cluster) -> Pair:
    return choose_pair(sshfs.ACCOUNT, ACCOUNT_FIRST_CHOICE, cluster.controller.name, _without_twins(cluster.facts))


def _without_twins(facts: Mapping[str, Facts]) -> dict[str, Facts]:
    """The hosts as if the account had one name only: its second one takes nobody's number."""
    return {
        host: replace(fact, users={name: user for name, user in fact.users.items() if name != stage.ACCOUNT})
        for host, fact in facts.items()
    }
