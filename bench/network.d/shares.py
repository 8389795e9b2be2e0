"""Reads from Shoal's shares, beside the same program set up by hand on the same two hosts, in turns."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from harness import BenchError
from hosts import Hosts, create_cluster

SPEC = """\
cluster: bench-shares
controller: {provider: sandbox}
nodesets:
  fish: {provider: sandbox, count: 1}
storage:
  /over-ssh: {kind: sshfs, path: /shared/over-ssh}
  /over-nfs: {kind: nfs, path: /shared/over-nfs}
"""
Source = TypeVar("Source")
SIZE_MB = 192
SERVER_TIMEOUT_S = 120
TARGET = 0.95

# Random data, so that nothing can compress it.
FILL = "cd /shared; head -c {size}M /dev/urandom > over-ssh/noise; cp over-ssh/noise over-nfs/"

# As in the manual page, with a key of its own.
SSHFS = """
set -eu
mkdir -p /mnt/by-hand
sshfs -o IdentityFile=/root/bench_key,StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null \
    root@{server}:/shared/over-ssh /mnt/by-hand
"""

# The smallest configuration in the documentation of ganesha, without a grace period.
GANESHA = """
NFS_CORE_PARAM { Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; }
NFSv4 { Graceless = true; }
EXPORT { Export_Id = 1; Path = /shared/over-nfs; Pseudo = /shared/over-nfs; Access_Type = RW; Protocols = 4;
         FSAL { Name = VFS; } }
"""

# Reads a file once, after dropping it from the page cache of this host.
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


def measure_shares(folder: Path, options: argparse.Namespace, size_mb: int) -> str:
    """The table for both kinds of shares."""
    with create_cluster(folder, SPEC, options) as hosts:
        hosts.run("controller", FILL.format(size=size_mb))
        tables = [measure_sshfs(hosts, options.rounds), measure_nfs(hosts, options.rounds)]
    return f"reading a file of {size_mb} MB, {options.rounds} rounds in turns\n\n" + "\n".join(tables)


def measure_sshfs(hosts: Hosts, rounds: int) -> str:
    key = hosts.run("fish1", "ssh-keygen -q -t ed25519 -N '' -f /root/bench_key && cat /root/bench_key.pub")
    hosts.run("controller", "cat >> /root/.ssh/authorized_keys", key + "\n")
    hosts.run("fish1", "sh -s", SSHFS.format(server=hosts.addresses["controller"]))
    paths = {"sshfs by hand": "/mnt/by-hand/noise", "Shoal's sshfs": "/over-ssh/noise"}
    return measure_in_turns(rounds, paths, lambda path: float(hosts.run("fish1", f"python3 - {path}", READ)))


def measure_nfs(hosts: Hosts, rounds: int) -> str:
    """The server by hand is on the other host: a host runs one server. The client is libnfs, not the kernel."""
    hosts.run("fish1", "DEBIAN_FRONTEND=noninteractive apt-get install -qy nfs-ganesha nfs-ganesha-vfs libnfs-utils")
    hosts.run("controller", "DEBIAN_FRONTEND=noninteractive apt-get install -qy libnfs-utils")
    hosts.run("fish1", "systemctl stop nfs-ganesha; cat > /etc/bench.conf", GANESHA)
    hosts.run("fish1", "mkdir -p /run/ganesha; ganesha.nfsd -f /etc/bench.conf -p /run/ganesha/bench.pid")
    urls = {
        "ganesha by hand": ("controller", f"nfs://{hosts.addresses['fish1']}/shared/over-nfs/noise?version=4"),
        "Shoal's ganesha": ("fish1", f"nfs://{hosts.addresses['controller']}/shared/over-nfs/noise?version=4"),
    }

    def read(source: tuple[str, str]) -> float:
        host, url = source
        return float(hosts.run(host, f"python3 - '{url}'", CAT))

    for name, source in urls.items():
        end = time.monotonic() + SERVER_TIMEOUT_S
        while True:  # a server that has just started waits for its former clients first
            try:
                read(source)
                break
            except BenchError as error:
                if time.monotonic() > end:
                    raise BenchError(f"cannot read from {name}: {error}") from None
                time.sleep(2)
    return measure_in_turns(rounds, urls, read)


def measure_in_turns(rounds: int, sources: Mapping[str, Source], read: Callable[[Source], float]) -> str:
    rates: dict[str, list[float]] = {name: [] for name in sources}
    for number in range(rounds):
        for name in sorted(sources, reverse=bool(number % 2)):
            rates[name].append(read(sources[name]))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    bare, ours = sources
    ratio = medians[ours] / medians[bare]
    lines = [f"{'':16}{'median':>10}{'minimum':>10}{'maximum':>10}   Mbit/s"]
    lines += [f"{name:16}{medians[name]:10.0f}{min(values):10.0f}{max(values):10.0f}" for name, values in rates.items()]
    status = "met" if ratio >= TARGET else "MISSED"
    lines += ["", f"{ours} / {bare}, by medians: {ratio:.3f} (target {TARGET}: {status})", ""]
    return "\n".join(lines)
