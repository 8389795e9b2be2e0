"""Which of two services of one cluster is the leader: the later one. The earlier one changes nothing any more.

A former controller that `shoal up --leave-rented` could not reach may still have its service. Every order carries in
its token when its service became the leader, so lists of providers tell the two apart. A service that sees a machine of
a later one is superseded: it orders and deletes nothing, even after a restart, until `shoal up` makes it the leader
again. For the later one, machines of the earlier are orphans, and it deletes them.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.cloud.service.provider_account import AccountClient

log = logging.getLogger("shoal.elastic")

_TOKEN = re.compile(r"[0-9a-f]{8}x([0-9a-f]{8})")


@dataclass
class Leadership:
    """Whether this service is the leader, and since when."""

    since: int = 0
    """Seconds since 1970, as `shoal up` recorded them when it made the service the leader."""
    mark: Path | None = None
    """The file that records that it was superseded."""
    superseded: str = ""
    """By which machine's service, as a message; empty while it is the leader."""

    def __post_init__(self) -> None:
        if self.mark is not None and self.mark.exists():
            message, _, _ = self.mark.read_text(encoding="utf-8").partition("\n")
            self.superseded = message or "another service is the leader"

    def token(self) -> str:
        """A new token for one order. The random part comes first: some providers show only the beginning."""
        return f"{secrets.token_hex(4)}x{self.since:08x}"

    def check(self, accounts: Iterable[AccountClient], is_ours: Callable[[str], bool]) -> None:
        """Check whether a list shows a machine of a later service. The result is stored before anything acts on it."""
        for account in accounts:
            for token, machines in account.listing.instances.items() if account.listing else ():
                if self.superseded or _since(token) <= self.since or is_ours(token):
                    continue
                self.superseded = (
                    f"{machines[0].id} of {account.name} was rented by a later service of this cluster; this one "
                    "changes nothing until `shoal up` makes it the leader"
                )
                if self.mark is not None:
                    # the next leader must be later than that one, whatever the clocks of both say
                    self.mark.write_text(f"{self.superseded}\nsince {_since(token)}\n", encoding="utf-8")
                log.error("%s", self.superseded)


def _since(token: str) -> int:
    """When the service that ordered it became the leader."""
    match = _TOKEN.fullmatch(token)
    return int(match[1], 16) if match else 0
