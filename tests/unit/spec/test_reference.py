"""The reference page and the schema agree with the models."""

import json
import re
from pathlib import Path
from typing import Any

from tests.support.cases import cases

from shoal.spec.docs import EXAMPLE, schema, spec_markdown
from shoal.spec.hosts import Controller, HostEntry, Login, NodeSet
from shoal.spec.loader import load_text_all
from shoal.spec.model import Spec
from shoal.spec.partitions import Partition
from shoal.spec.slurm_options import SlurmOptions
from shoal.spec.values import SpecModel
from shoal.verbs.init import schema_text

PAGE = Path(__file__).parents[3] / "docs" / "spec.md"
MODELS: list[type[SpecModel]] = [Spec, Controller, HostEntry, Login, NodeSet, Partition, SlurmOptions]


def test_page_is_generated_from_the_models() -> None:
    assert PAGE.read_text() == spec_markdown(), "run: python -m shoal.spec.docs > docs/spec.md"


def test_example_on_the_page_loads_without_findings() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block == EXAMPLE
    assert load_text_all(block, "example")[1] == []


@cases("model", *MODELS)
def test_every_field_is_documented_on_the_page_and_in_the_schema(model: type[SpecModel]) -> None:
    entry: dict[str, Any] = schema() if model is Spec else schema()["$defs"][model.__name__]
    entry = entry["anyOf"][1] if "anyOf" in entry else entry
    keys = {field.alias or name for name, field in model.model_fields.items()}
    assert set(entry["properties"]) == keys
    assert entry["additionalProperties"] is False
    page = spec_markdown()
    for name in keys:
        assert f"| `{name}` |" in page
        assert entry["properties"][name]["description"]


def test_schema_accepts_a_host_as_text_or_mapping() -> None:
    found = schema()
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert found["required"] == ["cluster", "controller"]
    assert [option["type"] for option in found["$defs"]["HostEntry"]["anyOf"]] == ["string", "object"]
    assert found["$defs"]["NodeSet"]["properties"]["hosts"]["items"] == {"$ref": "#/$defs/HostEntry"}
    assert "null" not in json.dumps(found)
    assert json.loads(schema_text()) == found
