"""What the service adds to the boot of many nodes: no hosts, a Slurm in memory, and joining takes no time.

What is left is the service: to see the request, to write down and order, to find machines up, and to write that down.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable

from ground import BenchFailed
from simulated import running_cloud, service_for
from tests.contract.renters import CASES
from tests.unit.elastic.scene import choice, rented_set

from shoal.elastic import request
from shoal.elastic.clock import SystemClock
from shoal.elastic.fake import FakeJoiner, FakeSlurm
from shoal.hostlist import compress

SIZES = (1, 8, 32, 200)
KINDS = {"gcp": "ordered in bulk", "runpod": "one call a machine"}
LIMIT = 120.0


def measure(boot: float, rounds: int, say: Callable[[str], None]) -> list[str]:
    """The lines of the table. Kinds and sizes take turns, so that a busy minute does not hit one of them alone."""
    times: dict[tuple[str, int], list[float]] = {(kind, size): [] for kind in KINDS for size in SIZES}
    for turn in range(rounds):
        for (kind, size), several in times.items():
            with running_cloud(kind, boot) as url:
                several.append(asyncio.run(_wake(kind, url, size)) - boot)
            say(f"{kind} {size} nodes, round {turn + 1}: {several[-1]:.2f} s beside the boot")
    heads = "".join(f"{counted(size):>11}" for size in SIZES)
    lines = [f"{f'no hosts, beside a boot of {boot:g} s; below it the worst':<52}{heads}"]
    for kind, how in KINDS.items():
        of_kind = [times[kind, size] for size in SIZES]
        lines.append(f"{f'  {kind}, {how}':<52}" + "".join(f"{statistics.median(one):>11.2f}" for one in of_kind))
        lines.append(f"{'':<52}" + "".join(f"{max(one):>11.2f}" for one in of_kind))
    return lines


def counted(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


async def _wake(kind: str, url: str, size: int) -> float:
    """One job for so many nodes: seconds from Slurm's request to the moment when all of them have registered."""
    nodeset = rented_set("burst", size, choice(CASES[kind]))
    slurm = FakeSlurm(SystemClock(), nodeset.nodes)
    async with service_for(kind, url, nodeset, slurm, FakeJoiner(slurm)) as (service, directory):
        work = asyncio.create_task(service.run())
        await asyncio.sleep(1.0)  # the first look is done, as with a service that has run for a while
        job = slurm.submit("1", size, seconds=3600.0)
        begun = time.perf_counter()
        slurm.tick()
        environ = {"SLURM_RESUME_FILE": str(directory / "resume.json")}
        (directory / "resume.json").write_text(f'{{"jobs": [{{"job_id": 1, "nodes": "{compress(job.nodes)}"}}]}}')
        request.main(["resume", compress(job.nodes)], str(directory / "requests"), environ)
        while job.state != "RUNNING":
            if time.perf_counter() - begun > LIMIT or work.done():
                raise BenchFailed(f"{size} nodes of {kind} did not come up: {job.comment} {work}")
            await asyncio.sleep(0.01)
            slurm.tick()
        taken = time.perf_counter() - begun
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    return taken
