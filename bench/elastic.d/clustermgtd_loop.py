"""Runs in ParallelCluster's environment: one pass of clustermgtd, and one line of JSON, for each line on stdin.

    python clustermgtd_loop.py CLUSTERMGTD.CONF

The only change to ParallelCluster: after it has read Slurm's nodes it sleeps five seconds, so that new instances appear
in EC2, and that sleep is left out. An error that it logs ends the bench.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from typing import NoReturn

from slurm_plugin import clustermgtd


class FailingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> NoReturn:
        sys.exit(f"clustermgtd: {record.getMessage()}")


def cpu_seconds() -> float:
    """CPU seconds of this process and of the commands that it ran."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    logging.getLogger().addHandler(FailingHandler(logging.ERROR))
    slept: list[float] = []
    sleep = time.sleep
    # subprocess sleeps for milliseconds while it waits for a command with a timeout.
    clustermgtd.time.sleep = lambda seconds: slept.append(seconds) if seconds >= 1 else sleep(seconds)
    manager = clustermgtd.ClusterManager(config=clustermgtd.ClustermgtdConfig(sys.argv[1]))
    for _ in sys.stdin:
        slept.clear()
        start, cpu_start = time.perf_counter(), cpu_seconds()
        manager.manage_cluster()
        result = {"wall": time.perf_counter() - start, "cpu": cpu_seconds() - cpu_start, "slept": slept}
        print(json.dumps(result), flush=True)
    manager.shutdown()


main()
