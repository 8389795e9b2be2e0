"""Images where a user logs in, the image that a job runs in, and the files of the engine."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shoal.errors import UsageError
from shoal.remote import modules_command
from shoal.remote.runner.unpacked_image import ARCHITECTURES, PROGRAMS
from shoal.spec.checks import refusal

FEATURE = "images"
"""Slurm's feature of nodes that run jobs in images; `images-arm64` for those of one CPU type."""
DRIVER = "driver-"
"""The feature of nodes with NVIDIA's driver: `driver-580.95`."""
PYXIS = "pyxis"
"""The feature of nodes that run them with enroot and pyxis instead."""
STORE = "images"
"""The images in the user's directory for jobs."""
STORE_PROGRAMS = ("image_bundles", "image_facts", "image_registry", "image_archives", "image_store")
"""Of `remote`: what keeps the images."""
STEP_PROGRAM = f"{PROGRAMS}/start.py"
"""Runs steps that `shoal run` does not start, on nodes."""
BUNDLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
BUNDLE_NAME_LENGTH, BUNDLE_NAME_DIGITS = 80, 8
"""Of a bundle without a name of its own: the end of the image's name, and digits for what it is made of."""
REGISTRY = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?")
REFERENCE = re.compile(r"(?!/)[a-z0-9]+([._:/-][A-Za-z0-9_.-]+)*(@sha256:[0-9a-f]{64})?")


@dataclass(frozen=True)
class StoredImage:
    """An image that a user has."""

    name: str
    reference: str = ""
    """Where it came from: a reference of a registry, or a path."""
    digest: str = ""
    """Of the registry's manifest; of an image from elsewhere, its own."""
    id: str = ""
    """The digest of its manifest as it is stored: hosts unpack it under this name."""
    architecture: str = ""
    """`amd64` or `arm64`; empty where it is not known."""
    cuda: str = ""
    """What it needs of NVIDIA's driver, in NVIDIA's words: "cuda>=12.4 brand=tesla,driver>=470,driver<471"."""
    bytes: int = 0
    made_at: int = 0
    layout: str = ""
    """The directory that it is in."""
    directory: str = ""
    """A root file system that is used as it is."""
    source: str = ""
    """The registry, for nodes that do not see the directory."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> StoredImage:
        """From the host's JSON, without keys of a later version."""
        return cls(**{entry.name: data[entry.name] for entry in fields(cls) if entry.name in data})


@dataclass(frozen=True)
class StoredContainer:
    """A container with a name that nodes keep for a user."""

    name: str
    image: str
    """What it was made of, by its name then."""
    nodes: tuple[str, ...]
    made_at: int


@dataclass(frozen=True)
class JobImage:
    """What the commands of a job run in."""

    image: StoredImage
    container: str = ""
    """The name of a container that jobs may change; made of the image where a node has none."""
    mounts: tuple[str, ...] = ()
    """SOURCE:DESTINATION[:ro]."""
    workdir: str = ""
    home: bool = False
    script: str = ""
    keep: tuple[str, ...] = ()
    """Variables that the job sets, and the image does not."""
    proxy: Mapping[str, str] = field(default_factory=dict)
    unfit: tuple[str, ...] = ()
    """Nodes whose driver is too old for it."""

    def as_json(self, binds: Iterable[str]) -> str:
        """What `remote/runner/image.py` reads. `binds` are directories that are the same inside."""
        image = asdict(self.image)
        values = {name: image[name] for name in ("name", "id", "layout", "directory", "source", "architecture")}
        values |= {name: getattr(self, name) for name in ("container", "workdir", "home", "script", "keep")}
        mounts = [(*mount.split(":")[:2], mount.endswith(":ro")) for mount in self.mounts]
        return json.dumps({**values, "proxy": dict(self.proxy), "mounts": mounts, "binds": list(binds)})

    def constraint(self, others: str | None) -> str:
        """The features that the job's nodes must have."""
        wanted = f"{FEATURE}-{self.image.architecture}" if self.image.architecture else FEATURE
        if not others:
            return wanted
        return f"{wanted}&{others}" if re.fullmatch("[A-Za-z0-9_.&-]+", others) else f"{wanted}&({others})"


