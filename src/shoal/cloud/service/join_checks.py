"""Whether a machine can be a node: its size, cgroups, Slurm version and GPUs, and its registration with slurmctld."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from shoal.agent.facts import Facts
from shoal.cloud.service.context import UNFIT_IMAGE_PREFIX, UNFIT_PREFIX, UNFIT_TYPE_PREFIX, log
from shoal.cloud.service.slurm import LiveSlurm
from shoal.containers.images import FEATURE, node_features
from shoal.errors import ShoalError
from shoal.hosts.api import Host
from shoal.plan.connections import Fleet
from shoal.remote import python_command
from shoal.roles.component import Cluster
from shoal.roles.current_conf import confinement, read_current_conf
from shoal.roles.rented import minimum_shape, rented_containers
from shoal.roles.slurm_tree import find_trees, uses_tree
from shoal.slurm.conf_lines import real_memory
from shoal.slurm.model import Confinement
from shoal.slurm.state import NODES_COMMAND, parse_nodes
from shoal.slurm.versions import version_findings
from shoal.spec.members import rented_sets
from shoal.spec.model import Spec


def unfit_machines(spec: Spec, facts: Mapping[str, Facts], controller: str, new: Iterable[str]) -> dict[str, str]:
    """The errors of machines that Slurm would not use: too small for their nodeset, or without the cgroups it needs.

    Containers need none: jobs are not confined there. The limits of a container count, which slurmd does not see.
    """
    required = read_current_conf(facts[controller]).confinement or Confinement()
    containers = rented_containers(spec)
    errors: dict[str, str] = {}
    for nodeset in rented_sets(spec).values():
        shape = minimum_shape(spec, nodeset)
        for name in nodeset.nodes:
            if name not in new or name not in facts:
                continue
            fact = facts[name]
            if uses_tree(spec) and fact.arch not in find_trees():
                errors[name] = f"{UNFIT_PREFIX}its CPU is {fact.arch}, and the cluster has no Slurm for that"
                continue
            cpus, memory_mb = fact.cpu.cpus, fact.memory_mb
            lacks = [f"{cpus} CPUs and nodeset {nodeset.name} says {shape.cpus}"] if cpus < shape.cpus else []
            if memory_mb < real_memory(shape.memory_mb):
                lacks.append(f"{memory_mb} MB of memory and nodeset {nodeset.name} says {shape.memory_mb} MB")
            if lacks:
                fitting = f"`cpus: {min(cpus, shape.cpus)}`, `memory: {min(memory_mb, shape.memory_mb)}M`"
                errors[name] = (
                    f"{UNFIT_TYPE_PREFIX}it has {', '.join(lacks)} (set {fitting} there, or rent a larger type)"
                )
            elif name not in containers and (missing := [*_missing_cgroups(required, confinement((fact,), ()))]):
                errors[name] = (
                    f"{UNFIT_IMAGE_PREFIX}Slurm confines jobs with cgroups here, and this machine has no writable"
                    f" {', '.join(missing)} (rent a type that has them; hosts of a sandbox: delete `cgroups: true`)"
                )
    return errors


def _missing_cgroups(required: Confinement, possible: Confinement) -> Iterator[str]:
    if not required.tracked:
        return
    if not possible.tracked:
        yield "cgroups"
        return
    yield from (name for name in ("cores", "memory", "devices") if getattr(required, name) > getattr(possible, name))


def incompatible_versions(cluster: Cluster, new: Iterable[str]) -> dict[str, str]:
    """The errors of machines whose Slurm version does not fit the controller's."""
    controller = cluster.controller.name
    others = {name: version for name, version in cluster.versions.items() if name in new}
    findings = version_findings((controller, cluster.versions[controller]), others)
    return {
        finding.host: f"{UNFIT_IMAGE_PREFIX}{finding.what}: {finding.found}"
        for finding in findings
        if finding.host in new
    }


GPU_CHECK_TIMEOUT_S = 180.0
MAKE_NAMESPACES = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("unshare", "--user", "--mount", "true"),
)
"""What a job in an image does first, as an ordinary user."""
NAMESPACE_TIMEOUT_S = 30.0
REGISTRATION_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.5
_NOT_YET_UP_STATES = {"POWERING_UP", "POWERED_DOWN", "POWERING_DOWN", "DOWN", "NOT_RESPONDING"}


async def broken_gpus(spec: Spec, fleet: Fleet, names: Iterable[str]) -> dict[str, str]:
    """The errors of machines whose GPUs do not work, or are too few."""
    promises = {name: minimum_shape(spec, one).gpus for one in rented_sets(spec).values() for name in one.nodes}

    async def look(name: str) -> str:
        command = python_command("probes", "gpus", str(promises[name]))
        done = await (await fleet.host(name)).run(command, timeout=GPU_CHECK_TIMEOUT_S, root=True)
        error = " ".join((done.error_text or done.text).split())
        return f"{UNFIT_PREFIX}{error or 'the GPU check failed'}" if done.status else ""

    return {name: error for name, error in (await fleet.each(names, look)).items() if error}


async def limit_image_features(cluster: Cluster, fleet: Fleet, names: Iterable[str]) -> None:
    """Leave nodes only those features of jobs in images that their machines keep, whatever was declared for them.

    They may be of another CPU type, or without user namespaces. Other jobs run there all the same.
    """
    declared = {node.name: node.features for node in cluster.conf.nodes if node.cloud and FEATURE in node.features}
    asked = [name for name in names if name in declared]

    async def features(name: str) -> tuple[str, ...]:
        done = await (await fleet.host(name)).run(MAKE_NAMESPACES, timeout=NAMESPACE_TIMEOUT_S, root=True)
        if done.status:
            cause = " ".join(done.error_text.split()) or f"status {done.status}"
            log.warning("%s: jobs in images do not run there: %s", name, cause)
        kept = () if done.status else node_features(cluster.facts[name].arch)
        return tuple(one for one in declared[name] if one in kept or one.partition("-")[0] != FEATURE)

    by_features: dict[tuple[str, ...], list[str]] = {}
    for name, kept in (await fleet.each(asked, features)).items():
        by_features.setdefault(kept, []).append(name)
    try:
        for kept, same in by_features.items():
            await LiveSlurm(await fleet.host(cluster.controller.name)).keep_features(same, kept)
    except ShoalError as error:
        log.warning("%s: cannot set the features of nodes: %s", ", ".join(asked), error.message)


async def unregistered(controller: Host, names: Iterable[str]) -> dict[str, str]:
    """Wait until the nodes have registered with slurmctld. Returns the errors of those that did not."""
    waiting = dict.fromkeys(names, "slurmd has not registered")
    end = asyncio.get_running_loop().time() + REGISTRATION_TIMEOUT_S
    while waiting and asyncio.get_running_loop().time() < end:
        done = await controller.run(NODES_COMMAND, timeout=30)
        states = {node.name: node for node in parse_nodes(done.text)} if done.status == 0 else {}
        for name in [*waiting]:
            node = states.get(name)
            if node is None:
                continue
            if "INVAL" in node.state or "INVALID_REG" in node.state:
                waiting[name] = f"{UNFIT_PREFIX}Slurm rejects it: {node.reason}"
            elif not _NOT_YET_UP_STATES & set(node.state):
                del waiting[name]
        if waiting:
            await asyncio.sleep(_POLL_INTERVAL_S)
    return waiting
