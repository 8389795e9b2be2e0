"""Measures each way of Shoal's and the same by hand in turns, in one run, and writes the table."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ground import BenchFailed, machine
from hosts import Hosts, bring_up
from shares import measure_shares

CLUSTER = "wg-bench"
SPEC = f"""\
cluster: {CLUSTER}
network: wireguard
controller: {{provider: sandbox}}
nodesets:
  fish: {{provider: sandbox, count: 1}}
"""
RESULTS = Path(__file__).parent.parent / "results" / "network.txt"
TARGET = 0.95
PORT = 5201

# By hand, as WireGuard's quick start has it: an interface, a key, one peer, one address.
BARE = """
set -eu
umask 077
wireguard-go bare0 2> /dev/null
wg genkey > /run/bare.key
wg set bare0 listen-port 51999 private-key /run/bare.key
ip address add {own}/24 dev bare0
ip link set bare0 mtu 1420 up
wg show bare0 public-key
"""
PEER = "wg set bare0 peer {key} allowed-ips {address}/32 endpoint {endpoint}:51999"

# Counts what comes in on one connection for some seconds, after one that does not count.
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
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=21)
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("what", nargs="?", choices=("all", "wireguard", "shares"), default="all")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="network-") as folder:
        text = machine() + "\n"
        if asked.what in ("all", "wireguard"):
            text += measure(Path(folder), asked.rounds, asked.seconds) + "\n"
        if asked.what in ("all", "shares"):
            text += measure_shares(Path(folder), asked.rounds)
    if asked.what == "all":
        RESULTS.write_text(text)
    print(text, end="")


def measure(folder: Path, rounds: int, seconds: float) -> str:
    with bring_up(folder, CLUSTER, SPEC) as hosts:
        by_hand(hosts)
        links = {
            "bare wg": "10.99.0.1",
            "Shoal": hosts.run("fish1", "getent ahostsv4 controller").split()[0],
            "no tunnel": hosts.addresses["controller"],
        }
        found: dict[str, list[float]] = {name: [] for name in links}
        for number in range(rounds):
            # Each goes first as often as the other.
            for name in sorted(links, reverse=bool(number % 2)):
                if name != "no tunnel" or number < 3:
                    found[name].append(throughput(hosts, links[name], seconds))
        version = hosts.run("fish1", "dpkg-query -W -f '${Package} ${Version}' wireguard-go")
    return table(version, found, rounds, seconds)


def by_hand(hosts: Hosts) -> None:
    own = {"controller": "10.99.0.1", "fish1": "10.99.0.2"}
    keys = {host: hosts.run(host, "sh -s", BARE.format(own=own[host])) for host in own}
    for host, other in (("controller", "fish1"), ("fish1", "controller")):
        hosts.run(host, PEER.format(key=keys[other], address=own[other], endpoint=hosts.addresses[other]))


def throughput(hosts: Hosts, address: str, seconds: float) -> float:
    """Mbit/s from fish1 to the controller at this address, over one TCP connection."""
    told = {"address": address, "port": PORT, "seconds": seconds}
    server = subprocess.Popen(
        hosts.line("controller", "python3 -"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    server.stdin.write(SERVER.format(**told))
    server.stdin.close()
    hosts.run("fish1", "python3 -", CLIENT.format(**told))
    assert server.stdout is not None
    said = server.stdout.read()
    if server.wait() or not said.strip():
        raise BenchFailed(f"nothing was measured at {address}")
    return float(said)


def table(version: str, found: dict[str, list[float]], rounds: int, seconds: float) -> str:
    middle = {name: statistics.median(values) for name, values in found.items()}
    ratio = middle["Shoal"] / middle["bare wg"]
    lines = [f"one TCP connection between two hosts ({version}), {rounds} rounds of {seconds:g} s in turns", ""]
    lines += [f"{'':12}{'median':>10}{'lowest':>10}{'highest':>10}   Mbit/s"]
    lines += [f"{name:12}{middle[name]:10.0f}{min(values):10.0f}{max(values):10.0f}" for name, values in found.items()]
    verdict = "met" if ratio >= TARGET else "MISSED"
    lines += ["", f"Shoal / bare wg, by their medians: {ratio:.3f} (target {TARGET}: {verdict})"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        main()
    except BenchFailed as failure:
        sys.exit(f"bench/network: {failure}")
