"""Reading over Shoal's shares beside the same program set up by hand, on the same two hosts, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from ground import BenchFailed
from hosts import Hosts, bring_up

CLUSTER = "st-bench"
SPEC = f"""\
cluster: {CLUSTER}
controller: {{provider: sandbox}}
nodesets:
  fish: {{provider: sandbox, count: 1}}
storage:
  /over-ssh: {{kind: sshfs, path: /shared/over-ssh}}
  /over-nfs: {{kind: nfs, path: /shared/over-nfs}}
"""
Way = TypeVar("Way")
SIZE_MB = 192
TARGET = 0.95

# A file of noise: neither ssh nor a file system gets it smaller.
FILL = f"cd /shared; head -c {SIZE_MB}M /dev/urandom > over-ssh/noise; cp over-ssh/noise over-nfs/"

# As the manual page has it, with a key that is good for this alone.
SSHFS = """
set -eu
mkdir -p /mnt/by-hand
sshfs -o IdentityFile=/root/bench_key,StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null \
    root@{server}:/shared/over-ssh /mnt/by-hand
"""

# The smallest configuration that ganesha's documentation shows, without a grace period to wait for.
GANESHA = """
NFS_CORE_PARAM { Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; }
NFSv4 { Graceless = true; }
EXPORT { Export_Id = 1; Path = /shared/over-nfs; Pseudo = /shared/over-nfs; Access_Type = RW; Protocols = 4;
         FSAL { Name = VFS; } }
"""

# Reads a file through once; what this host still had of it is thrown away before.
READ = """
import os, sys, time
with open(sys.argv[1], "rb", buffering=0) as file:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin, total = time.perf_counter(), 0
    while block := file.read(1 << 20):
        total += len(block)
    print(total * 8 / (time.perf_counter() - begin) / 1e6)
"""
CAT = """
import subprocess, sys, time
begin, total = time.perf_counter(), 0
with subprocess.Popen(["nfs-cat", sys.argv[1]], stdout=subprocess.PIPE) as cat:
    while block := cat.stdout.read(1 << 20):
        total += len(block)
assert cat.returncode == 0, cat.returncode
print(total * 8 / (time.perf_counter() - begin) / 1e6)
"""


def measure_shares(folder: Path, rounds: int) -> str:
    """The table of both kinds of shares."""
    with bring_up(folder, CLUSTER, SPEC) as hosts:
        hosts.run("controller", FILL)
        parts = [sshfs(hosts, rounds), nfs(hosts, rounds)]
    return "\n".join(parts)


def sshfs(hosts: Hosts, rounds: int) -> str:
    key = hosts.run("fish1", "ssh-keygen -q -t ed25519 -N '' -f /root/bench_key && cat /root/bench_key.pub")
    hosts.run("controller", "cat >> /root/.ssh/authorized_keys", key + "\n")
    hosts.run("fish1", "sh -s", SSHFS.format(server=hosts.addresses["controller"]))
    ways = {"sshfs by hand": "/mnt/by-hand/noise", "Shoal's sshfs": "/over-ssh/noise"}
    return in_turns(rounds, ways, lambda path: float(hosts.run("fish1", f"python3 - {path}", READ)))


def nfs(hosts: Hosts, rounds: int) -> str:
    """The server by hand is on the other host, as two of them do not share one; read by a client of no kernel's."""
    hosts.run("fish1", "DEBIAN_FRONTEND=noninteractive apt-get install -qy nfs-ganesha nfs-ganesha-vfs libnfs-utils")
    hosts.run("controller", "DEBIAN_FRONTEND=noninteractive apt-get install -qy libnfs-utils")
    hosts.run("fish1", "systemctl stop nfs-ganesha; cat > /etc/bench.conf", GANESHA)
    hosts.run("fish1", "mkdir -p /run/ganesha; ganesha.nfsd -f /etc/bench.conf -p /run/ganesha/bench.pid")
    urls = {
        "ganesha by hand": ("controller", f"nfs://{hosts.addresses['fish1']}/shared/over-nfs/noise?version=4"),
        "Shoal's ganesha": ("fish1", f"nfs://{hosts.addresses['controller']}/shared/over-nfs/noise?version=4"),
    }

    def read(way: tuple[str, str]) -> float:
        host, url = way
        return float(hosts.run(host, f"python3 - '{url}'", CAT))

    for name, way in urls.items():
        end = time.monotonic() + 120
        while True:  # one that has just started lets its old clients have their say first
            try:
                read(way)
                break
            except BenchFailed as error:
                if time.monotonic() > end:
                    raise BenchFailed(f"{name} cannot be read: {error}") from None
                time.sleep(2)
    return in_turns(rounds, urls, read)


def in_turns(rounds: int, ways: Mapping[str, Way], read: Callable[[Way], float]) -> str:
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            found[name].append(read(ways[name]))
    middle = {name: statistics.median(values) for name, values in found.items()}
    bare, ours = ways
    ratio = middle[ours] / middle[bare]
    lines = [f"reading a file of {SIZE_MB} MB, {rounds} rounds in turns", ""]
    lines += [f"{'':16}{'median':>10}{'lowest':>10}{'highest':>10}   Mbit/s"]
    lines += [f"{name:16}{middle[name]:10.0f}{min(some):10.0f}{max(some):10.0f}" for name, some in found.items()]
    verdict = "met" if ratio >= TARGET else "MISSED"
    lines += ["", f"{ours} / {bare}, by their medians: {ratio:.3f} (target {TARGET}: {verdict})", ""]
    return "\n".join(lines)
