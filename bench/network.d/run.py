"""Throughput of Shoal's WireGuard network and shares, beside the same set up by hand on the same hosts, in turns."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
from pathlib import Path

from harness import BenchError, bench_parser, describe_machine, report, run_bench
from hosts import Hosts, create_cluster
from sandbox import add_cluster_options
from shares import SIZE_MB, measure_shares

SPEC = """\
cluster: bench-network
network: wireguard
controller: {provider: sandbox}
nodesets:
  fish: {provider: sandbox, count: 1}
"""
TARGET = 0.95
PORT = 5201

# By hand, as in the quick start of WireGuard: an interface, a key, one peer, one address. Its name tells Shoal that it
# is no way to this host: with another, the controller of a cluster that rents would lower the MTU of its network.
BARE = """
set -eu
umask 077
wireguard-go shoal-bare 2> /dev/null
wg genkey > /run/bare.key
wg set shoal-bare listen-port 51999 private-key /run/bare.key
ip address add {own}/24 dev shoal-bare
ip link set shoal-bare mtu 1420 up
wg show shoal-bare public-key
"""
REMOVE_BARE = "ip link delete shoal-bare; rm -f /run/bare.key"
PEER = "wg set shoal-bare peer {key} allowed-ips {address}/32 endpoint {endpoint}:51999"

# Counts the bytes that arrive on one connection for some seconds, after a second that is not counted.
SERVER = """
import socket, time
with socket.create_server(("{address}", {port})) as server:
    link, _ = server.accept()
    buffer = bytearray(1 << 20)
    begin, total = time.monotonic() + 1, 0
    while True:
        size = link.recv_into(buffer)
        now = time.monotonic()
        total += size if now >= begin else 0
        if not size or now >= begin + {seconds}:
            break
    print(total * 8 / (now - begin) / 1e6)
"""
CLIENT = """
import socket, time
for _ in range(100):
    try:
        link = socket.create_connection(("{address}", {port}), 5)
        break
    except OSError:
        time.sleep(0.1)
block = bytes(1 << 18)
try:
    while True:
        link.sendall(block)
except OSError:
    pass
"""


def main() -> None:
    parser = bench_parser("network", __doc__)
    parser.add_argument("what", nargs="?", choices=("all", "wireguard", "shares"), default="all")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=2.0)
    add_cluster_options(parser)
    options = parser.parse_args()
    if options.small:
        options.rounds, options.seconds = 1, 0.5
    if options.save and options.what != "all":
        parser.error("--save needs both parts")
    if options.on and options.what != "wireguard":
        parser.error("--on is for `wireguard` alone: the peers of the shares are packages that would stay on the hosts")
    with tempfile.TemporaryDirectory(prefix="network-") as folder:
        text = describe_machine(options) + "\n"
        if options.what in ("all", "wireguard"):
            text += measure(Path(folder), options) + "\n"
        if options.what in ("all", "shares"):
            text += measure_shares(Path(folder), options, size_mb=8 if options.small else SIZE_MB)
    report("network", options, text)


def measure(folder: Path, options: argparse.Namespace) -> str:
    with create_cluster(folder, SPEC, options) as hosts:
        create_bare_link(hosts)
        try:
            rates = measure_links(hosts, options.rounds, options.seconds)
            version = hosts.run("fish1", "dpkg-query -W -f '${Package} ${Version}' wireguard-go")
        finally:
            for host in ("controller", "fish1"):
                hosts.run(host, REMOVE_BARE)
    return table(version, rates, options.rounds, options.seconds)


def measure_links(hosts: Hosts, rounds: int, seconds: float) -> dict[str, list[float]]:
    links = {
        "bare wg": "10.99.0.1",
        "Shoal": hosts.run("fish1", "getent ahostsv4 controller").split()[0],
        "no tunnel": hosts.addresses["controller"],
    }
    rates: dict[str, list[float]] = {name: [] for name in links}
    for number in range(rounds):
        # Each is first in every other round.
        for name in sorted(links, reverse=bool(number % 2)):
            if name != "no tunnel" or number < 3:
                rates[name].append(throughput(hosts, links[name], seconds))
    return rates


def create_bare_link(hosts: Hosts) -> None:
    own = {"controller": "10.99.0.1", "fish1": "10.99.0.2"}
    keys = {host: hosts.run(host, "sh -s", BARE.format(own=own[host])) for host in own}
    for host, other in (("controller", "fish1"), ("fish1", "controller")):
        hosts.run(host, PEER.format(key=keys[other], address=own[other], endpoint=hosts.addresses[other]))


def throughput(hosts: Hosts, address: str, seconds: float) -> float:
    """Mbit/s from fish1 to the controller at this address, over one TCP connection."""
    values = {"address": address, "port": PORT, "seconds": seconds}
    server = subprocess.Popen(
        hosts.line("controller", "python3 -"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    server.stdin.write(SERVER.format(**values))
    server.stdin.close()
    hosts.run("fish1", "python3 -", CLIENT.format(**values))
    assert server.stdout is not None
    output = server.stdout.read()
    if server.wait() or not output.strip():
        raise BenchError(f"the connection to {address} transferred nothing")
    return float(output)


def table(version: str, rates: dict[str, list[float]], rounds: int, seconds: float) -> str:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["Shoal"] / medians["bare wg"]
    lines = [f"one TCP connection between two hosts ({version}), {rounds} rounds of {seconds:g} s in turns", ""]
    lines += [f"{'':12}{'median':>10}{'minimum':>10}{'maximum':>10}   Mbit/s"]
    lines += [f"{name:12}{medians[name]:10.0f}{min(values):10.0f}{max(values):10.0f}" for name, values in rates.items()]
    status = "met" if ratio >= TARGET else "MISSED"
    lines += ["", f"Shoal / bare wg, by medians: {ratio:.3f} (target {TARGET}: {status})"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_bench("network", main)
