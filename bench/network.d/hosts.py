"""A small sandbox cluster, with plain ssh to its hosts."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import BenchError
from sandbox import provide_cluster, targets, write_ssh_config


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
def create_cluster(folder: Path, text: str, options: argparse.Namespace) -> Iterator[Hosts]:
    """A cluster by `shoal up`, which is removed at the end, or the one of `--on`."""
    directory = folder / text.split("cluster:")[1].split()[0]
    directory.mkdir()
    # A state directory of its own: host keys of an earlier run would not match.
    os.environ["XDG_STATE_HOME"] = str(directory / "state")
    with provide_cluster(directory, text, options) as (cluster, _, _):
        hosts = targets(cluster)
        write_ssh_config(directory, hosts)
        yield Hosts(directory / "ssh_config", {target.name: str(target.address) for target in hosts})
