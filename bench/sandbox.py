"""Sandbox clusters for benches: removed before and after, and reached by plain ssh."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.leftovers import noted

from shoal.hosts.api import Target
from shoal.sandbox.provider import SandboxProvider


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
