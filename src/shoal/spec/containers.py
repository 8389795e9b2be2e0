"""Jobs in images in the file: one word or a mapping."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, StrictBool

from shoal.spec.checks import choice
from shoal.spec.environments import HostDirectory
from shoal.spec.values import Port, ShortForm

ENGINES = ("oci",)
REGISTRY_PORT = 5000


class Registry(ShortForm):
    """A registry of images on the controller, with TLS and a login for each user.

    In the file it is `registry: true`, or a mapping of the fields below.
    """

    short_schema: ClassVar = {"type": "boolean"}
    refusal = ("not a registry", "write true, or {port: 5000}, or delete it")

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
    refusal = ("not an engine for images", "write `oci`")

    engine: Annotated[Literal["oci"], BeforeValidator(choice("engine", ENGINES))] = "oci"
    """`oci`: from Debian's packages, without root, on hosts with user namespaces."""

    registry: Registry | None = None
    """A registry of the cluster's own: `true`, or its port and directory."""

    podman: StrictBool = False
    """Jobs may run `podman`, without root and inside their limits."""

    docker: StrictBool = False
    """Jobs of users with `docker: true` may run `docker`. A guard confines it; podman is the smaller risk."""

    @classmethod
    def from_short(cls, value: object) -> dict[str, Any] | None:
        return {"engine": value} if isinstance(value, str) else None
