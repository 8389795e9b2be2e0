"""Whether a machine is good for jobs: its GPUs work, and Slurm has heard of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from shoal.elastic.fleet import UNFIT
from shoal.hosts.api import Host
from shoal.plan.fleet import Fleet
from shoal.roles.rented import promised
from shoal.roles.watchdog import health_command
from shoal.slurm.state import NODES_COMMAND, parse_nodes
from shoal.spec.model import Spec
from shoal.spec.rented import rented_sets

HEALTH_SECONDS = 180.0
REGISTER_SECONDS = 60.0
_PAUSE = 0.5
_AWAITED = {"POWERING_UP", "POWERED_DOWN", "POWERING_DOWN", "DOWN", "NOT_RESPONDING"}


async def broken_gpus(spec: Spec, fleet: Fleet, names: Iterable[str]) -> dict[str, str]:
    """Machines whose GPUs do not work, or are fewer than promised."""
    promises = {name: promised(spec, one).gpus for one in rented_sets(spec).values() for name in one.nodes}

    async def look(name: str) -> str:
        done = await (await fleet.host(name)).run(health_command(promises[name]), timeout=HEALTH_SECONDS, root=True)
        said = " ".join((done.error_text or done.text).split())
        return f"{UNFIT}{said or 'the look at its GPUs failed'}" if done.status else ""

    return {name: said for name, said in (await fleet.each(names, look)).items() if said}


async def unregistered(controller: Host, names: Iterable[str]) -> dict[str, str]:
    """Wait until slurmctld has heard from the nodes; those of which it has not in time, or that it does not take."""
    waiting = dict.fromkeys(names, "slurmd has not registered")
    end = asyncio.get_running_loop().time() + REGISTER_SECONDS
    while waiting and asyncio.get_running_loop().time() < end:
        done = await controller.run(NODES_COMMAND, timeout=30)
        states = {node.name: node for node in parse_nodes(done.text)} if done.status == 0 else {}
        for name in [*waiting]:
            node = states.get(name)
            if node is None:
                continue
            if "INVAL" in node.state or "INVALID_REG" in node.state:
                waiting[name] = f"{UNFIT}Slurm does not take it: {node.reason}"
            elif not _AWAITED & set(node.state):
                del waiting[name]
        if waiting:
            await asyncio.sleep(_PAUSE)
    return waiting
