"""Ranks joined by Gloo over a file, and scripts: processes forked from a server that has loaded torch."""

import atexit
import functools
import multiprocessing
import os
import pickle
import runpy
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

LIMIT = 600.0
"""Generous: the machine may be busy. Reached only by ranks that hang."""

PRELOAD = [
    *("shoal.train.checkpoint", "shoal.train.parallel", "torch._dynamo", "numpy.random"),
    *("pytest", "tests.unit.train.procs", "tests.unit.train.training"),
]
"""What every rank needs. torch itself imports torch._dynamo with the first optimizer, which takes a second."""


class RankFailed(AssertionError):
    """A rank raised, died or hung."""


def ranks(count: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
    """What `function(rank, *args)` returned on each of `count` ranks. RankFailed names the rank and its traceback.

    The ranks and their process group are those of earlier calls with this count: for functions that only compute.
    """
    children = _shared.get(count) or _shared.setdefault(count, _start(count, _serve))
    try:
        for _, pipe in children:
            pipe.send_bytes(pickle.dumps((function, args)))
        return _results(children, limit)
    except BaseException:
        kill(_shared.pop(count))
        raise


def fresh_ranks(count: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
    """Like `ranks`, in processes of their own: for functions that leave something in their process."""
    children = start(count, function, *args)
    try:
        return _results(children, limit)
    finally:
        kill(children)


def start(count: int, function: Callable[..., Any], *args: Any) -> list[tuple[Any, Any]]:
    """Start the ranks and return their (process, pipe) pairs: for tests that kill them."""
    return _start(count, _call, function, args)


def kill(children: list[tuple[Any, Any]]) -> None:
    for child, pipe in children:
        child.kill()
        child.join()
        pipe.close()


def start_script(
    script: Path, *arguments: str, errors: Path, enter: Callable[[], None] | None = None, **environ: str
) -> tuple[Any, TextIO]:
    """Start a script in a session of its own: its process, and its output. `errors` is where its standard error goes.

    Like `python script`, without seconds for the import of torch. At its end the interpreter is not torn down. `enter`
    is called first, to enter namespaces.
    """
    context = _server()
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_script_main, args=(theirs, str(errors), [str(script), *arguments], enter, environ))
    child.start()
    theirs.close()
    with ours:
        return child, os.fdopen(os.dup(ours.fileno()))


def _script_main(
    output: Any, errors: str, argv: list[str], enter: Callable[[], None] | None, environ: dict[str, str]
) -> None:
    os.setsid()
    if enter:
        enter()
    os.dup2(output.fileno(), 1)
    output.close()
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    os.environ.update(environ)
    sys.argv = argv
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


_shared: dict[int, list[tuple[Any, Any]]] = {}
"""The ranks that wait for the next call of `ranks`, by their count."""


@atexit.register
def _kill_shared() -> None:
    for children in _shared.values():
        kill(children)


def _start(count: int, main: Callable[..., None], *args: Any) -> list[tuple[Any, Any]]:
    context = _server()
    meeting = Path(_meetings().name) / uuid.uuid4().hex
    children = []
    for rank in range(count):
        ours, theirs = context.Pipe()
        child = context.Process(target=_main, args=(theirs, rank, count, str(meeting), main, args))
        child.start()
        theirs.close()
        children.append((child, ours))
    return children


def _server() -> Any:
    """A server that has imported torch once and forks the processes: seconds less for each of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


@functools.cache
def _meetings() -> tempfile.TemporaryDirectory[str]:
    """Where the ranks find each other; removed when the tests end."""
    return tempfile.TemporaryDirectory(prefix="shoal-ranks-")


def _results(children: list[tuple[Any, Any]], limit: float) -> list[Any]:
    return [_result(rank, child, pipe, limit) for rank, (child, pipe) in enumerate(children)]


def _result(rank: int, child: Any, pipe: Any, limit: float) -> Any:
    if not pipe.poll(limit):
        raise RankFailed(f"rank {rank} has not ended after {limit} s")
    try:
        ok, value = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        child.join()
        raise RankFailed(f"rank {rank} died with exit status {child.exitcode}") from None
    if not ok:
        raise RankFailed(f"rank {rank} raised\n{value}")
    return value


def _main(pipe: Any, rank: int, count: int, meeting: str, main: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    dist.barrier()  # a rank that ends while the others still connect would fail them
    try:
        main(pipe, rank, *args)
    finally:
        dist.destroy_process_group()


def _serve(pipe: Any, rank: int) -> None:
    """Make the calls of the test process until it ends or one fails: the group may be broken then."""
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        if not _call(pipe, rank, function, args):
            return


def _call(pipe: Any, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Send what the function returns, or its traceback. Returns whether it succeeded."""
    try:
        ok, value = True, function(rank, *args)
    except BaseException:
        ok, value = False, traceback.format_exc()
    # Plain pickle: multiprocessing's own would share the memory of tensors, which ends with the rank.
    pipe.send_bytes(pickle.dumps((ok, value)))
    return ok
