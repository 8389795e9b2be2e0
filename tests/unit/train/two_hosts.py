"""Two hosts made of network namespaces, joined by one link, with everything that misleads a choice of interface.

On each: its own name is 127.0.1.1 in /etc/hosts, as Debian has it; `docker0` has the same address on both; `eth0` comes
first, has an address, and leads nowhere. Only `mesh0` leads to the other host.
"""

import ctypes
import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from tests.unit.train.procs import start_script

Script = tuple[Any, TextIO, Path]
"""Its process, its output, and the file with its errors."""
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
ONE_RANK = Path(__file__).with_name("one_rank.py")
RENDEZVOUS_ONLY = Path(__file__).with_name("rendezvous_only.py")
ADDRESSES = ("10.231.77.1", "10.231.77.2")


class TwoHosts:
    def __init__(self, place: Path) -> None:
        self.place = place
        self.namespaces = [f"shoal-t{os.getpid()}-{number}" for number in (1, 2)]
        self.running: list[Script] = []

    def start(self, host: int, environ: Mapping[str, str], script: Path, *arguments: str) -> Script:
        """Run a script as a process of this host (0 or 1), under its name and with its /etc/hosts."""
        entry = partial(enter, self.namespaces[host], f"gpu{host + 1}", f"{self.place}/hosts{host}")
        errors = self.place / f"errors{len(self.running)}"
        process, output = start_script(script, *arguments, errors=errors, enter=entry, **environ)
        self.running.append((process, output, errors))
        return self.running[-1]

    def cut(self) -> None:
        """From now on the first host's answers to the second are lost."""
        ip("-n", self.namespaces[0], "route", "add", "blackhole", f"{ADDRESSES[1]}/32")


def enter(namespace: str, host: str, names: str) -> None:
    """Make this process one of that host, as `ip netns exec` and `unshare --mount --uts` would."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: Any) -> None:
        if getattr(libc, function)(*arguments):
            raise OSError(ctypes.get_errno(), f"{function}{arguments}")

    with open(f"/run/netns/{namespace}") as file:
        call("setns", file.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS | CLONE_NEWUTS)
    socket.sethostname(host)
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)  # with the interfaces of the namespace
    call("mount", names.encode(), b"/etc/hosts", None, MS_BIND, None)


def outcome(script: Script) -> tuple[dict[str, Any], str]:
    """The JSON that the script printed, and the output of the library."""
    process, output, errors = script
    lines = [line for line in output if line.startswith("{")]
    process.join(600)
    assert lines, errors.read_text()
    return json.loads(lines[-1]), errors.read_text()


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
        for process, output, _ in hosts.running:
            process.kill()
            process.join()
            output.close()
        for name in hosts.namespaces:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
