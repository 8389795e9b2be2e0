"""Times what Shoal adds to the boot of rented machines, and how long it takes to compare 4,000 of them.

Three tables, see bench/README.md:

    hosts.py     real nodes: from sbatch to the first line of the job, including the join
    wake.py      up to 200 nodes without hosts: the service alone
    compare.py   4,000 machines, beside ParallelCluster's clustermgtd
"""

from __future__ import annotations

import argparse
import logging
import os

import compare
import hosts
import wake
from harness import bench_parser, describe_machine, peer_environment, report, run_bench
from parallelcluster import REQUIREMENT

HOST_COUNTS = (1, 8, 32)
"""Sandbox hosts that are created and joined at once."""
HOSTS_RESULT = "elastic-hosts"
"""The saved table of sandbox hosts alone."""


def main() -> None:
    options = _parse_arguments()
    logging.disable(logging.CRITICAL)
    lines = [describe_machine(options), "Seconds, medians. What is compared takes turns, round by round.", ""]
    loads: list[str] = []
    if options.hosts:
        loads.append(_load())
        counts = HOST_COUNTS[:1] if options.small else options.counts
        lines += [*hosts.measure(options.cluster, counts, options.host_rounds, compare=not options.small), ""]
    if options.only_hosts:
        report(
            HOSTS_RESULT,
            options,
            "\n".join([*lines, f"Load average before: {loads[0]}; {os.cpu_count()} CPUs."]) + "\n",
        )
        return
    loads.append(_load())
    sizes = wake.SIZES[:1] if options.small else wake.SIZES
    lines += [*wake.measure(sizes, options.boot, options.rounds), ""]
    loads.append(_load())
    programs = peer_environment("parallelcluster", REQUIREMENT) if options.peer else None
    machines = 1000 if options.small else compare.MACHINES
    lines += [*compare.measure(machines, 2 * options.rounds + 1, programs), ""]
    lines.append(f"Load average before each table: {', '.join(loads)}; {os.cpu_count()} CPUs.")
    report("elastic", options, "\n".join(lines) + "\n")


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def _parse_arguments() -> argparse.Namespace:
    parser = bench_parser("elastic", __doc__)
    parser.add_argument("--boot", type=float, default=3.0, help="seconds that a simulated machine boots")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host-rounds", type=int, default=2, help="rounds on sandbox hosts")
    parser.add_argument("--hosts", action=argparse.BooleanOptionalAction, default=True, help="measure sandbox hosts")
    parser.add_argument("--counts", type=_host_counts, default=HOST_COUNTS, help="numbers of sandbox hosts: 1,8,32")
    only_help = f"measure nothing else; the table is saved as {HOSTS_RESULT}.txt"
    parser.add_argument("--only-hosts", action="store_true", help=only_help)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="measure ParallelCluster")
    parser.add_argument("--cluster", default="bench-elastic", help="name of the cluster of sandbox hosts")
    options = parser.parse_args()
    if options.small:
        options.boot, options.rounds, options.host_rounds = 0.5, 1, 1
    return options


def _host_counts(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


if __name__ == "__main__":
    run_bench("elastic", main)
