"""`shoal image build`: an image of a Containerfile or a list of packages, built in a job of the user's on a node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from shoal.containers.build import (
    CONTAINERFILES,
    REQUIREMENTS,
    BuildRequest,
    base_names,
    build_command,
    is_requirements,
    requirements_containerfile,
)
from shoal.containers.images import FEATURE, StoredImage, parse_images
from shoal.environments.requirements import read_requirements
from shoal.errors import UsageError
from shoal.hostlist import compress
from shoal.jobs.bundle import archive
from shoal.jobs.model import JobSpec
from shoal.plan.nodes import UNSCHEDULED
from shoal.slurm.state import NodeState
from shoal.spec.environments import Environment
from shoal.spec.local_files import read_regular_file
from shoal.verbs.context import Context
from shoal.verbs.images import ONE_TASK, ImageStore, build_of_directory, checked_image, image_nodes, open_store
from shoal.verbs.node_files import unique_job_name

CONTEXT_BYTES = 512 * 1024 * 1024
CONTAINERFILE_BYTES = 1024 * 1024
BUILD_MINUTES = 60
BUILD_FIX = "correct it; --time, --mem, --cpus-per-task and --partition change what the job of a build may use"
IGNORED = (".git", "__pycache__", ".venv")


async def build(
    context: Context, name: str, source: str, base: str | None, node: str | None, job: JobSpec
) -> StoredImage:
    """Make an image of a Containerfile, of requirements, or of a directory with a root file system.

    `job` says what the build may use of a node.
    """
    checked_image(name)
    request = await asyncio.to_thread(read_source, source, base)
    if request is None:
        return await build_of_directory(context, name, source)
    return await _build_in_job(context, name, request, base, node, job)


def read_source(source: str, base: str | None) -> BuildRequest | None:
    """What to send to a node; None for a root file system, which is where the user logs in. Raises UsageError."""
    path = Path(source).expanduser()
    if file := _containerfile(path):
        return _of_containerfile(file)
    if path.is_file() and is_requirements(path.name):
        if base is None:
            fix = "name one with Python: `--from docker.io/library/python:3.12-slim`, or one of `shoal image list`"
            raise UsageError(f"{source} is a list of packages, and an image needs a base", hint=fix)
        return _of_requirements(path, base)
    if path.is_file():
        fix = "name it Containerfile or Dockerfile; a list of packages ends with .txt, .lock or .toml"
        raise UsageError(f"{source} is neither a Containerfile nor a list of packages", hint=fix)
    if not source.startswith("/"):
        what = f"{source} has no Containerfile" if path.is_dir() else f"there is no {source}"
        fix = "a directory with a root file system is named by its absolute path where you log in"
        raise UsageError(what, hint=fix)
    if base is not None:
        raise UsageError("--from is for a Containerfile or a list of packages", hint="leave it out")
    return None


def _containerfile(path: Path) -> Path | None:
    """The Containerfile that a path names, itself or the one in a directory."""
    if path.is_file():
        known = (*CONTAINERFILES, *(f".{name.lower()}" for name in CONTAINERFILES))
        is_one = path.name.startswith(CONTAINERFILES) or path.name.lower().endswith(known)
        return path if is_one else None
    return next((path / name for name in CONTAINERFILES if (path / name).is_file()), None)


def _of_containerfile(file: Path) -> BuildRequest:
    """The Containerfile with all files beside and below it."""
    try:
        text = read_regular_file(file, CONTAINERFILE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}", hint="check that it is the right file") from None
    root, contents, size = file.parent, {}, 0
    for place, directories, names in os.walk(root):
        directories[:] = [name for name in directories if name not in IGNORED]
        links = [name for name in directories if Path(place, name).is_symlink()]
        for path in (Path(place, name) for name in (*names, *links)):
            if path.is_symlink() or path.is_file():
                contents[path.relative_to(root).as_posix()] = path
                size += path.lstat().st_size
        if size > CONTEXT_BYTES:
            fix = f"keep the Containerfile in a directory of its own with less than {CONTEXT_BYTES >> 20} MiB"
            raise UsageError(f"{root.resolve()} is sent to the node, and has more than that", hint=fix)
    return BuildRequest(file.name, text, contents=contents)


def _of_requirements(path: Path, base: str) -> BuildRequest:
    kind = "pyproject" if path.name == "pyproject.toml" else "lock" if path.suffix in (".lock", ".toml") else ""
    entry = Environment.model_validate({kind or "requirements": str(path.absolute())})
    found = read_requirements(entry, Path.cwd())
    return BuildRequest(
        "Containerfile",
        requirements_containerfile(base, is_locked=found.locked),
        texts={REQUIREMENTS: found.requirements, "constraints.txt": found.constraints},
    )


async def _build_in_job(
    context: Context, name: str, request: BuildRequest, base: str | None, node: str | None, job: JobSpec
) -> StoredImage:
    data = await asyncio.to_thread(request.pack, archive)
    async with open_store(context) as store:
        nodes, _ = await image_nodes(store.host, node)
        if not nodes:
            fix = "the operator adds `containers: oci` to the file and runs `shoal up`"
            raise UsageError("no node of the cluster builds images", hint=fix)
        bases = await _own_bases(store, request.text, base)
        place = build_place(nodes, bases.values(), named=bool(node), partition=job.partition)
        limits = [f"--time={job.time or BUILD_MINUTES}", f"--cpus-per-task={job.cpus_per_task or 1}"]
        limits += [f"--mem={job.mem}"] if job.mem else []
        line = (*ONE_TASK, unique_job_name("shoal-image-build"), *place, *limits)
        command = build_command(
            name, request.file, base or "", bases, store.record.proxy, f"{store.directory}/auth.json"
        )
        with context.progress.phase(f"image {name}", 1) as phase:
            image = await store.receive(name, (*line, *command), data, phase, what=f"build image {name}", fix=BUILD_FIX)
            phase.done(store.host.name)
    return image


def build_place(
    nodes: Sequence[NodeState], bases: Iterable[StoredImage], *, named: bool, partition: str | None = None
) -> tuple[str, ...]:
    """srun's options for where to build: on the node that the user has `named`, or on one of these.

    A node is rented only where no permanent one can build. Its CPU type is that of the images to build from, where a
    node has it.
    """
    if named:
        return f"--nodelist={nodes[0].name}", f"--partition={partition or nodes[0].partitions[0]}"
    nodes = [node for node in nodes if partition in (None, *node.partitions)] or nodes
    types = {base.architecture for base in bases if base.architecture}
    feature = f"{FEATURE}-{types.pop()}" if len(types) == 1 else FEATURE
    able = [node for node in nodes if feature in node.features]
    if not able:  # enough where nothing runs in the build
        feature, able = FEATURE, [*nodes]
    rented = [node.name for node in able if node.cloud]
    permanent = [node for node in able if not node.cloud and not UNSCHEDULED & set(node.state)]
    partitions = ",".join(sorted({node.partitions[0] for node in permanent or able}))
    return (
        f"--constraint={feature}",
        f"--partition={partition or partitions}",
        *((f"--exclude={compress(rented)}",) if permanent and rented else ()),
    )


async def _own_bases(store: ImageStore, text: str, base: str | None) -> dict[str, StoredImage]:
    """The user's own images that the Containerfile starts from."""
    wanted = base_names(text, base)
    stored = {image.name: image for image in parse_images(await store.ask("list", what="list images"))}
    # buildah gives no image a name with a digest: it pulls such a one by itself.
    found = {name: stored[name] for name in wanted if name in stored and "@" not in name}
    for name in wanted:
        if name not in found and not set("/:.@") & set(name) and name != "scratch":
            known = ", ".join(stored) or "none"
            raise UsageError(
                f"you have no image {name} to build from; yours are: {known}",
                hint=f"write the registry too, such as docker.io/library/{name}, or pull it first",
            )
    return found
