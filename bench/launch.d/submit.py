"""Submits the probe with submitit, on the controller: `submit.py LOGS PROBE`."""

from __future__ import annotations

import sys
from pathlib import Path

import submitit


class Probe:
    """Runs in every task."""

    def __init__(self, probe: str) -> None:
        self.probe = probe

    def __call__(self) -> None:
        import runpy

        import submitit

        submitit.helpers.TorchDistributedEnvironment().export()
        runpy.run_path(self.probe, run_name="__main__")


def main(logs: str, probe: str) -> None:
    executor = submitit.AutoExecutor(folder=logs, cluster="slurm")
    executor.update_parameters(
        nodes=2,
        tasks_per_node=2,
        cpus_per_task=1,
        gpus_per_node=2,
        timeout_min=10,
        slurm_job_name="submitit",
    )
    print(executor.submit(Probe(str(Path(probe)))).job_id)


if __name__ == "__main__":
    main(*sys.argv[1:])
