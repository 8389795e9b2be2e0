"""Starts one process a GPU from one process a node, with torch.multiprocessing.

As a function, `spawn(main)`; as a program for a script that knows nothing of it:
`python -m shoal.train.multiprocess --nprocs 2 train.py ARGS`. On several nodes start it once a node with srun.
"""

from __future__ import annotations

import argparse
import itertools
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.multiprocessing

from shoal.train.contract import SHOAL_STORE_DIR, STOP_SIGNALS
from shoal.train.env import Env, read_env
from shoal.train.errors import EnvError
from shoal.train.gpus import visible_gpus

_calls = itertools.count()


def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 0) -> None:
    """Run `fn(*args)` in `nprocs` processes on this node (0: one a GPU), each of which finds its rank with `init()`.

    Signals that ask a job to stop are passed on to them. Raises what torch.multiprocessing raises when one fails.
    """
    outer = read_env()
    nprocs = nprocs or len(visible_gpus()) or 1
    with tempfile.TemporaryDirectory(prefix="shoal-spawn-") as directory:
        call = next(_calls)
        variables = [child_variables(outer, index, nprocs, call, directory) for index in range(nprocs)]
        context = torch.multiprocessing.start_processes(
            _child, args=(variables, fn, args), nprocs=nprocs, join=False, start_method="spawn"
        )
        with _forwarding(context):
            while not context.join():
                pass


def child_variables(outer: Env, index: int, nprocs: int, call: int, directory: str) -> dict[str, str]:
    """What a process is told of its place, in torchrun's words."""
    if outer.local_world_size > 1:
        raise EnvError(
            "spawn() starts all ranks of a node, and is itself started several times on this one",
            found=f"{outer.local_world_size} processes of {outer.launcher} on {outer.node}",
            fix="srun --ntasks-per-node=1",
        )
    variables = {
        "RANK": str(outer.node_rank * nprocs + index),
        "LOCAL_RANK": str(index),
        "GROUP_RANK": str(outer.node_rank),
        "WORLD_SIZE": str(outer.world_size * nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "SHOAL_SPAWN": str(call),  # the nth call is the nth on every node
    }
    if outer.world_size > 1:
        return variables | {"MASTER_ADDR": outer.master_address}
    # The directory was made for this call: its name is one that no other start has.
    return variables | {"SHOAL_SPAWN": f"{call}-{Path(directory).name}", SHOAL_STORE_DIR: directory}


def _child(index: int, variables: list[Mapping[str, str]], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(variables[index])
    fn(*args)


@contextmanager
def _forwarding(context: Any) -> Iterator[None]:
    """While this holds, signals that ask the job to stop go to the ranks and leave this process alone."""

    def forward(number: int, _: object) -> None:
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    # Slurm may signal only the process that it started: the ranks must hear of it too.
    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: list[str] | None = None) -> int:
    """`python -m shoal.train.multiprocess`: run a script in several processes. Its exit code is the script's."""
    parser = argparse.ArgumentParser(prog="python -m shoal.train.multiprocess", description=__doc__)
    parser.add_argument("--nprocs", type=int, default=0, help="processes on this node (default: one a GPU)")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments)
    try:
        spawn(_run_script, (asked.script, asked.args), asked.nprocs)
    except torch.multiprocessing.ProcessExitedException as error:
        print(f"shoal: rank {error.error_index} of this node: {error}", file=sys.stderr)
        code = int(error.exit_code)
        return code if code > 0 else 128 - code  # killed by a signal: as a shell says it
    except torch.multiprocessing.ProcessRaisedException as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run_script(script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
