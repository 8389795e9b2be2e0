"""A small sandbox cluster for a measurement, its hosts reached by plain ssh."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ground import BenchFailed, write_ssh_config

from shoal.providers.sandbox.provider import SandboxProvider


class Hosts:
    """The hosts of one cluster."""

    def __init__(self, config: Path, addresses: dict[str, str]) -> None:
        self.config, self.addresses = config, addresses

    def line(self, host: str, command: str) -> list[str]:
        return ["ssh", "-F", str(self.config), host, command]

    def run(self, host: str, command: str, stdin: str = "") -> str:
        done = subprocess.run(self.line(host, command), input=stdin, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise BenchFailed(f"{host}: {command[:60]}: {done.stderr.strip()}")
        return done.stdout.strip()


@contextmanager
def bring_up(folder: Path, cluster: str, text: str) -> Iterator[Hosts]:
    """`shoal up`, and `shoal down` whatever happens."""
    place = folder / cluster
    place.mkdir()
    spec = place / "shoal.yaml"
    spec.write_text(text)
    try:
        _shoal("up", spec)
        targets = [instance.target for instance in asyncio.run(SandboxProvider().instances(cluster))]
        write_ssh_config(place, targets)
        yield Hosts(place / "ssh_config", {target.name: str(target.address) for target in targets})
    finally:
        _shoal("down", spec, "--force")


def _shoal(verb: str, spec: Path, *words: str) -> None:
    # Host keys of an earlier run would be those of other machines.
    env = {**os.environ, "XDG_STATE_HOME": str(spec.parent / "state")}
    line = [sys.executable, "-m", "shoal", verb, "--file", str(spec), *words]
    done = subprocess.run(line, capture_output=True, text=True, env=env)
    if done.returncode:
        raise BenchFailed(f"shoal {verb}: {done.stdout}{done.stderr}")
