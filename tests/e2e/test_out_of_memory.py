"""A job that uses up its memory, where the kernel holds it to what it asked for: who was killed is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster, running

pytestmark = pytest.mark.sandbox

SPEC = """\
cluster: launch-memory
controller: {provider: sandbox, memory: 512M}
nodesets:
  fish: {provider: sandbox, count: 2, memory: 512M, cgroups: true}
"""
EATS = """\
import os, time
if os.environ["RANK"] == "1":
    eaten = []
    while True:
        eaten.append(bytearray(1 << 20))
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("memory"), SPEC) as made:
        yield made


def test_the_rank_that_was_killed_for_its_memory_is_named(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "eats.py").write_text(EATS)
    monkeypatch.chdir(tmp_path)
    result = cluster.json("run", "--wait", "-N2", "--mem", "100M", "eats.py", status=1)
    reason = result["reason"]
    assert (reason["kind"], reason["rank"], reason["node"]) == ("out of memory", 1, "fish2"), result
    assert reason["text"] == "rank 1 on fish2 was killed: the memory was used up"
    assert reason["fix"].startswith("give it more with --mem")
