"""Jobs in images in the file: one word or a mapping."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from shoal.spec.checks import choice
from shoal.spec.values import ShortForm

ENGINES = ("oci",)


class Containers(ShortForm):
    """How jobs run in images: `shoal run --image` and `srun --container`.

    In the file it is a word (`containers: oci`) or a mapping of the fields below.
    """

    short_schema: ClassVar = {"type": "string", "enum": [*ENGINES]}
    refusal = ("not an engine for images", "write `oci`")

    engine: Annotated[Literal["oci"], BeforeValidator(choice("engine", ENGINES))] = "oci"
    """`oci`: from Debian's packages, without root, on hosts with user namespaces."""

    @classmethod
    def from_short(cls, value: object) -> dict[str, Any] | None:
        return {"engine": value} if isinstance(value, str) else None
