"""Remove sandbox clusters that killed test runs left: each cluster is recorded while it may have hosts.

`python -m tests.e2e.leftovers` removes the clusters of runs that have ended. scripts/test runs it first and last.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shoal.local_files import cache_dir
from shoal.sandbox.layout import Layout
from shoal.sandbox.provider import SandboxProvider

TAG = "SHOAL_TEST_CLUSTER"
"""In the environment of every command that a test runs for a cluster."""


@contextmanager
def noted(cluster: str, cache: Path | None = None) -> Iterator[None]:
    """This run has the cluster's name to itself until the block has ended well: then nothing of it is left.

    The lock on the note goes with the process that holds it, however that ends.
    """
    cache = cache or cache_dir()
    note = _notes() / Layout(cache, cluster).id
    note.parent.mkdir(parents=True, exist_ok=True)
    with note.open("a") as file:
        if not _locked(file.fileno()):
            raise AssertionError(f"another test run has sandbox cluster {cluster}: let it end first")
        file.truncate(0)
        print(cluster, cache, sep="\n", file=file, flush=True)
        yield
        note.unlink(missing_ok=True)


def sweep() -> list[str]:
    """Remove the clusters whose run is over; their names."""
    swept = []
    for note in sorted(_notes().glob("*")):
        try:
            file = note.open()
        except FileNotFoundError:  # a run that has just ended took its own away
            continue
        with file:
            if not _locked(file.fileno()):
                continue
            if lines := file.read().splitlines():
                cluster, cache = lines
                _end_commands(cluster, Path(cache))
                asyncio.run(SandboxProvider(Path(cache)).destroy(cluster, lambda text, part: None))
                swept.append(cluster)
            note.unlink(missing_ok=True)
    return swept


def _notes() -> Path:
    return cache_dir() / "tests"


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end_commands(cluster: str, cache: Path) -> None:
    """A command that outlived its test would go on making hosts. Another cache has another cluster of that name."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            given = dict(word.partition("=")[::2] for word in words)
            if given.get(TAG) == cluster and cache_of(given) == cache:
                os.kill(int(process.name), signal.SIGKILL)


def cache_of(environment: Mapping[str, str]) -> Path:
    """The cache of a process with such an environment."""
    base = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '')}/.cache"
    return Path(environment.get("SHOAL_CACHE") or f"{base}/shoal")


if __name__ == "__main__":
    for name in sweep():
        print(f"removed sandbox cluster {name}, which a test run that was killed has left")
