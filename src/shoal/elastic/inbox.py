"""The notes that Slurm's programs leave, read by the service. They say what to look at first, and which job waits."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from shoal.elastic.request import LARGEST, REQUESTS, VERBS
from shoal.hostlist import HostlistError, expand

log = logging.getLogger("shoal.elastic.inbox")


@dataclass(frozen=True)
class Request:
    """Slurm asks for nodes to be powered up or down."""

    verb: str
    nodes: tuple[str, ...]
    jobs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Jobs with the nodes that they wait for."""


class Inbox:
    """A directory that Slurm's user writes to. What is in it is not trusted: it wakes us, and Slurm is asked."""

    def __init__(self, directory: Path = Path(REQUESTS)) -> None:
        self._directory = directory

    def waiting(self) -> bool:
        """Whether there is something to take."""
        return bool(self._names())

    def take(self) -> list[Request]:
        """All that was asked, oldest first. Each is returned once; what makes no sense is thrown away and logged."""
        requests: list[Request] = []
        for name in self._names():
            path = self._directory / name
            try:
                requests.append(_read(path))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("request %s cannot be understood and is left out: %s", name, error)
            path.unlink(missing_ok=True)
        return requests

    def _names(self) -> list[str]:
        try:
            found = [entry for entry in os.scandir(self._directory) if not entry.name.startswith(".")]
            # A directory there is not ours to remove, and no request.
            return sorted(entry.name for entry in found if not entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []


def _read(path: Path) -> Request:
    # Never through a link: the directory is another user's.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        told = json.loads(file.read(LARGEST))
    if told["verb"] not in VERBS:
        raise ValueError(f"nobody knows how to {told['verb']!r}")
    try:
        jobs = tuple((str(job["id"]), tuple(expand(job["nodes"]))) for job in told["jobs"])
        return Request(told["verb"], tuple(expand(told["nodes"])), jobs)
    except HostlistError as error:
        raise ValueError(str(error)) from error
