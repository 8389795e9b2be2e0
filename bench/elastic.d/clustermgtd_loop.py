"""Run by the Python that has ParallelCluster: each line on stdin is one pass of clustermgtd, and one line of JSON back.

    python clustermgtd_loop.py CLUSTERMGTD.CONF

Nothing of ParallelCluster is replaced but one wait: after it has read Slurm's nodes it sleeps five seconds, so that new
instances appear in EC2. That sleep is left out. An error that it logs ends the bench.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from typing import NoReturn

from slurm_plugin import clustermgtd


class Failing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> NoReturn:
        sys.exit(f"clustermgtd: {record.getMessage()}")


def cpu_seconds() -> float:
    """Of this process and of the commands that it ran."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    logging.getLogger().addHandler(Failing(logging.ERROR))
    slept: list[float] = []
    sleep = time.sleep
    # Python itself sleeps for moments, until a command that has a time limit ends.
    clustermgtd.time.sleep = lambda seconds: slept.append(seconds) if seconds >= 1 else sleep(seconds)
    manager = clustermgtd.ClusterManager(config=clustermgtd.ClustermgtdConfig(sys.argv[1]))
    for _ in sys.stdin:
        slept.clear()
        begun, used = time.perf_counter(), cpu_seconds()
        manager.manage_cluster()
        told = {"wall": time.perf_counter() - begun, "cpu": cpu_seconds() - used, "slept": slept}
        print(json.dumps(told), flush=True)
    manager.shutdown()


main()
