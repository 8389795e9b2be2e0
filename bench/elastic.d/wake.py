"""Times what the service adds to the boot of many nodes, without hosts: Slurm is a fake, and joining takes no time.

What remains is the service: read the request, record and order, detect that machines are up, and record that.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence

from harness import BenchError, show_progress
from simulated import running_cloud, service_for
from tests.contract.rental_providers import CASES
from tests.unit.cloud.scene import choice, rented_set

from shoal.cloud.service.scheduling import SystemClock
from shoal.hostlist import compress
from shoal.remote import power_request as request
from shoal_simulators.fake_slurm import FakeJoiner, FakeSlurm

SIZES = (1, 8, 32, 200)
KINDS = {"gcp": "ordered in bulk", "runpod": "one call a machine"}
WAKE_TIMEOUT_S = 120.0


def measure(sizes: Sequence[int], boot: float, rounds: int) -> list[str]:
    """The lines of the table. Kinds and sizes take turns, so that load of the machine affects all of them."""
    times: dict[tuple[str, int], list[float]] = {(kind, size): [] for kind in KINDS for size in sizes}
    for turn in range(rounds):
        for (kind, size), seconds in times.items():
            with running_cloud(kind, boot) as url:
                seconds.append(asyncio.run(_wake(kind, url, size)) - boot)
            show_progress(f"{kind} {size} nodes, round {turn + 1}: {seconds[-1]:.2f} s beside the boot")
    heads = "".join(f"{format_nodes(size):>11}" for size in sizes)
    lines = [f"{f'no hosts, beside a boot of {boot:g} s; below it the maximum':<52}{heads}"]
    for kind, how in KINDS.items():
        of_kind = [times[kind, size] for size in sizes]
        lines.append(f"{f'  {kind}, {how}':<52}" + "".join(f"{statistics.median(values):>11.2f}" for values in of_kind))
        lines.append(f"{'':<52}" + "".join(f"{max(values):>11.2f}" for values in of_kind))
    return lines


def format_nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


async def _wake(kind: str, url: str, size: int) -> float:
    """One job for `size` nodes: seconds from Slurm's request until all nodes have registered."""
    nodeset = rented_set("burst", size, choice(CASES[kind]))
    slurm = FakeSlurm(SystemClock(), nodeset.nodes)
    async with service_for(kind, url, nodeset, slurm, FakeJoiner(slurm)) as (service, directory):
        work = asyncio.create_task(service.run())
        await asyncio.sleep(1.0)  # the first list is read, as in a service that has run for a while
        job = slurm.submit("1", size, seconds=3600.0)
        start = time.perf_counter()
        slurm.tick()
        environ = {"SLURM_RESUME_FILE": str(directory / "resume.json")}
        (directory / "resume.json").write_text(f'{{"jobs": [{{"job_id": 1, "nodes": "{compress(job.nodes)}"}}]}}')
        request.main(["resume", compress(job.nodes)], str(directory / "requests"), environ)
        while job.state != "RUNNING":
            if time.perf_counter() - start > WAKE_TIMEOUT_S or work.done():
                raise BenchError(f"{size} nodes of {kind} did not come up: {job.comment} {work}")
            await asyncio.sleep(0.01)
            slurm.tick()
        seconds = time.perf_counter() - start
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    return seconds
