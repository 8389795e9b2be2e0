"""No input raises anything but Shoal's errors, and no finding contains text of pydantic."""

import io
import re
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from shoal.errors import SpecError
from shoal.spec.docs import EXAMPLE
from shoal.spec.finding import Finding
from shoal.spec.hosts import Controller, HostEntry, NodeSet
from shoal.spec.loader import load_all, load_text
from shoal.spec.members import members, partitions
from shoal.spec.model import Spec
from shoal.spec.partitions import Partition
from shoal.spec.slurm_options import SlurmOptions

EDITS = [
    *("", " ", "\n", "  ", "\t", ":", ": ", "-", "- ", "[", "]", "{", "}", ",", "&a ", "*a", "!!str ", "!x "),
    *("|\n", ">"),
]
EDITS += [
    *("'", '"', "#", "?", "? ", "%", "@", "`", "~", "null", "true", "0", "-1", "1e400", ".nan", "---\n"),
    *("...\n", "<<: "),
]
WORDS = sorted(
    {field for m in (Spec, Controller, HostEntry, NodeSet, Partition, SlurmOptions) for field in m.model_fields}
)
KEYS = st.sampled_from([*WORDS, "lab", "main", "fish"]) | st.text(max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.dates()
    | st.binary(max_size=8)
    | st.sampled_from(["sandbox", "lan", "gpu[01-16]", "u@h:22", "2G", "1-00:00:00", "lab", "controller", "debian12"])
    | st.text(max_size=20)
)
DATA = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6), max_leaves=25
)


def check(text: str) -> None:
    try:
        spec = load_text(text, "s.yaml")
    except SpecError as error:
        check_findings(error)
        return
    assert len({member.name.lower() for member in members(spec)}) == len(members(spec))
    assert sum(partition.default for partition in partitions(spec).values()) == 1


def check_findings(error: SpecError) -> None:
    assert error.findings
    for finding in error.findings:
        assert isinstance(finding, Finding)
        text = str(finding)
        assert text.isprintable(), text
        assert finding.line >= 1 and finding.col >= 1
        assert not re.search(r"Input should|pydantic|errors\.|validat|_type\b", text.replace(finding.found, "")), text


@given(st.text(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_text_loads_or_has_findings(text: str) -> None:
    check(text)


@given(st.lists(st.sampled_from([*EDITS, *WORDS, "a", "lab"]), max_size=40).map("".join))
@settings(max_examples=400, deadline=None)
def test_yaml_like_text_loads_or_has_findings(text: str) -> None:
    check(text)


@given(st.binary(max_size=200))
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_bytes_load_or_have_findings(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(data)
    try:
        load_all(path)[0]
    except SpecError as error:
        assert error.findings


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = EXAMPLE
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        text = text[:start] + draw(st.sampled_from(EDITS) | st.text(max_size=5)) + text[end:]
    return text


@given(mutated())
@settings(max_examples=400, deadline=None)
def test_small_change_to_a_valid_spec_loads_or_has_findings(text: str) -> None:
    check(text)


@given(DATA)
@settings(max_examples=300, deadline=None)
def test_any_data_as_yaml_loads_or_has_findings(data: Any) -> None:
    check(dump(data))


@given(
    st.dictionaries(st.sampled_from(WORDS), DATA, max_size=8), st.sampled_from(["controller", "nodesets", "partitions"])
)
@settings(max_examples=300, deadline=None)
def test_any_data_inside_a_spec_loads_or_has_findings(data: dict[str, Any], place: str) -> None:
    spec: dict[str, Any] = {"cluster": "reef", "controller": {"host": "ctl"}, "nodesets": {"lab": {"hosts": ["a"]}}}
    spec[place] = {"lab": data} if place != "controller" else data
    check(dump(spec))


def test_null_in_place_of_a_list_has_a_single_finding() -> None:
    check("cluster: reef\ncontroller: {host: ctl}\nnodesets: {lab: {hosts: [a]}}\npartitions: {lab: {nodesets: }}\n")


def dump(data: Any) -> str:
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.dump(data, stream)
    return stream.getvalue()
