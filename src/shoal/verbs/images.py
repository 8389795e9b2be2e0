"""`shoal image`, and the image that a job runs in: a user's images, in the user's directory for jobs.

Everything is done as the user, on the one host that they log in to; nodes unpack an image when a job first needs it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from shoal.containers.images import (
    BUNDLE_NAME,
    FEATURE,
    REGISTRY,
    STEP_PROGRAM,
    STORE,
    JobImage,
    StoredContainer,
    StoredImage,
    bundle_name,
    driver_of,
    export_command,
    image_name,
    is_reference,
    parse_containers,
    parse_image,
    parse_images,
    removal_command,
    require_nodes,
    store_command,
)
from shoal.contract import KILL_WAIT_S
from shoal.environments.cuda import is_driver_fit, newest_cuda, oldest_driver
from shoal.errors import CommandFailed, CommandTimeout, HostError, UsageError
from shoal.health.diagnosis import job_hint
from shoal.hostlist import compress, expand
from shoal.hosts.api import Host, Process, Result
from shoal.jobs.model import JobSpec, job_from_options
from shoal.jobs.record import step_command
from shoal.jobs.resolve import gpus_of
from shoal.plan.progress import Phase, ProgressReporter
from shoal.remote.image_store import CAUSE, EXIT_WITH_CAUSE
from shoal.remote.runner.driver_files import SWITCH, least_cuda, numbers
from shoal.slurm.state import NODES_COMMAND, NodeState, PartitionState, parse_nodes
from shoal.spec.checks import InvalidValue, secret_reference
from shoal.spec.cluster_record import ClusterRecord
from shoal.spec.local_files import resolve_secret
from shoal.verbs.context import Context
from shoal.verbs.node_files import cancel_short_job, job_name, unique_job_name
from shoal.verbs.operator_login import read_login
from shoal.verbs.own_jobs import choose_nodes, own_jobs
from shoal.verbs.run_user import make_user_directory
from shoal.verbs.slurmctld import slurm_output

PULL_TIMEOUT_S = 3600.0
LIST_TIMEOUT_S = 60.0
LOGIN_TIMEOUT_S = 120.0
SWEEP_TIMEOUT_S = 30.0
REMOVAL_TIMEOUT_S = 600.0
SAVE_LIMIT, REMOVAL_LIMIT = "--time=30", "--time=10"
"""Minutes that Slurm lets a job on a node run: it starts sooner between others."""
QUEUE_INTERVAL_S = 2.0
END_TIMEOUT_S = KILL_WAIT_S + 30.0
"""A cancelled job ends within KillWait."""
RECEIVE = "receive"
"""The verb of the store that keeps the image of a job."""
TRY_AGAIN = "correct it and try again"
ONE_TASK = ("srun", "--nodes=1", "--ntasks=1", "--quiet", "--chdir=/")
FETCH_FIX = "check that the host reaches the registry, and that its disks answer"
FAILURE_FIX = "try again; if it stays, it is a fault of Shoal: report it with this line"
DIRECTORY_FIX = "ask the operator to repair it"


@dataclass(frozen=True)
class PushedImage:
    """An image that a registry has."""

    name: str
    reference: str
    digest: str


@dataclass(frozen=True)
class ImageStore:
    """Where a user's images are."""

    host: Host
    directory: str
    record: ClusterRecord

    async def ask(self, verb: str, *words: str, what: str, timeout: float = LIST_TIMEOUT_S, stdin: bytes = b"") -> str:
        command = store_command(verb, self.directory, *words, proxy=self.record.proxy)
        try:
            result = await self.host.run(command, stdin=stdin, timeout=timeout, root=False)
        except CommandTimeout:
            raise CommandTimeout(self.host.name, f"cannot {what} within {timeout:g} s", hint=FETCH_FIX) from None
        self._check(result, what)
        return result.text

    async def fetch(self, verb: str, source: str, name: str, phase: Phase) -> StoredImage:
        """Keep an image of a registry, an archive or a directory, and show how much of it is here meanwhile."""
        return StoredImage.of(await self._follow(phase, f"{verb} image {source}", FETCH_FIX, verb, source, name))

    async def push(self, name: str, reference: str, phase: Phase) -> PushedImage:
        """Copy an image to a registry, and show how much was sent meanwhile."""
        return PushedImage(**await self._follow(phase, f"push image {name}", FETCH_FIX, "push", name, reference))

    async def receive(
        self, name: str, job: Sequence[str], stdin: bytes, phase: Phase, *, what: str, fix: str = TRY_AGAIN
    ) -> StoredImage:
        """Keep the image that a job prints, however long it waits. What it waits for, or says, is shown meanwhile."""
        words = (RECEIVE, name, str(len(stdin)), *job)
        return StoredImage.of(await self._follow(phase, what, fix, *words, stdin=stdin, timeout=None))

    async def _follow(
        self, phase: Phase, what: str, fix: str, *words: str, stdin: bytes = b"", timeout: float | None = PULL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Run a verb that takes long; its answer. What it leaves when a person does not wait for it is removed."""
        command = store_command(words[0], self.directory, *words[1:], proxy=self.record.proxy)
        process = await self.host.start(command, root=False)
        result = None
        queue = asyncio.create_task(self._show_queue(job_name(words), phase))
        try:
            async with asyncio.timeout(timeout):
                await process.write(stdin)
                answer = await self._read_lines(process, phase)
                result = await process.wait()
        except TimeoutError:
            raise CommandTimeout(self.host.name, f"cannot {what} within {timeout:g} s", hint=fix) from None
        except asyncio.CancelledError:
            if words[0] == RECEIVE:
                phase.update(self.host.name, "ends its job")
                with suppress(HostError, TimeoutError):
                    async with asyncio.timeout(END_TIMEOUT_S):
                        await process.wait()  # the end of its input ends the job
            raise
        finally:
            queue.cancel()
            await asyncio.gather(queue, return_exceptions=True)
            await process.kill()
            if result is None:
                with suppress(HostError):
                    await self.host.run(store_command("sweep", self.directory), timeout=SWEEP_TIMEOUT_S, root=False)
        self._check(result, what, fix if words[0] == RECEIVE else TRY_AGAIN)
        return answer

    async def _show_queue(self, name: str, phase: Phase) -> None:
        """Show why a job waits, until it runs. A step of a running job does not wait."""
        state = "PENDING" if name else ""
        while state == "PENDING":
            await asyncio.sleep(QUEUE_INTERVAL_S)
            with suppress(HostError):
                words = ("squeue", "--noheader", f"--name={name}", "--format=%T %r")
                state, _, reason = (await slurm_output(self.host, words)).strip().partition(" ")
                if state == "PENDING":
                    phase.update(self.host.name, f"waits in the queue: {job_hint(reason) or reason}")

    async def _read_lines(self, process: Process, phase: Phase) -> dict[str, Any]:
        while line := await process.readline():
            data: dict[str, Any] = json.loads(line)
            if "progress" not in data:
                return data
            phase.update(self.host.name, data["progress"])
        return {}

    def _check(self, result: Result, what: str, fix: str = TRY_AGAIN) -> None:
        """Raise what the program says is wrong. That it failed in itself is no error of the person."""
        text = result.error_text.strip()
        if result.status == EXIT_WITH_CAUSE:
            raise UsageError(f"cannot {what}: {text}", hint=fix)
        if result.status != 0:
            cause = text.splitlines()[-1] if text else f"status {result.status}"
            raise CommandFailed(self.host.name, f"cannot {what}: {cause}", hint=FAILURE_FIX)


@asynccontextmanager
async def open_store(context: Context) -> AsyncIterator[ImageStore]:
    async with context.controller_host() as host:
        record = context.joined.record if context.joined else (await read_login(host)).record
        yield await store_on(host, record)


async def store_on(host: Host, record: ClusterRecord | None) -> ImageStore:
    if record is None:
        raise UsageError(f"{host.name} does not describe the cluster yet", hint="run `shoal up`")
    place = await make_user_directory(host, record, DIRECTORY_FIX)
    return ImageStore(host, f"{place['root']}/{STORE}", record)


async def pull(context: Context, source: str, name: str | None) -> StoredImage:
    """Get an image from a registry, an archive or an OCI layout."""
    return await _add(context, "pull", checked_image(source), name or source)


async def build_of_directory(context: Context, name: str, source: str) -> StoredImage:
    """Make an image of a directory with a root file system, on the host that the user logs in to."""
    return await _add(context, "build", checked_image(source), name)


async def push(context: Context, name: str, reference: str | None) -> PushedImage:
    """Copy an image of the user's to a registry: without a reference, to the cluster's own."""
    if reference is not None and not is_reference(reference):
        raise UsageError(f"{reference!r} is not a place in a registry", hint="write it like registry/lab/train:3")
    async with open_store(context) as store:
        with context.progress.phase(f"image {name}", 1) as phase:
            pushed = await store.push(name, reference or "", phase)
            phase.done(store.host.name)
    return pushed


async def login(context: Context, registry: str, user: str, password: str) -> None:
    """Keep a login to a registry for pulls and pushes. `password` is a reference: `env:NAME`, `file:PATH`."""
    try:
        reference = secret_reference(password)
    except InvalidValue as error:
        raise UsageError(f"--password is {error.what}", hint=error.fix) from None
    if not REGISTRY.fullmatch(registry):
        raise UsageError(f"{registry!r} is not a registry", hint="write it like registry.example.org or gpu01:5000")
    secret = resolve_secret(reference, "--password")
    async with open_store(context) as store:
        what = f"log in to {registry}"
        await store.ask("login", registry, user, what=what, timeout=LOGIN_TIMEOUT_S, stdin=secret)


async def logout(context: Context, registry: str) -> None:
    async with open_store(context) as store:
        await store.ask("logout", registry, what=f"log out of {registry}")


async def save(context: Context, name: str, container: str, node: str | None, job: str | None) -> StoredImage:
    """Make an image of a container with a name: of the one on a node, or where a running job of the user's is."""
    checked_image(name)
    job_from_options({"script": "-", "container_name": container})  # rejects what is no name
    async with open_store(context) as store:
        if job is not None:
            chosen, running = next(iter(choose_nodes(await own_jobs(store.host), job, node).items()))
            step = step_command(running.number, [chosen], export_command(container), ("--chdir=/",))
        else:
            step = await _node_job(store.host, node, "shoal-image-save", SAVE_LIMIT, *export_command(container))
        with context.progress.phase(f"image {name}", 1) as phase:
            image = await store.receive(name, step, b"", phase, what=f"save container {container}")
            phase.done(store.host.name)
    return image


async def _node_job(host: Host, node: str | None, name: str, *command: str) -> tuple[str, ...]:
    """A job of its own on the node, for a container there."""
    chosen, others = await image_nodes(host, node)
    if len(chosen) != 1:
        raise UsageError("each node has containers of its own", hint=f"name one of {others} with --node")
    if chosen[0].cloud and "POWERED_DOWN" in chosen[0].state:
        raise UsageError(f"{chosen[0].name} is not rented now", hint="its containers went with its machine")
    place = (f"--nodelist={chosen[0].name}", f"--partition={chosen[0].partitions[0]}")
    return (*ONE_TASK, *place, unique_job_name(name), *command)


async def image_nodes(host: Host, node: str | None) -> tuple[list[NodeState], str]:
    """The nodes that run jobs in images, or the one of this name; and the names of them all."""
    nodes = [state for state in parse_nodes(await slurm_output(host, NODES_COMMAND)) if FEATURE in state.features]
    names = compress(state.name for state in nodes)
    chosen = [state for state in nodes if node in (state.name, None) and state.partitions]
    if node is not None and not chosen:
        raise UsageError(f"{node} runs no jobs in images", hint=f"name one of {names} with --node")
    return chosen, names


async def bundle(context: Context, job: JobSpec, name: str | None) -> str:
    """Write a bundle for `srun --container`, of the image or container that a job names; where it is on the hosts."""
    source = job.image or job.container_name
    if source is None:
        fix = "name one of `shoal image list`: an image, or with --container-name a container that nodes have"
        raise UsageError("a bundle runs commands in an image", hint=fix)
    if name is not None and not BUNDLE_NAME.fullmatch(name):
        raise UsageError(f"--name {name!r} is not a bundle's name", hint="use letters, digits, `-`, `_` and `.`")
    async with open_store(context) as store:
        if not any(f"{store.directory}/".startswith(f"{share}/") for share in store.record.shares):
            raise UsageError(
                f"{store.directory} is not on a share, so nodes would not have the bundle",
                hint="use `shoal run --image`, or ask the operator for a share (`storage:`)",
            )
        nodes = parse_nodes(await slurm_output(store.host, NODES_COMMAND))
        image = await job_image(store.host, store.record, job, nodes, context.progress)
        settings = image.as_json(())
        words = (name or bundle_name(source, settings), settings, STEP_PROGRAM)
        path: str = json.loads(await store.ask("bundle", *words, what=f"write a bundle of {source}"))["path"]
        return path


async def _add(context: Context, verb: str, source: str, name: str) -> StoredImage:
    async with open_store(context) as store:
        return await _fetch_shown(store, verb, source, checked_image(name), context.progress)


async def list_images(context: Context) -> tuple[list[StoredImage], list[StoredContainer]]:
    """The user's images, and the containers with a name that nodes keep."""
    async with open_store(context) as store:
        images, containers = await asyncio.gather(
            store.ask("list", what="list images"), store.ask("containers", what="list containers")
        )
        return parse_images(images), parse_containers(containers)


async def remove(context: Context, name: str) -> None:
    """Forget a name. The image goes too, unless it has another."""
    async with open_store(context) as store:
        await store.ask("remove", name, what=f"remove image {name}")


async def remove_container(context: Context, name: str, node: str) -> None:
    """Remove a container with a name from a node, in a job there."""
    job_from_options({"script": "-", "container_name": name})  # rejects what is no name
    async with open_store(context) as store:
        job = await _node_job(store.host, node, "shoal-image-remove", REMOVAL_LIMIT, *removal_command(name))
        result = None
        try:
            result = await store.host.run(job, timeout=REMOVAL_TIMEOUT_S, root=False)
        except CommandTimeout:
            fix = "see `squeue --me`: the job may wait for the node"
            raise CommandTimeout(
                store.host.name, f"cannot remove container {name} within {REMOVAL_TIMEOUT_S:g} s", hint=fix
            ) from None
        finally:
            if result is None:
                await cancel_short_job(store.host, job)
        if result.status != 0:
            said = result.error_text.strip().splitlines()
            cause = next((line for line in said if line.startswith(CAUSE)), said[-1] if said else "srun failed")
            what = f"cannot remove container {name}: {cause.removeprefix(CAUSE)}"
            raise UsageError(what, hint="`shoal image list` shows which nodes have it")


async def prune(context: Context) -> list[str]:
    """Remove images without a name. Returns their ids."""
    async with open_store(context) as store:
        ids: list[str] = json.loads(await store.ask("prune", what="remove images without a name"))
        return ids


async def job_image(
    host: Host, record: ClusterRecord | None, job: JobSpec, nodes: Iterable[NodeState], progress: ProgressReporter
) -> JobImage:
    """The image that a job names. One of a registry is pulled where the user does not have it yet."""
    if job.environment:
        raise UsageError("--env and --image exclude each other", hint="install the packages in the image")
    image = StoredImage(job.container_name or "")
    if job.image:
        store = await store_on(host, record)
        known = parse_image(await store.ask("find", job.image, what=f"find image {job.image}"))
        if known is None and not (is_reference(job.image) or job.image.startswith("/")):
            names = [stored.name for stored in parse_images(await store.ask("list", what="list images"))]
            fix = f"yours are: {', '.join(names)}" if names else "`shoal image pull REGISTRY/IMAGE:TAG` gets one"
            raise UsageError(f"you have no image {job.image}", hint=fix)
        image = known or await _fetch_shown(store, "pull", job.image, job.image, progress)
    nodes = list(nodes)
    require_nodes(image, [node.features for node in nodes])
    unfit = unfit_nodes(image, job, nodes)
    return JobImage(
        image,
        job.container_name or "",
        job.mount,
        job.workdir or "",
        job.home == "on",
        job.script,
        tuple(job.export),
        record.proxy if record else {},
        unfit,
    )


def nodes_with_images(
    job: JobSpec, nodes: Sequence[NodeState], partitions: Iterable[PartitionState]
) -> Sequence[NodeState]:
    """The nodes of the job's partition that run jobs in images; where there are none, all nodes.

    What may be rented for another partition has the features of every CPU type.
    """
    name = job.partition or next((partition.name for partition in partitions if partition.default), None)
    return [node for node in nodes if name in node.partitions and FEATURE in node.features] or nodes


def unfit_nodes(image: StoredImage, job: JobSpec, nodes: Sequence[NodeState]) -> tuple[str, ...]:
    """The nodes whose driver is too old for the image's CUDA. Raises UsageError where there is no other for the job."""
    if not image.cuda or job.gpus_per_node == 0 or SWITCH in job.export:
        return ()
    wanted = f"{FEATURE}-{image.architecture}" if image.architecture else FEATURE
    listed = expand(job.nodelist) if job.nodelist else []  # the job gets all of these
    drivers = {
        node.name: driver_of(node.features)
        for node in nodes
        if wanted in node.features and job.partition in (None, *node.partitions)
        if (gpus_of(node) or not job.gpus_per_node) and (node.name in listed or not listed)
    }
    unfit = [name for name, driver in drivers.items() if not is_driver_fit(image.cuda, driver)]
    if unfit and (listed or len(unfit) == len(drivers)):
        newest = max((newest_cuda(drivers[name]) for name in unfit), key=numbers)
        least = least_cuda(image.cuda)
        raise UsageError(
            f"image {image.name} needs CUDA {least}, and the drivers of {compress(unfit)} are for {newest} or older",
            hint=f"take an image for CUDA {newest} or older; or the operator installs driver {oldest_driver(least)} or"
            " newer, and runs `shoal up`",
        )
    return tuple(unfit)


async def _fetch_shown(store: ImageStore, verb: str, source: str, name: str, progress: ProgressReporter) -> StoredImage:
    with progress.phase(f"image {name}", 1) as phase:
        image = await store.fetch(verb, source, name, phase)
        phase.done(store.host.name)
    return image


def checked_image(text: str) -> str:
    try:
        return image_name(text)
    except InvalidValue as error:
        raise UsageError(f"{text!r} is {error.what}", hint=error.fix) from None