def node_features(machine: str, driver: str = "") -> tuple[str, ...]:
    """The features of a node that runs jobs in images, by its CPU type and NVIDIA's driver."""
    types = (f"{FEATURE}-{ARCHITECTURES[machine]}",) if machine in ARCHITECTURES else ()
    return (FEATURE, *types, *((DRIVER + ".".join(driver.split(".")[:2]),) if re.match(r"\d", driver) else ()))


def driver_of(features: Iterable[str]) -> str:
    """NVIDIA's driver of a node with these features; empty where it has none, or is yet to be rented."""
    return next((feature.removeprefix(DRIVER) for feature in features if feature.startswith(DRIVER)), "")


def require_nodes(image: StoredImage, features: Iterable[Sequence[str]]) -> None:
    """Raise UsageError where no node can run the image. `features` are those of each node."""
    present_features = {feature for node in features for feature in node}
    types = {feature for feature in present_features if feature.partition("-")[0] == FEATURE}
    if PYXIS in present_features and FEATURE not in types:
        raise UsageError(
            "this cluster runs images with pyxis, and `--image` is of the engine oci",
            hint="use `srun --container-image=...`; or the operator writes `containers: oci`",
        )
    if FEATURE not in types:
        raise UsageError(
            "no node of the cluster runs jobs in images",
            hint="the operator adds `containers: oci` to the file and runs `shoal up`; `shoal check` says which cannot",
        )
    if image.architecture and f"{FEATURE}-{image.architecture}" not in types:
        present = ", ".join(sorted(name.partition("-")[2] for name in types if "-" in name))
        fix = f"get the image for {present}" if present else "use another image"
        raise UsageError(f"image {image.name} is for {image.architecture}, and the nodes are {present}", hint=fix)


def bundle_name(image: str, settings: str) -> str:
    """The name of a bundle that the user gives none: other settings have another, so no bundle replaces another."""
    readable = re.sub("[^A-Za-z0-9_.-]+", "_", image).strip("_")[-BUNDLE_NAME_LENGTH:]
    return f"{readable}-{hashlib.sha256(f'{image} {settings}'.encode()).hexdigest()[:BUNDLE_NAME_DIGITS]}"


def image_name(value: object) -> str:
    """What `--image` may be: a name, a reference of a registry, or a path on the hosts."""
    text = value if isinstance(value, str) else ""
    if text.startswith((".", "~")):
        raise refusal("not a path on the hosts", "give an absolute path, on a share that the nodes have")
    if not re.fullmatch(r"(/[A-Za-z0-9_.+@-]+)+/?", text) and not REFERENCE.fullmatch(text):
        raise refusal("not an image", "give a name, a reference such as docker.io/library/debian:12, or a path")
    return text.rstrip("/")


def image_mount(value: object) -> str:
    """What a `--mount` may be."""
    if not isinstance(value, str) or not re.fullmatch(r"/[^:\0\n]*:/[^:\0\n]*(:ro)?", value):
        raise refusal("not a mount", "write it like /data:/data or /data:/data:ro, with absolute paths")
    if os.path.normpath(value.split(":")[1]).strip("/") == "":
        raise refusal("a mount over the whole image", "name a directory in it, such as /data")
    return value


def is_reference(image: str) -> bool:
    """Whether it names an image of a registry: `debian:12`, `docker.io/library/debian`."""
    return bool(REFERENCE.fullmatch(image)) and bool(set("/:@") & set(image))


def export_command(container: str) -> tuple[str, ...]:
    """Print a container of a node, for `save` of `remote/image_store.py`."""
    return ("python3", "-I", "-S", STEP_PROGRAM, "export", container, "--")


def removal_command(container: str) -> tuple[str, ...]:
    """Remove a container of a node."""
    return ("python3", "-I", "-S", STEP_PROGRAM, "remove", container, "--")


def store_command(verb: str, store: str, *words: str, proxy: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Run `remote/image_store.py` on the host that the user logs in to."""
    variables = ("env", *(f"{name}={value}" for name, value in proxy.items())) if proxy else ()
    return (*variables, *modules_command(STORE_PROGRAMS, verb, store, *words))


def parse_images(text: str) -> list[StoredImage]:
    return [StoredImage.of(data) for data in json.loads(text)]


def parse_containers(text: str) -> list[StoredContainer]:
    return [StoredContainer(**{**data, "nodes": tuple(data["nodes"])}) for data in json.loads(text)]


def parse_image(text: str) -> StoredImage | None:
    data = json.loads(text)
    return None if data is None else StoredImage.of(data)
