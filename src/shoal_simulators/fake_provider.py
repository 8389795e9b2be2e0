"""A provider in memory, for tests: hosts are records, and creation can fail on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.errors import ProviderError
from shoal.hosts.api import Target
from shoal.hosts.provider import Instance, Progress, Request
from shoal.spec.finding import Finding


class FakeFaults:
    """Faults as states: a frozen host says `frozen`, a killed one `stopped`; `cuts` and `full` hold the others."""

    def __init__(self, clusters: dict[str, dict[str, Instance]]) -> None:
        self._clusters = clusters
        self.cuts: set[tuple[str, str]] = set()
        self.full: set[tuple[str, str]] = set()
        self.reboots: list[tuple[str, str]] = []

    async def cut(self, cluster: str, host: str) -> None:
        self._find(cluster, host)
        self.cuts.add((cluster, host))

    async def heal(self, cluster: str, host: str) -> None:
        self._find(cluster, host)
        self.cuts.discard((cluster, host))

    async def freeze(self, cluster: str, host: str) -> None:
        self._set(cluster, host, "frozen")

    async def thaw(self, cluster: str, host: str) -> None:
        self._set(cluster, host, "running")

    async def kill(self, cluster: str, host: str) -> None:
        self._set(cluster, host, "stopped")

    async def reboot(self, cluster: str, host: str) -> None:
        self._set(cluster, host, "running")
        self.reboots.append((cluster, host))

    async def fill_disk(self, cluster: str, host: str) -> None:
        self._find(cluster, host)
        self.full.add((cluster, host))

    async def empty_disk(self, cluster: str, host: str) -> None:
        self._find(cluster, host)
        self.full.discard((cluster, host))

    def _find(self, cluster: str, host: str) -> Instance:
        try:
            return self._clusters[cluster][host]
        except KeyError:
            raise ProviderError(f"fake cluster {cluster} has no host {host}") from None

    def _set(self, cluster: str, host: str, state: str) -> None:
        self._clusters[cluster][host] = replace(self._find(cluster, host), state=state)


class FakeProvider:
    """Keeps instances in a dictionary. `failing` names the hosts that cannot be made, with the reason."""

    def __init__(self, *, findings: Sequence[Finding] = ()) -> None:
        self.findings = list(findings)
        self.failing: dict[str, str] = {}
        self.clusters: dict[str, dict[str, Instance]] = {}
        self.faults = FakeFaults(self.clusters)
        self._made = 0

    def check(self, requests: Sequence[Request]) -> list[Finding]:
        return list(self.findings)

    async def instances(self, cluster: str) -> list[Instance]:
        return list(self.clusters.get(cluster, {}).values())

    async def create(self, cluster: str, requests: Sequence[Request], progress: Progress) -> list[Instance]:
        hosts = self.clusters.setdefault(cluster, {})
        failed = {request.name: self.failing[request.name] for request in requests if request.name in self.failing}
        for count, request in enumerate(requests, start=1):
            if request.name in failed:
                continue
            if request.name not in hosts:
                hosts[request.name] = self._new(request)
            elif hosts[request.name].state == "stopped":
                hosts[request.name] = replace(hosts[request.name], state="running")
            progress(f"host {request.name} is up", count / len(requests))
        if failed:
            raise ProviderError("; ".join(f"host {name}: {why}" for name, why in failed.items()), hosts=failed)
        return [hosts[request.name] for request in requests]

    async def delete(self, cluster: str, names: Sequence[str], progress: Progress) -> None:
        for name in names:
            self.clusters.get(cluster, {}).pop(name, None)
        progress("hosts removed", 1.0)

    async def destroy(self, cluster: str, progress: Progress) -> None:
        self.clusters.pop(cluster, None)
        progress("cluster removed", 1.0)

    def _new(self, request: Request) -> Instance:
        self._made += 1
        target = Target(name=request.name, address=f"192.0.2.{self._made}", port=22, user="root")
        return Instance(name=request.name, state="running", target=target, shape=request.shape)
