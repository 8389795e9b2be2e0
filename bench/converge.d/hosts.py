"""Fresh sandbox hosts for each tool, and plain SSH to all of them in parallel."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import BenchError
from sandbox import reserve_cluster, write_ssh_config

from shoal.hosts.provider import Instance
from shoal.sandbox.provider import SandboxProvider
from shoal.verbs.context import open_context, requests

CLUSTER = "bench-converge"
SPEC = """\
cluster: {cluster}
controller: {{provider: sandbox}}
nodesets:
  node: {{provider: sandbox, count: {nodes}, gpus: 2}}
"""
# Waits for the end of the boot, then reads the packages once: all hosts share one image, and the first tool would
# otherwise read it from disk for the others.
SETTLE = "systemctl is-system-running --wait >/dev/null; cat /var/cache/apt/archives/*.deb >/dev/null"


@dataclass(frozen=True)
class Hosts:
    """The running hosts of one set."""

    spec: Path
    directory: Path
    """A private directory for the files of a tool."""
    instances: tuple[Instance, ...]

    @property
    def controller(self) -> str:
        return self.instances[0].name

    @property
    def names(self) -> list[str]:
        return [instance.name for instance in self.instances]

    @property
    def ssh_config(self) -> Path:
        return self.directory / "ssh_config"

    @property
    def inventory(self) -> Path:
        return self.directory / "hosts.json"

    def role(self, name: str) -> str:
        return "controller" if name == self.controller else "compute"

    def ssh(self, names: Sequence[str], command: dict[str, str]) -> dict[str, str]:
        """Run the command of each host's role on it, in parallel, and return the outputs. Raises if one fails."""
        running = {
            name: subprocess.Popen(
                ["ssh", "-F", str(self.ssh_config), name, command[self.role(name)]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in names
        }
        try:
            output = {name: process.communicate()[0] for name, process in running.items()}
        except BaseException:
            for process in running.values():
                process.kill()
                process.wait()
            raise
        failed = [name for name, process in running.items() if process.returncode != 0]
        if failed:
            raise BenchError(f"a command failed on {', '.join(failed)}:\n{output[failed[0]][-2000:]}")
        return output

    def everywhere(self, command: str) -> dict[str, str]:
        return self.ssh(self.names, {"controller": command, "compute": command})

    def on_controller(self, command: str) -> str:
        return self.ssh([self.controller], {"controller": command})[self.controller]


@contextmanager
def fresh_hosts(count: int, directory: Path) -> Iterator[Hosts]:
    """New hosts: a controller and `count - 1` nodes. They are removed at the end."""
    directory.mkdir(mode=0o700)
    spec = directory / "shoal.yaml"
    spec.write_text(SPEC.format(cluster=CLUSTER, nodes=count - 1))
    with reserve_cluster(CLUSTER):
        instances = asyncio.run(_create(spec))
        hosts = Hosts(spec, directory, tuple(instances))
        _write_ssh_files(hosts)
        hosts.everywhere(SETTLE)
        time.sleep(2)
        yield hosts


async def _create(spec: Path) -> list[Instance]:
    context = open_context(spec)
    machines = requests(context.members, "sandbox")
    return await SandboxProvider().create(context.cluster, machines, lambda text, part: None)


def _write_ssh_files(hosts: Hosts) -> None:
    targets = [instance.target for instance in hosts.instances]
    write_ssh_config(hosts.directory, targets)
    entries = [
        {
            "name": target.name,
            "role": hosts.role(target.name),
            "address": target.address,
            "identity": str(target.identity),
            "known_hosts": str(hosts.directory / "known_hosts"),
        }
        for target in targets
    ]
    hosts.inventory.write_text(json.dumps(entries))
