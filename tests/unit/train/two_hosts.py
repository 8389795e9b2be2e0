"""Two hosts made of network namespaces, joined by one link, with everything that misleads a choice of interface.

On each: its own name is 127.0.1.1 in /etc/hosts, as Debian has it; `docker0` has the same address on both; `eth0` comes
first, has an address, and leads nowhere. Only `mesh0` leads to the other host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ONE_RANK = Path(__file__).with_name("one_rank.py")
RENDEZVOUS_ONLY = Path(__file__).with_name("rendezvous_only.py")
ADDRESSES = ("10.231.77.1", "10.231.77.2")


class TwoHosts:
    def __init__(self, place: Path) -> None:
        self.place = place
        self.namespaces = [f"shoal-t{os.getpid()}-{number}" for number in (1, 2)]
        self.running: list[subprocess.Popen[str]] = []

    def start(self, host: int, environ: Mapping[str, str], script: Path, *arguments: str) -> subprocess.Popen[str]:
        """Run a script as a process of this host (0 or 1), under its name and with its /etc/hosts."""
        inside = f'hostname gpu{host + 1} && mount --bind {self.place}/hosts{host} /etc/hosts && exec "$@"'
        command = ["ip", "netns", "exec", self.namespaces[host], "unshare", "--mount", "--uts", "sh", "-c", inside, "-"]
        base = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*command, sys.executable, str(script), *arguments],
            env=base | dict(environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def cut(self) -> None:
        """From now on the first host's answers to the second are lost."""
        ip("-n", self.namespaces[0], "route", "add", "blackhole", f"{ADDRESSES[1]}/32")


def outcome(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """The JSON that the script printed, and the output of the library."""
    out, err = process.communicate(timeout=600)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert lines, err
    return json.loads(lines[-1]), err


@contextmanager
def two_hosts(place: Path) -> Iterator[TwoHosts]:
    hosts = TwoHosts(place)
    try:
        for number, name in enumerate(hosts.namespaces):
            other = 1 - number
            names = f"127.0.0.1 localhost\n127.0.1.1 gpu{number + 1}\n{ADDRESSES[other]} gpu{other + 1}\n"
            (place / f"hosts{number}").write_text(names)
            ip("netns", "add", name)
            for decoy, address in (("eth0", f"192.168.{40 + number}.5/24"), ("docker0", "172.17.0.1/16")):
                ip("-n", name, "link", "add", decoy, "type", "bridge")
                ip("-n", name, "address", "add", address, "dev", decoy)
        first, second = hosts.namespaces
        ip("-n", first, "link", "add", "mesh0", "type", "veth", "peer", "name", "mesh0", "netns", second)
        for number, name in enumerate(hosts.namespaces):
            ip("-n", name, "address", "add", f"{ADDRESSES[number]}/24", "dev", "mesh0")
            for link in ("lo", "eth0", "docker0", "mesh0"):
                ip("-n", name, "link", "set", link, "up")
        yield hosts
    finally:
        for process in hosts.running:
            process.kill()
            process.communicate()
        for name in hosts.namespaces:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
