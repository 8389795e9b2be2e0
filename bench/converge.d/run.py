"""First run and no-op run of Shoal, pyinfra and Ansible on the same kind of fresh hosts, as one table."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from contestants import SHOAL, Ansible, Contestant, Pyinfra, Shoal, timed
from ground import BenchFailed, machine
from hosts import Hosts, fresh_hosts

PACKAGES = "packages alone"
APT = "DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends"
INSTALL = APT + " munge slurm-client {} nftables libpmix2"


@dataclass
class Times:
    """Seconds of one contestant on one number of hosts."""

    first: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)


Table = dict[int, dict[str, Times]]


def main() -> int:
    options = _arguments()
    signal.signal(signal.SIGTERM, _interrupt)
    # Short, because the paths of Ansible's sockets are in it and may have 100 characters at most.
    scratch = Path(tempfile.mkdtemp(prefix="converge-"))
    os.environ["XDG_STATE_HOME"] = str(scratch / "state")
    try:
        print(_heading(options), flush=True)
        table = _measure(options, scratch)
    except BenchFailed as failure:
        print(f"bench/converge: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench/converge: interrupted; the hosts are removed", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(_targets(table))
    return 0


def _measure(options: argparse.Namespace, scratch: Path) -> Table:
    contestants: list[Contestant] = [Shoal(), Pyinfra(options.peers), Ansible(options.peers)]
    names = [PACKAGES, *(contestant.name for contestant in contestants)]
    places = (scratch / str(number) for number in itertools.count())
    table: Table = {}
    for count in options.hosts:
        rows = {name: Times() for name in names}
        for _ in range(options.rounds):
            _say(f"{count} hosts: {PACKAGES}")
            with fresh_hosts(count, next(places)) as hosts:
                _install_packages(hosts, rows[PACKAGES])
            for contestant in contestants:
                _say(f"{count} hosts: {contestant.name}")
                with fresh_hosts(count, next(places)) as hosts:
                    _compete(contestant, hosts, rows[contestant.name], options.no_ops)
        table[count] = rows
        print(_block(count, rows), flush=True)
    return table


def _install_packages(hosts: Hosts, times: Times) -> None:
    begin = time.perf_counter()
    hosts.ssh(hosts.names, {"controller": INSTALL.format("slurmctld"), "compute": INSTALL.format("slurmd")})
    times.first.append(time.perf_counter() - begin)
    _say(f"  installed {times.first[-1]:.2f} s")


def _compete(contestant: Contestant, hosts: Hosts, times: Times, no_ops: int) -> None:
    contestant.prepare(hosts)
    try:
        seconds, _ = timed(contestant, hosts)
        times.first.append(seconds)
        _say(f"  first run {seconds:.2f} s")
        _expect_a_cluster(hosts)
        for _ in range(no_ops):
            seconds, output = timed(contestant, hosts)
            if not contestant.unchanged(output):
                raise BenchFailed(f"{contestant.name} changed something in a second run:\n{output[-4000:]}")
            times.again.append(seconds)
            _say(f"  no-op run {seconds:.2f} s")
        _expect_what_shoal_wants(contestant, hosts)
    finally:
        contestant.finish(hosts)


def _expect_a_cluster(hosts: Hosts) -> None:
    """A job on all nodes at once names every one of them."""
    nodes = hosts.names[1:]
    answers = hosts.on_controller(f"srun -N{len(nodes)} -n{len(nodes)} hostname").split()
    if sorted(answers) != sorted(nodes):
        raise BenchFailed(f"srun ran on {' '.join(sorted(answers))}, expected {' '.join(sorted(nodes))}")


def _expect_what_shoal_wants(contestant: Contestant, hosts: Hosts) -> None:
    """Whoever built the cluster, Shoal finds nothing to change on it: all did the same work."""
    asked = subprocess.run([SHOAL, "plan", "--json", "--file", hosts.spec], capture_output=True, text=True)
    if asked.returncode != 0:
        raise BenchFailed(f"shoal plan failed on the cluster of {contestant.name}:\n{asked.stdout}{asked.stderr}")
    changes = json.loads(asked.stdout)["changes"]
    if changes:
        missing = "\n".join(f"  {change['host']}: {change['what']}: {change['action']}" for change in changes)
        raise BenchFailed(f"{contestant.name} left hosts that differ from what Shoal makes:\n{missing}")


def _block(count: int, rows: dict[str, Times]) -> str:
    """The lines of the table for one number of hosts."""
    packages, shoal = median(rows[PACKAGES].first), median(rows["Shoal"].again)
    lines = []
    for name, times in rows.items():
        first = median(times.first)
        line = f"{count:>5}  {name:<14} {first:>9.2f} {first / packages:>10.2f}x"
        if times.again:
            again = median(times.again)
            spread = f"{min(times.again):.2f} to {max(times.again):.2f}"
            line += f"   {again:>9.2f} {again / shoal:>7.1f}x  {spread:>16}"
        lines.append(line)
    return "\n".join([*lines, ""])


def _targets(table: Table) -> str:
    """What is to be reached, on the largest number of hosts that was measured."""
    count = max(table)
    rows = table[count]
    again = {name: median(times.again) for name, times in rows.items() if times.again}
    first = median(rows["Shoal"].first) / median(rows[PACKAGES].first)
    checks = [
        ("no-op run, in seconds", again["Shoal"], "under", 2.0),
        ("no-op run, Ansible / Shoal", again["Ansible"] / again["Shoal"], "at least", 10.0),
        ("no-op run, pyinfra / Shoal", again["pyinfra"] / again["Shoal"], "at least", 2.0),
        ("first run, Shoal / packages alone", first, "at most", 1.3),
    ]
    lines = [f"Targets, at {count} hosts:"]
    for what, value, relation, bound in checks:
        met = value >= bound if relation == "at least" else value <= bound
        lines.append(f"  {'met   ' if met else 'MISSED'} {what}: {value:.2f} ({relation} {bound:g})")
    return "\n".join(lines)


def _heading(options: argparse.Namespace) -> str:
    versions = subprocess.run(
        [options.peers / "pip", "list", "--format=json"], capture_output=True, text=True, check=True
    )
    found = {entry["name"].lower(): entry["version"] for entry in json.loads(versions.stdout)}
    return (
        f"{machine(*(f'{name} {found[name]}' for name in ('ansible-core', 'pyinfra')))}\n"
        f"Seconds. First run: median of {options.rounds}."
        f" No-op run: median of {options.no_ops * options.rounds}, with the least and the most.\n\n"
        f"{'hosts':>5}  {'':<14} {'first run':>9} {'/ packages':>11}"
        f"   {'no-op run':>9} {'/ Shoal':>8}  {'range':>16}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/converge", description=__doc__)
    parser.add_argument("--hosts", type=_counts, default=[3, 8, 16], help="how many hosts, for example 3,8,16")
    parser.add_argument("--no-ops", type=int, default=3, help="no-op runs of each contestant on each set of hosts")
    parser.add_argument("--rounds", type=int, default=1, help="sets of fresh hosts, and so first runs, of each")
    parser.add_argument("--peers", type=Path, required=True, help="where ansible-playbook and pyinfra are")
    return parser.parse_args()


def _counts(text: str) -> Sequence[int]:
    counts = [int(word) for word in text.split(",")]
    if min(counts) < 2:
        raise argparse.ArgumentTypeError("a cluster has at least 2 hosts: a controller and a node")
    return counts


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
