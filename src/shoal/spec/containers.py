"""Jobs in images in the file: one word or a mapping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, StrictBool

from shoal.spec.checks import choice
from shoal.spec.environments import HostDirectory
from shoal.spec.files import ShippedFile
from shoal.spec.finding import Problem
from shoal.spec.tracking import Tracking
from shoal.spec.values import Disk, FilePath, Port, ShortForm

ENGINES = ("oci", "pyxis")
ENROOT, PLUGIN = "/opt/pyxis/enroot.deb", "/opt/pyxis/spank_pyxis.so"
"""Where hosts have the operator's files."""
PLUGSTACK_LINE = f"required {PLUGIN} container_scope=global\n"
_MACHINES = {62: "x86_64", 183: "aarch64"}
REGISTRY_PORT = 5001  # MLflow has 5000


class Registry(ShortForm):
    """A registry of images on the controller, with TLS and a login for each user.

    In the file it is `registry: true`, or a mapping of the fields below.
    """

    short_schema: ClassVar = {"type": "boolean"}
    refusal = ("not a registry", "write true, or {port: 5001}, or delete it")

    port: Port = REGISTRY_PORT
    """Its port, open to members only."""
    directory: HostDirectory = "/var/lib/docker-registry"
    """Where it keeps images. They stay when you delete `registry` from the file."""

    @classmethod
    def from_short(cls, value: object) -> dict[str, Any] | None:
        return {} if value is True else None


class Containers(ShortForm):
    """How jobs run in images: `shoal run --image` and `srun --container`.

    In the file it is a word (`containers: oci`) or a mapping of the fields below.
    """

    short_schema: ClassVar = {"type": "string", "enum": [*ENGINES]}
    refusal = ("not an engine for images", "write `oci`, or {engine: pyxis, enroot: FILE.deb, plugin: spank_pyxis.so}")

    engine: Annotated[Literal["oci", "pyxis"], BeforeValidator(choice("engine", ENGINES))] = "oci"
    """`oci`: from Debian's packages, without root, on hosts with user namespaces. `pyxis`: with files of yours."""

    enroot: FilePath | None = None
    """The package of enroot for the nodes' system, a `.deb` on your machine. For `pyxis`."""

    plugin: FilePath | None = None
    """`spank_pyxis.so`, built for the Slurm of the cluster. For `pyxis`."""

    registry: Registry | None = None
    """A registry of the cluster's own: `true`, or its port and directory."""

    disk: Disk | None = None
    """What unpacked images and named containers of one user may take on a node, for `oci`. Default: the whole disk."""

    podman: StrictBool = False
    """Jobs may run `podman`, without root and inside their limits."""

    docker: StrictBool = False
    """Jobs of users with `docker: true` may run `docker`, which is podman there. Implies `podman`."""

    nvidia: StrictBool = False
    """Nodes with GPUs get NVIDIA's container tools from NVIDIA's package source. `oci` alone needs none."""

    @classmethod
    def from_short(cls, value: object) -> dict[str, Any] | None:
        return {"engine": value} if isinstance(value, str) else None

    @property
    def sources(self) -> dict[str, ShippedFile]:
        """The operator's files, by their place on hosts."""
        if self.engine != "pyxis" or self.enroot is None or self.plugin is None:
            return {}
        return {
            ENROOT: ShippedFile(source=self.enroot, hosts=("compute",)),
            PLUGIN: ShippedFile(source=self.plugin, mode="0644"),
        }


def container_problems(
    containers: Containers | None, tracking: Tracking | None, hosts: Sequence[str]
) -> Iterator[Problem]:
    """Every rule about engines that does not hold. `hosts` are all members, the controller first."""
    if containers is None:
        return
    is_beside = tracking is not None and not tracking.url and tracking.host in (None, *hosts[:1])
    if tracking and is_beside and containers.registry and containers.registry.port == tracking.port:
        what = f"the registry and MLflow both have port {tracking.port} of the controller"
        yield Problem(("containers", "registry"), what, "", "choose another port for one of them")
    if containers.engine == "pyxis" and containers.disk is not None:
        fix = "delete it: Shoal does not limit what enroot keeps"
        yield Problem(("containers", "disk"), "only the engine oci has a limit on disks", "", fix)
    for name in ("enroot", "plugin"):
        if containers.engine == "pyxis" and getattr(containers, name) is None:
            fix = f"add {name}: {'FILE.deb' if name == 'enroot' else 'spank_pyxis.so'}"
            yield Problem(("containers",), f"the engine pyxis needs your file of {name}", "", fix)
        if containers.engine == "oci" and getattr(containers, name) is not None:
            yield Problem(
                ("containers", name), "the engine oci needs no such file", "", "write engine: pyxis, or delete it"
            )


def elf_machine(plugin: bytes) -> str:
    """The CPU type of a plugin; empty where it is none that Shoal knows."""
    is_elf = plugin[:4] == b"\x7fELF" and len(plugin) > 20
    return _MACHINES.get(int.from_bytes(plugin[18:20], "little"), "") if is_elf else ""


def plugstack() -> ShippedFile:
    """Slurm reads of the plugin here; nodes get it from slurmctld."""
    file = ShippedFile(source="plugstack.conf", hosts=("controller", "login"))
    return file.with_content(("# Written by shoal; changes here are lost.\n" + PLUGSTACK_LINE).encode(), False)
