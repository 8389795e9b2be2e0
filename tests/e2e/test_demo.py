"""Run scripts/demo: daily on a standing cluster, and by hand (-m matrix) with the cluster that it builds."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documents import COMMANDS, DEMO, ROOT, TOY_README, commands
from tests.e2e.leftovers import TAG, noted
from tests.e2e.standing import Standing
from tests.e2e.test_documented_commands import run

COVERS = "scripts/demo examples/toy jobs verbs/run verbs/status"
GROUP = "reef"
pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module", params=["standing", pytest.param("own", marks=pytest.mark.matrix)])
def demo(
    request: pytest.FixtureRequest, standing: Standing, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, str]]]:
    """What the demo said, and the environment of a person who uses its cluster."""
    [line] = [line for line, how in COMMANDS.items() if how == DEMO]
    place = tmp_path_factory.mktemp("demo")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if request.param == "standing":
        environment = {**standing.cluster.env, "SHOAL_FILE": str(standing.cluster.file), "PATH": path}
        yield run(f"{ROOT}/{line}", place, environment), environment
        return
    environment = {**os.environ, "SHOAL_CLUSTER": "t-demo", TAG: "t-demo", "PATH": path}
    with noted("t-demo"):
        try:
            yield run(f"{ROOT}/{line}", place, environment), environment
        finally:
            run(f"{sys.executable} -m shoal down --force", place, environment)


def test_demo_shows_a_training_and_a_status(demo: tuple[str, dict[str, str]]) -> None:
    output, _ = demo
    for name in ("fish1", "fish2"):
        assert re.search(rf"^{name} has GPUs 0,1$", output, re.MULTILINE), output
    assert accuracy(output) > 97
    assert re.search(r"^ {10}loss\n +\d\S* ┤.*\n(?: +┤.*\n)+ +\S+ ┤.*\n +└─+\n +1 +step 120$", output, re.MULTILINE), (
        output
    )
    assert "nodes: 2 idle" in output
    assert "down" in output.splitlines()[-1]


@pytest.mark.matrix
def test_toy_readme_commands_train_on_the_demo_cluster(demo: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """The same trainings as in test_toy.py, by the words of the page."""
    _, environment = demo
    block, _ = commands(TOY_README)
    # Only the path from there to the scripts counts, not where the toy is.
    place = shutil.copytree(TOY_README.parent, tmp_path / "examples/toy")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    output = {line: run(line, place, environment) for line in block}
    assert "no changes" in output["shoal up"]
    trained = [accuracy(text) for line, text in output.items() if line.startswith("shoal run")]
    assert len(trained) == 3 and min(trained) > 97
    assert output["shoal jobs"].count("completed") >= 3


def accuracy(said: str) -> float:
    """In percent, as the toy tells it."""
    match = re.search(r"accuracy on 360 held-out images: (\S+)%", said)
    assert match, said
    return float(match[1])
