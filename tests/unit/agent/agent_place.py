"""A temporary directory for documents, and a session with the real agent on this machine."""

import grp
import os
import pwd
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.agent.client import AgentSession, ItemResult
from shoal.agent.document import Directory, File, Item, SecretRef
from shoal.hosts.api import Target
from shoal.hosts.local import LocalHost
from shoal.hosts.process import LineProcess

ME = {"owner": pwd.getpwuid(os.geteuid()).pw_name, "group": grp.getgrgid(os.getegid()).gr_name}


class Place:
    """Where a test works: paths and items below a temporary directory."""

    def __init__(self, folder: Path, session: AgentSession) -> None:
        self.folder = folder
        self.session = session
        self.told: list[str] = []

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def file(self, name: str, content: str | bytes | SecretRef | None = "", **more: Any) -> File:
        return File(self.path(name), content, **{**ME, **more})

    def directory(self, name: str, **more: Any) -> Directory:
        return Directory(self.path(name), **{**ME, **more})

    async def check(self, *items: Item) -> tuple[ItemResult, ...]:
        return (await self.session.check(items)).items

    async def apply(self, *items: Item, **secrets: bytes) -> tuple[ItemResult, ...]:
        report = await self.session.apply(items, secrets, lambda event: self.told.append(event.text))
        return report.items


class WithPython(LocalHost):
    """This machine with another `python3`."""

    def __init__(self, python: Sequence[str]) -> None:
        super().__init__(Target("here"), through_sudo=False)
        self.python = python

    async def start(self, argv: Sequence[str], *, root: bool = True) -> LineProcess:
        return await super().start([*self.python, *argv[1:]], root=root)


class Apart(LocalHost):
    """This machine with other mounts: a shell program lays them over it, in a namespace that ends with the agent.

    It gets the test's folder as its first argument, and after that what it is to run in the end.
    """

    def __init__(self, folder: Path, setup: str) -> None:
        super().__init__(Target("here"))
        self.prefix = ("unshare", "--mount", "--propagation", "private", "sh", "-c", setup, "sh", str(folder))

    async def start(self, argv: Sequence[str], *, root: bool = True) -> LineProcess:
        return await super().start([*self.prefix, *argv], root=root)


def here() -> LocalHost:
    return LocalHost(Target("here"), through_sudo=False)
