"""docs/training.md: the plain script, what is changed in it, and the commands that run it without a cluster."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.documents import ALONE, COMMANDS, TRAINING, blocks, changed_script, plain_script

from shoal.train.data import write_shards

DDP = "torchrun --nproc-per-node 2 train.py"


def losses(command: str, script: str, place: Path) -> list[float]:
    """What a script prints in each epoch, started by a command of the page."""
    place.mkdir()
    (place / "train.py").write_text(script)
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SHOAL_"))}
    mine |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], cwd=place, env=mine, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^epoch (\d+): loss (\d+\.\d+)$", done.stdout, re.MULTILINE)
    assert [int(epoch) for epoch, _ in found] == list(range(5)), done.stdout + done.stderr
    return [float(loss) for _, loss in found]


def in_order(script: str) -> str:
    """The script without shuffling."""
    script = script.replace("DistributedSampler(data)", "DistributedSampler(data, shuffle=False)")
    script = script.replace("global_batch=64)", "global_batch=64, shuffle=False)")
    assert "shuffle=False" in script
    return script


def test_documented_change_has_eight_new_lines() -> None:
    [diff] = blocks(TRAINING, "diff")
    new = [line for line in diff.splitlines() if line.startswith("+")]
    gone = [line for line in diff.splitlines() if re.match(r"-.", line)]
    assert (len(new), len(gone)) == (8, 11)
    assert "Eight new lines in place of eleven" in TRAINING.read_text()


def test_documented_data_code_reads_each_sample_once(tmp_path: Path) -> None:
    section = TRAINING.read_text().partition("## Data\n")[2].partition("\n## ")[0]
    lines = [line.removeprefix("    ") for line in section.splitlines() if not line or line.startswith("    ")]
    shards = write_shards(
        tmp_path,
        [{"__key__": f"{at:03}", "jpg": bytes([at, at]), "cls": at % 7} for at in range(200)],
        per_shard=2,
        prefix="train",
    )
    assert len(shards) == 100
    page: dict[str, Any] = {"torch": torch}
    smaller = {"/shared/images": str(tmp_path), "global_batch=512": "global_batch=64", "workers=4": "workers=0"}
    code = "\n".join(lines)
    for shown, ours in smaller.items():
        assert code.count(shown) == 1
        code = code.replace(shown, ours)
    exec(code, page)
    loader = page["loader"]
    seen = []
    for images, labels in loader:
        real = loader.mask
        assert [int(image[0]) % 7 for image in images] == labels.tolist()
        assert float(loader.weights.sum()) == pytest.approx(1.0) and len(labels) == 64
        seen += images[real][:, 0].tolist()
    loader.close()
    assert sorted(seen) == list(range(200)), "each once"


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of the changed script, without shuffling, by the command that started it."""
    lines = [line for line, how in COMMANDS.items() if how == ALONE]
    place = tmp_path_factory.mktemp("changed")
    return {line: losses(line, in_order(changed_script()), place / str(at)) for at, line in enumerate(lines)}


def test_changed_script_without_shuffle_has_the_losses_of_the_plain_script(
    changed: dict[str, list[float]], tmp_path: Path
) -> None:
    plain = losses(DDP, in_order(plain_script()), tmp_path / "plain")
    assert changed[DDP] == pytest.approx(plain, rel=1e-4)
    assert plain[-1] < plain[0] / 2


def test_every_local_command_runs_the_changed_script(changed: dict[str, list[float]]) -> None:
    assert len(changed) == 3
    for command, found in changed.items():
        assert found == pytest.approx(changed[DDP], rel=1e-3), f"{command}: one global batch, for any number of ranks"
