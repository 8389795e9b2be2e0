"""Existing hosts for tests: the sandbox makes them, and the spec names them by address like any server."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from tests.e2e.cluster import IMAGE, end_connections, keep_connection
from tests.e2e.leftovers import noted

from shoal.hosts.provider import Instance, Request
from shoal.local_files import cache_dir, state_directory
from shoal.sandbox.layout import Layout
from shoal.sandbox.provider import SandboxProvider
from shoal.spec.member import Shape


class Lent:
    """Some hosts, and a root shell on each that does not go through Shoal."""

    def __init__(self, made_as: str, instances: Mapping[str, Instance]) -> None:
        self._layout, self.instances = Layout(cache_dir(), made_as), instances

    @property
    def identity(self) -> str:
        return str(next(iter(self.instances.values())).target.identity)

    def entry(self, name: str) -> str:
        """The host as a spec names it."""
        return f"{{name: {name}, address: {self.instances[name].target.address}}}"

    def shell(self, name: str, script: str, *, status: int | None = 0) -> str:
        """Run a shell script on a host as root, and return what it printed."""
        done = subprocess.run(
            ["ssh", "-q", *keep_connection(self._layout, name), "-i", self.identity,
             "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
             "-o", "KexAlgorithms=curve25519-sha256",  # the quickest
             f"root@{self.instances[name].target.address}", "sh -s"],
            input=script, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert status is None or done.returncode == status, f"{name}: {script}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@contextmanager
def lent_hosts(made_as: str, shapes: Mapping[str, Shape], *clusters: str) -> Iterator[Lent]:
    """Sandbox hosts for as long as the block lasts. `clusters` are the specs that name them, forgotten at the end."""
    provider = SandboxProvider()

    def clean() -> None:
        end_connections(Layout(cache_dir(), made_as))
        asyncio.run(provider.destroy(made_as, _quiet))
        for cluster in clusters:
            shutil.rmtree(state_directory(cluster), ignore_errors=True)

    with noted(made_as):
        clean()
        try:
            requests = [Request(name, _on_image(shape)) for name, shape in shapes.items()]
            made = asyncio.run(provider.create(made_as, requests, _quiet))
            yield Lent(made_as, {instance.name: instance for instance in made})
        finally:
            clean()


def spec_text(cluster: str, lent: Lent, controller: str, others: tuple[str, ...], *, compute: bool = False) -> str:
    """A spec that names lent hosts by their addresses, logged in to as a user with sudo."""
    reach = f"user: shoal, identity: {lent.identity}"
    flag = ", compute: true" if compute else ""
    hosts = ", ".join(lent.entry(name) for name in others)
    return (
        f"cluster: {cluster}\n"
        f"controller: {{host: {lent.entry(controller)}{flag}, {reach}}}\n"
        f"nodesets:\n  lab: {{hosts: [{hosts}], {reach}}}\n"
    )


def _on_image(shape: Shape) -> Shape:
    return replace(shape, image=IMAGE) if IMAGE and shape.image == Shape().image else shape


def _quiet(text: str, part: float) -> None: ...
