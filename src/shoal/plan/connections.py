"""The hosts of one run: connected once, and a record of those that dropped out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Self, TypeVar

from shoal.errors import ControllerFailed, HostError
from shoal.hosts.api import Connector, Host, Target
from shoal.hosts.fanout import Outcome, fan_out

T = TypeVar("T")


class Connections:
    """Connections to many hosts. A host that fails drops out with its cause and does not stop the others."""

    def __init__(self, targets: Mapping[str, Target], connector: Connector) -> None:
        self.targets = dict(targets)
        self.failures: dict[str, HostError] = {}
        self._connector = connector
        self._connecting: dict[str, asyncio.Future[Host]] = {}
        self._hosts: dict[str, Host] = {}

    @property
    def live(self) -> list[str]:
        """The hosts that have not dropped out, in the order of the spec."""
        return [name for name in self.targets if name not in self.failures]

    def meet(self, names: Iterable[str]) -> None:
        """Begin to connect to hosts that will be needed. `host` waits for the end of it, and has the error."""
        for name in names:
            if name not in self._hosts and name not in self._connecting:
                self._connecting[name] = asyncio.ensure_future(self._connector.connect(self.targets[name]))

    async def host(self, name: str) -> Host:
        """The connection to a host, made on first use."""
        if name not in self._hosts:
            self.meet([name])
            connecting = self._connecting[name]
            try:
                # Others may wait for the same: one who gives up takes it from nobody.
                self._hosts[name] = await asyncio.shield(connecting)
            finally:
                if connecting.done() and self._connecting.get(name) is connecting:
                    del self._connecting[name]
        return self._hosts[name]

    async def each(
        self,
        names: Iterable[str],
        action: Callable[[str], Awaitable[T]],
        on_done: Callable[[Outcome[T]], None] | None = None,
    ) -> dict[str, T]:
        """Do something on many hosts at once. Answers come back by name; failures are kept in `failures`."""
        names = [name for name in names if name not in self.failures]
        outcomes = await fan_out(names, action, on_done=on_done)
        answers: dict[str, T] = {}
        for name, outcome in outcomes.items():
            if outcome.error is not None:
                self.failures[name] = outcome.error
            else:
                answers[name] = outcome.value  # type: ignore[assignment]
        return answers

    def require(self, name: str) -> None:
        """Raises when a host that nothing goes on without has dropped out, and says what happened to the others."""
        if name not in self.failures:
            return
        raise self.failures[name] if len(self.failures) == 1 else ControllerFailed(name, self.failures)

    async def close(self) -> None:
        for connecting in self._connecting.values():
            connecting.cancel()
        met = await asyncio.gather(*self._connecting.values(), return_exceptions=True)
        self._connecting.clear()
        hosts = [*self._hosts.values(), *(host for host in met if not isinstance(host, BaseException))]
        await asyncio.gather(*(host.close() for host in hosts), return_exceptions=True)
        self._hosts.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
