"""Whole-file goldens. After a change that is meant, write them anew: SHOAL_GOLDEN=write pytest tests/unit/slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from slurm_clusters import CLUSTERS, files

GOLDEN = Path(__file__).parents[2] / "golden" / "slurm"


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_file_of_a_cluster_is_rendered_byte_for_byte(name: str) -> None:
    texts = files(CLUSTERS[name])
    if os.environ.get("SHOAL_GOLDEN") == "write":
        (GOLDEN / name).mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (GOLDEN / name / file).write_text(text)
    assert texts == {path.name: path.read_text() for path in (GOLDEN / name).iterdir()}
