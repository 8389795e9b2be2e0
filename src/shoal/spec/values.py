"""The types of the spec's values, and what all of its models have in common. `checks.py` has the rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import BaseModel, BeforeValidator, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

from shoal.spec.checks import (
    DURATION,
    SIZE,
    USER_NAME,
    address,
    cluster_name,
    duration,
    feature_name,
    file_path,
    host_name,
    host_names,
    nodeset_name,
    partition_name,
    refusal,
    secret_reference,
    site_name,
    size,
    slurm_time,
    user_name,
    whole_number,
)


class SpecModel(BaseModel):
    """A model of the file: frozen, and without unknown keys. `docs.py` reads the text under each field."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    invalid: ClassVar[frozenset[str]] = frozenset()
    """The fields whose values in the file are not valid. Only `loader.partial` makes models that have some."""

    def is_set(self, name: str) -> bool:
        """Whether the file sets a field, even to an invalid value. The field's default counts as not set."""
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return name in self.invalid or getattr(self, name) != default

    def set_among(self, names: Iterable[str]) -> list[str]:
        """Those of the fields that the file sets."""
        return [name for name in names if self.is_set(name)]


class ShortForm(SpecModel):
    """A model that the file may also write in short: as a word, or as `true`."""

    short_schema: ClassVar[dict[str, Any]]
    """The JSON Schema of the short form."""
    refusal: ClassVar[tuple[str, str]]
    """What is wrong with a value of neither form, and the fix."""

    @classmethod
    def from_short(cls, value: object) -> dict[str, Any] | None:
        """The mapping that a short form stands for; None where it is none."""
        return {"kind": value} if isinstance(value, str) else None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _mapping(cls, value: Any) -> Any:
        mapping = value if isinstance(value, dict | cls) else cls.from_short(value)
        if mapping is None:
            raise refusal(*cls.refusal)
        return mapping

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        mapping = handler.resolve_ref_schema(handler(schema))
        return {"anyOf": [cls.short_schema, {**mapping}], "description": mapping["description"]}


@dataclass(frozen=True)
class Between:
    """A whole number within bounds."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            whole_number(self.low, self.high), core_schema.int_schema(strict=True)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


def text_schema(title: str, **rest: object) -> WithJsonSchema:
    """The JSON Schema of a text; the reference shows `title` as its type."""
    return WithJsonSchema({"type": "string", "title": title, **rest})


ClusterName = Annotated[
    str, BeforeValidator(cluster_name), text_schema("name", pattern="^[a-z][a-z0-9-]*$", maxLength=24)
]
NodesetName = Annotated[
    str, BeforeValidator(nodeset_name), text_schema("name", pattern="^[a-z][a-z0-9-]*$", maxLength=32)
]
PartitionName = Annotated[
    str, BeforeValidator(partition_name), text_schema("name", pattern="^[a-z][a-z0-9_-]*$", maxLength=32)
]
FeatureName = Annotated[str, BeforeValidator(feature_name), text_schema("name", pattern="^[A-Za-z][A-Za-z0-9_.-]*$")]
SiteName = Annotated[str, BeforeValidator(site_name), text_schema("name", pattern="^[a-z][a-z0-9]*$", maxLength=8)]
SetName = Annotated[str, text_schema("name")]
HostNames = Annotated[str, BeforeValidator(host_names), text_schema("host name or hostlist")]
MemberName = Annotated[str, BeforeValidator(host_name), text_schema("host name")]
Address = Annotated[str, BeforeValidator(address), text_schema("IP address or DNS name")]
UserName = Annotated[str, BeforeValidator(user_name), text_schema("user name", pattern=f"^{USER_NAME.pattern}$")]
FilePath = Annotated[str, BeforeValidator(file_path), text_schema("path")]
Memory = Annotated[str, BeforeValidator(size("256M", "16T")), text_schema("size", pattern=f"^{SIZE.pattern}$")]
Disk = Annotated[str, BeforeValidator(size("256M", "64T")), text_schema("size", pattern=f"^{SIZE.pattern}$")]
SlurmTime = Annotated[
    str, BeforeValidator(slurm_time), WithJsonSchema({"type": ["string", "integer"], "title": "time"})
]
Duration = Annotated[str, BeforeValidator(duration), text_schema("10m, 2h", pattern=f"^{DURATION.pattern}$")]
Port = Annotated[int, Between(1, 65535)]
SecretReference = Annotated[
    str, BeforeValidator(secret_reference), text_schema("env:NAME or file:PATH", pattern="^(env|file):.+$")
]
