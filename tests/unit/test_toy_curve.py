"""examples/toy/curve.py draws what the tracker recorded."""

import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from types import ModuleType

import pytest
from tests.documents import ROOT
from tests.support.cases import cases

FILE = ROOT / "examples/toy/curve.py"


@pytest.fixture(scope="module")
def curve() -> ModuleType:
    spec = importlib.util.spec_from_file_location("curve", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(step: int, **metrics: float | str) -> str:
    return json.dumps({"t": 1, "step": step, "metrics": metrics}) + "\n"


def test_later_value_of_a_repeated_step_counts_and_text_is_ignored(curve: ModuleType) -> None:
    lines = [record(2, loss=0.5), record(1, loss=1.0), '{"t": 1, "tags": {"a": "b"}}\n', record(2, loss=0.4)]
    assert curve.points([*lines, record(3, loss="NaN"), record(3, accuracy=1.0)], "loss") == [(1, 1.0), (2, 0.4)]


def test_line_falls_from_the_first_value_to_the_last(curve: ModuleType) -> None:
    title, first, *rest = curve.text([(1, 2.0), (2, 1.0), (3, 0.0)], "loss", width=6, height=3).splitlines()
    assert title.strip() == "loss"
    assert first == "       2 ┤⠑⢄⠀⠀⠀⠀"
    assert rest[1:] == ["       0 ┤⠀⠀⠀⠀⠑⢄", "         └──────", "          1step 3"]


def test_steep_line_has_no_gaps(curve: ModuleType) -> None:
    _, *rows, _, _ = curve.text([(1, 9.0), (2, 0.0), (3, 9.0)], "loss", width=2, height=4).splitlines()
    assert [row[10:] for row in rows] == ["⢱⢸", "⢸⢸", "⠈⣾", "⠀⡿"]


@cases("points", [], [(1, 2.0)], [(1, 2.0), (5, 2.0)])
def test_few_and_equal_points_are_drawn(curve: ModuleType, points: list[tuple[int, float]]) -> None:
    assert len(curve.text(points, "loss").splitlines()) == 15
    drawn = xml.fromstring(curve.svg(points, "loss")).find("{http://www.w3.org/2000/svg}polyline")
    assert drawn is not None and len(drawn.attrib["points"].split()) == len(points)


def test_missing_metric_is_reported(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(record(1, loss=1.0))
    command = [sys.executable, FILE, "metrics.jsonl"]
    assert "loss" in subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    failed = subprocess.run([*command, "acuracy"], cwd=tmp_path, capture_output=True, text=True)
    assert (failed.returncode, failed.stderr) == (1, "there is no metric acuracy in metrics.jsonl\n")
