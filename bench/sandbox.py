"""Sandbox clusters for benches: removed before and after, and reached by plain ssh."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import run_command
from tests.e2e.leftovers import noted

from shoal.hosts.api import Target
from shoal.sandbox.provider import SandboxProvider

NODE = "fish1"
"""The first node of every cluster that `provide_cluster` has."""
USER = "ada"
"""Who has a key on these clusters, where a bench needs an ordinary user."""


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Options of benches that can run on a cluster which is up, with their smallest size."""
    parser.add_argument("--on", type=Path, metavar="FILE", help="use the sandbox cluster of this file, which is up")
    parser.add_argument("--key", type=Path, help=f"with --on: the private key of its user {USER}")


@contextmanager
def provide_cluster(directory: Path, text: str, options: argparse.Namespace) -> Iterator[tuple[str, Path, Path]]:
    """The name of a cluster that is up, its file, and the key of USER: that of `--on`, or one of this text.

    The text has KEY where the path of the user's key belongs. The bench takes away what it puts on the cluster.
    """
    if options.on:
        yield options.on.read_text().split("cluster:")[1].split()[0], options.on, options.key
        return
    name, file, key = text.split("cluster:")[1].split()[0], directory / "shoal.yaml", directory / "key"
    run_command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    file.write_text(text.replace("KEY", str(key)))
    with reserve_cluster(name):
        run_command(Path(sys.executable).with_name("shoal"), "up", "--file", file)
        yield name, file, key


def targets(cluster: str) -> list[Target]:
    return [instance.target for instance in asyncio.run(SandboxProvider().instances(cluster))]


@contextmanager
def reserve_cluster(cluster: str) -> Iterator[None]:
    """Reserve the name of a cluster, and remove its hosts before and after.

    If the bench is killed, the next run of scripts/test removes them.
    """
    with noted(cluster):
        _remove_hosts(cluster)
        try:
            yield
        finally:
            _remove_hosts(cluster)


def _remove_hosts(cluster: str) -> None:
    asyncio.run(SandboxProvider().destroy(cluster, lambda text, part: None))


def write_ssh_config(directory: Path, targets: Iterable[Target]) -> None:
    """Write the files with which `ssh -F directory/ssh_config NAME` reaches the sandbox hosts."""
    known_hosts = directory / "known_hosts"
    hosts = list(targets)
    known_hosts.write_text("".join(f"{target.address} {target.host_key}\n" for target in hosts))
    entries = "".join(f"Host {target.name}\n  HostName {target.address}\n" for target in hosts)
    (directory / "ssh_config").write_text(
        f"{entries}Host *\n  User root\n  StrictHostKeyChecking yes\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {known_hosts}\n  IdentityFile {hosts[0].identity}\n"
    )
