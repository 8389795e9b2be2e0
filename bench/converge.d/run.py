"""First run and no-op run of Shoal, pyinfra and Ansible on the same kind of fresh hosts, as one table."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from harness import (
    BenchError,
    bench_parser,
    describe_machine,
    peer_environment,
    report,
    run_bench,
    show_progress,
)
from hosts import Hosts, fresh_hosts
from tools import SHOAL, Ansible, Pyinfra, Shoal, ShoalTree, Tool, run_tool

from shoal.roles.slurm_tree import find_trees

PACKAGES = "packages alone"
TREE_RESULT = "converge-tree"
"""The saved table of a run without peers, which takes a tenth of the time."""
APT = "DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends"
INSTALL = APT + " munge slurm-client {} nftables libpmix2"


@dataclass
class Times:
    """Seconds of one tool on one number of hosts."""

    first: list[float] = field(default_factory=list)
    no_op: list[float] = field(default_factory=list)


Table = dict[int, dict[str, Times]]


def main() -> None:
    options = _parse_arguments()
    peers = peer_environment("converge", "ansible-core>=2.16", "pyinfra>=3.2") if options.peers else None
    with _scratch_directory() as scratch:
        heading = _heading(options, peers)
        show_progress(heading)
        table = _measure(options, peers, scratch)
    blocks = "\n".join(_block(count, rows) for count, rows in table.items())
    report("converge" if peers else TREE_RESULT, options, f"{heading}\n{blocks}\n{_targets(table)}\n")


@contextmanager
def _scratch_directory() -> Iterator[Path]:
    # Short, because a Unix socket's path has at most 107 characters and Ansible's sockets are below it.
    scratch = Path(tempfile.mkdtemp(prefix="converge-"))
    os.environ["XDG_STATE_HOME"] = str(scratch / "state")
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _measure(options: argparse.Namespace, peers: Path | None, scratch: Path) -> Table:
    tools: list[Tool] = [Shoal(), *([ShoalTree()] if find_trees() else [])]
    tools += [Pyinfra(peers), Ansible(peers)] if peers else []
    directories = (scratch / str(number) for number in itertools.count())
    table: Table = {}
    for count in options.hosts:
        rows = {name: Times() for name in (PACKAGES, *(tool.name for tool in tools))}
        for _ in range(options.rounds):
            show_progress(f"{count} hosts: {PACKAGES}")
            with fresh_hosts(count, next(directories)) as hosts:
                _install_packages(hosts, rows[PACKAGES])
            for tool in tools:
                show_progress(f"{count} hosts: {tool.name}")
                with fresh_hosts(count, next(directories)) as hosts:
                    # That a peer did the same work, `shoal plan` shows as well.
                    no_ops = 0 if options.small and not isinstance(tool, Shoal) else options.no_ops
                    _measure_tool(tool, hosts, rows[tool.name], no_ops)
        table[count] = rows
        show_progress(_block(count, rows))
    return table


def _install_packages(hosts: Hosts, times: Times) -> None:
    start = time.perf_counter()
    hosts.ssh(hosts.names, {"controller": INSTALL.format("slurmctld"), "compute": INSTALL.format("slurmd")})
    times.first.append(time.perf_counter() - start)
    show_progress(f"  installed {times.first[-1]:.2f} s")


def _measure_tool(tool: Tool, hosts: Hosts, times: Times, no_ops: int) -> None:
    tool.prepare(hosts)
    try:
        seconds, _ = run_tool(tool, hosts)
        times.first.append(seconds)
        show_progress(f"  first run {seconds:.2f} s")
        _check_cluster(hosts)
        for _ in range(no_ops):
            seconds, output = run_tool(tool, hosts)
            if not tool.is_unchanged(output):
                raise BenchError(f"{tool.name} changed something in a second run:\n{output[-4000:]}")
            times.no_op.append(seconds)
            show_progress(f"  no-op run {seconds:.2f} s")
        _check_equivalence(tool, hosts)
    finally:
        tool.close(hosts)


def _check_cluster(hosts: Hosts) -> None:
    """A job on all nodes at once prints the name of each."""
    nodes = hosts.names[1:]
    names = hosts.on_controller(f"srun -N{len(nodes)} -n{len(nodes)} hostname").split()
    if sorted(names) != sorted(nodes):
        raise BenchError(f"srun ran on {' '.join(sorted(names))}, expected {' '.join(sorted(nodes))}")


def _check_equivalence(tool: Tool, hosts: Hosts) -> None:
    """`shoal plan` has no changes for a cluster that a peer built: all tools did the same work."""
    done = subprocess.run([SHOAL, "plan", "--json", "--file", hosts.spec], capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"shoal plan failed on the cluster of {tool.name}:\n{done.stdout}{done.stderr}")
    changes = json.loads(done.stdout)["changes"]
    if changes:
        missing = "\n".join(f"  {change['host']}: {change['what']}: {change['action']}" for change in changes)
        raise BenchError(f"{tool.name} left hosts that differ from what Shoal makes:\n{missing}")


def _block(count: int, rows: dict[str, Times]) -> str:
    """The lines of the table for one number of hosts."""
    packages, shoal = median(rows[PACKAGES].first), median(rows["Shoal"].no_op)
    lines = []
    for name, times in rows.items():
        first = median(times.first)
        line = f"{count:>5}  {name:<14} {first:>9.2f} {first / packages:>10.2f}x"
        if times.no_op:
            no_op = median(times.no_op)
            spread = f"{min(times.no_op):.2f} to {max(times.no_op):.2f}"
            line += f"   {no_op:>9.2f} {no_op / shoal:>7.1f}x  {spread:>16}"
        lines.append(line)
    return "\n".join([*lines, ""])


def _targets(table: Table) -> str:
    """The targets, at the largest number of hosts that was measured."""
    count = max(table)
    rows = table[count]
    no_op = {name: median(times.no_op) for name, times in rows.items() if times.no_op}
    first = median(rows["Shoal"].first) / median(rows[PACKAGES].first)
    checks = [("no-op run, in seconds", no_op["Shoal"], "under", 2.0)]
    for name, bound in (("Ansible", 10.0), ("pyinfra", 5.0)):
        if name in no_op:
            checks.append((f"no-op run, {name} / Shoal", no_op[name] / no_op["Shoal"], "at least", bound))
    checks.append(("first run, Shoal / packages alone", first, "at most", 1.3))
    if ShoalTree.name in rows:
        tree = median(rows[ShoalTree.name].first) / median(rows[PACKAGES].first)
        checks.append((f"first run, {ShoalTree.name} / packages alone", tree, "at most", 0.5))
    lines = [f"Targets, at {count} hosts:"]
    for what, value, relation, bound in checks:
        met = value >= bound if relation == "at least" else value <= bound
        lines.append(f"  {'met   ' if met else 'MISSED'} {what}: {value:.2f} ({relation} {bound:g})")
    return "\n".join(lines)


def _heading(options: argparse.Namespace, peers: Path | None) -> str:
    return (
        f"{describe_machine(options, *(_versions(peers) if peers else ()))}\n"
        f"Seconds. First run: median of {options.rounds}."
        f" No-op run: median of {options.no_ops * options.rounds}, with minimum and maximum.\n\n"
        f"{'hosts':>5}  {'':<14} {'first run':>9} {'/ packages':>11}"
        f"   {'no-op run':>9} {'/ Shoal':>8}  {'range':>16}"
    )


def _versions(peers: Path) -> list[str]:
    done = subprocess.run([peers / "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    versions = {entry["name"].lower(): entry["version"] for entry in json.loads(done.stdout)}
    return [f"{name} {versions[name]}" for name in ("ansible-core", "pyinfra")]


def _parse_arguments() -> argparse.Namespace:
    parser = bench_parser("converge", __doc__)
    peers_help = f"measure Ansible and pyinfra; without them the table is saved as {TREE_RESULT}.txt"
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help=peers_help)
    parser.add_argument("--hosts", type=_host_counts, default=[3, 8, 16], help="numbers of hosts, for example 3,8,16")
    parser.add_argument("--no-ops", type=int, default=3, help="no-op runs of each tool on each set of hosts")
    parser.add_argument("--rounds", type=int, default=1, help="sets of fresh hosts, and so first runs, of each tool")
    options = parser.parse_args()
    if options.small:
        options.hosts, options.no_ops, options.rounds = [2], 1, 1
    return options


def _host_counts(text: str) -> Sequence[int]:
    counts = [int(word) for word in text.split(",")]
    if min(counts) < 2:
        raise argparse.ArgumentTypeError("a cluster has at least 2 hosts: a controller and a node")
    return counts


if __name__ == "__main__":
    run_bench("converge", main)
