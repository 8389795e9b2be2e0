"""chrony's configuration: members take their time from where they have it, else from the controller."""

from __future__ import annotations

from collections.abc import Iterable

_HEAD = "# Written by shoal; changes here are lost.\n"


def serving_conf(address: str, members: Iterable[str]) -> str:
    """The controller's: it serves members, and nobody else, also while it has no source itself."""
    allowed = "".join(f"allow {member}\n" for member in sorted(set(members)) if member != address)
    return (
        f"{_HEAD}"
        "# The cluster's clocks agree with each other even when nothing outside can be asked.\n"
        "local stratum 10\n"
        f"bindaddress {address}\n"
        f"{allowed}"
    )


def following_conf(controller: str) -> str:
    """A member's: the controller beside whatever the host has already."""
    return f"{_HEAD}server {controller} iburst\n"


def chrony_drop_in() -> str:
    """A clock that belongs to another system is never set from here."""
    return f"{_HEAD}[Unit]\nConditionVirtualization=!container\n"
