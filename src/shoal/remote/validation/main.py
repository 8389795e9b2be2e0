"""The script of a validation job: `validate.py TESTS OPTIONS` runs tests, one after the other, and reports each.

A test that fails is a result like any other, and the next one runs. The exit status is 1 only where a result could not
be reported.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, Callable, Dict, List, Mapping

from .collectives import measure_torch
from .gpus import check_gpus
from .links import measure_links
from .mpi import measure_mpi
from .node_tests import measure_fio, measure_hpcc
from .place import MissingTool, Rank, emit, read_rank, report_mpirun, report_place

TESTS: Mapping[str, Callable[[Rank, Dict[str, Any]], None]] = {
    "cpu": report_place,
    "mpirun": report_mpirun,
    "gpu": check_gpus,
    "torch": measure_torch,
    "mpi": measure_mpi,
    "links": measure_links,
    "hpcc": measure_hpcc,
    "fio": measure_fio,
}


def main(arguments: List[str]) -> None:
    names, options = arguments[0].split(","), json.loads(arguments[1])
    rank = read_rank(dict(os.environ))
    for name in names:
        run_test(name, rank, options)


def run_test(name: str, rank: Rank, options: Dict[str, Any]) -> None:
    try:
        TESTS[name](rank, options)
    except MissingTool as error:
        emit(rank, name, missing=error.package, problem=str(error))
    except Exception as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        cause = "; ".join(dict.fromkeys(lines[:1] + lines[-1:])) or "no message"  # NCCL has the cause last
        emit(rank, name, problem="%s: %s" % (type(error).__name__, cause))
        traceback.print_exc(file=sys.stderr)
