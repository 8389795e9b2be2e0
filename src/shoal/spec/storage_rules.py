"""What must hold between shares, users and the rest of a spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.spec.problem import Problem, nearest
from shoal.spec.storage import CONTROLLER
from shoal.spec.words import show

SANDBOX_SHARED = "/shared"
"""What sandbox hosts have in common without being asked."""


def storage_problems(data: Mapping[str, Any], hosts: Sequence[str]) -> Iterator[Problem]:
    """Every rule about shares that does not hold. `hosts` are the names of all members."""
    shares = data.get("storage")
    if not isinstance(shares, Mapping):
        return
    homes: list[str] = []
    for where, share in shares.items():
        if not isinstance(where, str) or not isinstance(share, Mapping):
            continue
        yield from _one_share(data, where, share, hosts)
        yield from _beside_others(where, shares, hosts)
        outer = next((other for other in shares if isinstance(other, str) and where.startswith(f"{other}/")), None)
        if outer:
            yield Problem(("storage", where), "a share inside another", show(outer), "give it a path beside that one")
        if where == "/home" or share.get("homes") is True:
            if homes:
                fix = f"`{homes[0]}` has them already; delete `homes` in one"
                yield Problem(("storage", where), "two shares for the users' homes", show(where), fix)
            homes.append(where)
            if share.get("read_only") is True:
                yield Problem(("storage", where, "read_only"), "homes that nobody can write to", "true", "delete it")


def _one_share(
    data: Mapping[str, Any], where: str, share: Mapping[str, Any], hosts: Sequence[str]
) -> Iterator[Problem]:
    server = share.get("host", CONTROLLER)
    if isinstance(server, str) and server != CONTROLLER and server not in hosts:
        known = [CONTROLLER, *hosts]
        yield Problem(("storage", where, "host"), "no host of the cluster", show(server), nearest(server, known))
    if _has_sandbox(data) and (where + "/").startswith(SANDBOX_SHARED + "/"):
        fix = "delete it, or choose another path"
        yield Problem(("storage", where), "sandbox hosts have this directory in common already", show(where), fix)


def _beside_others(where: str, shares: Mapping[Any, Any], hosts: Sequence[str]) -> Iterator[Problem]:
    """A share's `path` is served once, and on the host that keeps it nothing is mounted over it."""

    def kept(share: Mapping[str, Any]) -> object:
        server = share.get("host", CONTROLLER)
        return hosts[0] if server == CONTROLLER and hosts else server

    path = shares[where].get("path")
    if not isinstance(path, str):
        return
    for other, share in shares.items():
        if other == where or not isinstance(other, str) or not isinstance(share, Mapping):
            continue
        if kept(share) == kept(shares[where]):
            if path == share.get("path", other):
                yield Problem(
                    ("storage", where, "path"),
                    f"the share {show(other)} is this directory already",
                    show(path),
                    "choose another, or delete one of the two shares",
                )
        elif f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/"):
            yield Problem(
                ("storage", where, "path"),
                f"the share {show(other)} is mounted there, and would hide what is in it",
                show(path),
                "choose a directory beside that one",
            )


def _has_sandbox(data: Mapping[str, Any]) -> bool:
    nodesets = data.get("nodesets")
    sets = [data.get("controller"), data.get("login"), *(nodesets.values() if isinstance(nodesets, Mapping) else ())]
    return any(isinstance(entry, Mapping) and entry.get("provider") == "sandbox" for entry in sets)


def user_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Two users have two numbers, and so have their groups."""
    users = data.get("users")
    if not isinstance(users, Mapping):
        return
    for key in ("uid", "gid"):
        seen: dict[int, str] = {}
        for name, user in users.items():
            if not isinstance(user, Mapping) or not isinstance(name, str):
                continue
            number = user.get(key) if user.get(key) is not None or key == "uid" else user.get("uid")
            if not isinstance(number, int) or isinstance(number, bool):
                continue
            if number in seen:
                at = key if user.get(key) is not None else "uid"
                yield Problem(("users", name, at), f"two users with one {key}", str(number), f"`{seen[number]}` has it")
            seen.setdefault(number, name)
    for name, user in users.items():
        groups = user.get("groups") if isinstance(user, Mapping) else None
        for index, group in enumerate(groups if isinstance(groups, list) else ()):
            if isinstance(group, str) and group in users:
                fix = "a user's own group is that user's alone; make one of another name"
                yield Problem(("users", name, "groups", index), "the group of a user", show(group), fix)
