"""A moment in which Slurm starts no job, so that none is on its way to a node while the keys change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal.errors import HostError
from shoal.hosts.api import Host

SETTLE = 0.5
"""Seconds in which a job that was just started reaches its node."""

COMMAND = (
    "bash",
    "-c",
    # Partitions go up again when we say so, when we are gone (its input ends), or after two minutes.
    "up=$(timeout 20 sinfo -h -o '%R %a' | sort -u | awk '$2 == \"up\" {print $1}'); "
    'for name in $up; do timeout 20 scontrol update "partitionname=$name" state=down || break; done; '
    "echo paused; read -r -t 120 _; trap '' HUP PIPE; "
    'for name in $up; do for i in $(seq 30); do timeout 20 scontrol update "partitionname=$name" state=up && break; '
    "sleep 1; done; done; echo resumed",
)


@asynccontextmanager
async def no_job_starts(controller: Host) -> AsyncIterator[None]:
    """For as long as the block lasts partitions are down: jobs run on, and new ones wait."""
    process = await controller.start(COMMAND)
    try:
        await process.readline()
        await asyncio.sleep(SETTLE)
        yield
    finally:
        with contextlib.suppress(HostError):
            await process.write(b"\n")
            await process.readline()
            await process.wait()
