"""A small sandbox cluster, with plain ssh to its hosts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import BenchError, run_command
from sandbox import reserve_cluster, write_ssh_config

from shoal.sandbox.provider import SandboxProvider


class Hosts:
    """The hosts of one cluster."""

    def __init__(self, config: Path, addresses: dict[str, str]) -> None:
        self.config, self.addresses = config, addresses

    def line(self, host: str, command: str) -> list[str]:
        return ["ssh", "-F", str(self.config), host, command]

    def run(self, host: str, command: str, stdin: str = "") -> str:
        done = subprocess.run(self.line(host, command), input=stdin, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise BenchError(f"{host}: {command[:60]}: {done.stderr.strip()}")
        return done.stdout.strip()


@contextmanager
def create_cluster(folder: Path, cluster: str, text: str) -> Iterator[Hosts]:
    """Build a cluster with `shoal up`; remove it at the end."""
    directory = folder / cluster
    directory.mkdir()
    spec = directory / "shoal.yaml"
    spec.write_text(text)
    with reserve_cluster(cluster):
        # A state directory of its own: host keys of an earlier run would not match.
        os.environ["XDG_STATE_HOME"] = str(directory / "state")
        run_command(sys.executable, "-m", "shoal", "up", "--file", spec)
        targets = [instance.target for instance in asyncio.run(SandboxProvider().instances(cluster))]
        write_ssh_config(directory, targets)
        yield Hosts(directory / "ssh_config", {target.name: str(target.address) for target in targets})
