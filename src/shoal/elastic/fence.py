"""Of two services that rent for one cluster the later one is in charge; the earlier one touches nothing any more.

A controller that moves to another host may leave its service behind, where nobody could reach it. Every order carries
in its token since when its service is in charge, so providers' lists tell the two apart. A service that sees a machine
of a later one has been succeeded: it orders and deletes nothing from then on, restarted or not, until `shoal up` puts
it in charge again. To the later one, machines of the earlier are nobody's, and it gives them back.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.elastic.source import Source

log = logging.getLogger("shoal.elastic.fence")

_TOKEN = re.compile(r"[0-9a-f]{8}x([0-9a-f]{8})")


@dataclass
class Fence:
    """The time in which this service is in charge."""

    since: int = 0
    """Seconds since 1970, as `shoal up` noted them when it put the service in charge."""
    mark: Path | None = None
    """Where is written that it has been succeeded."""
    ended: str = ""
    """By whom, for people; empty while it is in charge."""

    def __post_init__(self) -> None:
        if self.mark is not None and self.mark.exists():
            said, _, _ = self.mark.read_text(encoding="utf-8").partition("\n")
            self.ended = said or "another service is in charge"

    def token(self) -> str:
        """A new one, for one order. What differs comes first: some providers show only the beginning."""
        return f"{secrets.token_hex(4)}x{self.since:08x}"

    def look(self, sources: Iterable[Source], is_ours: Callable[[str], bool]) -> None:
        """See whether a list shows a machine of a later service. It is written down before anybody acts on it."""
        for source in sources:
            for token, machines in source.seen.machines.items() if source.seen else ():
                if not self.ended and _since(token) > self.since and not is_ours(token):
                    self._end(f"{machines[0].id} of {source.name}", _since(token))

    def _end(self, machine: str, since: int) -> None:
        self.ended = (
            f"{machine} was rented by a later service of this cluster's; this one touches nothing any more until "
            "`shoal up` puts it in charge"
        )
        if self.mark is not None:
            # Who is put in charge next is later than that one, whatever the clocks of both say.
            self.mark.write_text(f"{self.ended}\nsince {since}\n", encoding="utf-8")
        log.error("%s", self.ended)


def _since(token: str) -> int:
    """Since when the service was in charge that ordered it."""
    found = _TOKEN.fullmatch(token)
    return int(found[1], 16) if found else 0
