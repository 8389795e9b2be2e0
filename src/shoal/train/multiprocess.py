"""Starts one process per GPU from one process per node, with torch.multiprocessing.

As a function, `spawn(main)`; as a command for an unchanged script:
`python -m shoal.train.multiprocess --nprocs 2 train.py ARGS`. On several nodes start it once per node with srun.
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

from shoal.contract import SHOAL_STORE_DIR, STOP_SIGNALS
from shoal.train.env import Env, read_env
from shoal.train.errors import EnvError
from shoal.train.gpu_binding import visible_gpus

_calls = itertools.count()


def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 0) -> None:
    """Run `fn(*args)` in `nprocs` processes on this node (0: one per GPU); each gets its rank from `init()`.

    Stop signals are forwarded to them. Raises what torch.multiprocessing raises when one fails.
    """
    outer = read_env()
    nprocs = nprocs or len(visible_gpus()) or 1
    with tempfile.TemporaryDirectory(prefix="shoal-spawn-") as directory:
        call = next(_calls)
        variables = [child_variables(outer, index, nprocs, call, directory) for index in range(nprocs)]
        context = torch.multiprocessing.start_processes(
            _child, args=(variables, fn, args), nprocs=nprocs, join=False, start_method="spawn"
        )
        with _forward_signals(context):
            while not context.join():
                pass


def child_variables(outer: Env, index: int, nprocs: int, call: int, directory: str) -> dict[str, str]:
    """The variables of a process, named as torchrun names them."""
    if outer.local_world_size > 1:
        raise EnvError(
            "spawn() starts all ranks of a node, but is itself started several times on this node",
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
    # The directory was made for this call, so its name is unique.
    return variables | {"SHOAL_SPAWN": f"{call}-{Path(directory).name}", SHOAL_STORE_DIR: directory}


def _child(index: int, variables: list[Mapping[str, str]], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(variables[index])
    fn(*args)


@contextmanager
def _forward_signals(context: Any) -> Iterator[None]:
    """Forward stop signals to the ranks instead of ending this process."""

    def forward(number: int, _: object) -> None:
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    # Slurm may signal only the process that it started.
    previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(arguments: list[str] | None = None) -> int:
    """`python -m shoal.train.multiprocess`: run a script in several processes. Returns the script's exit code."""
    parser = argparse.ArgumentParser(prog="python -m shoal.train.multiprocess", description=__doc__)
    parser.add_argument("--nprocs", type=int, default=0, help="processes on this node (default: one per GPU)")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    try:
        spawn(_run_script, (options.script, options.args), options.nprocs)
    except torch.multiprocessing.ProcessExitedException as error:
        print(f"shoal: rank {error.error_index} of this node: {error}", file=sys.stderr)
        code = int(error.exit_code)
        return code if code > 0 else 128 - code  # killed by a signal: as a shell reports it
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
