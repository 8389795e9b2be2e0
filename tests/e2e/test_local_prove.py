"""`shoal prove` on this machine."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.documents import ROOT
from tests.e2e.shoal_server import ROOTS_PROGRAM

COVERS = "proof verbs/prove train/proof_record.py train/proof_watch.py"

SCRIPT = ROOT / "tests/unit/proof/train.py"
WAYS = [("torchrun", "ddp"), ("torchrun", "fsdp"), ("spawn", "ddp"), ("spawn", "fsdp")]


def prove(directory: Path, *arguments: str, status: int = 0, path: str = "") -> subprocess.CompletedProcess[str]:
    """`path` is where the script finds packages that this Python has not."""
    env = {**os.environ, "PYTHONPATH": path} if path else None
    done = ROOTS_PROGRAM.run("prove", *arguments, cwd=directory, env=env, timeout=900)
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copy(SCRIPT, tmp_path / "train.py")
    return tmp_path


@pytest.mark.parametrize("ranks", ["2", pytest.param("4", marks=pytest.mark.matrix)])
def test_correct_script_passes_with_the_documented_output(tree: Path, ranks: str) -> None:
    done = prove(tree, "train.py", "-n", ranks)
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("✓ same")]
    assert [(row[0], row[1]) for row in rows] == WAYS
    last = f"✓ train.py trains the same with {ranks} processes as with one: nothing differs by more than 1e-12"
    assert done.stdout.splitlines()[-1] == last
    assert "one process" in done.stderr and "spawn fsdp" in done.stderr, "progress while it works"
    assert sorted(path.name for path in tree.iterdir()) == ["train.py"], "nothing is left behind"


@pytest.mark.matrix  # tests/unit/train/test_proving.py trains in single precision every day
def test_single_precision_is_compared_with_its_own_tolerance(tree: Path) -> None:
    arguments = ("--dtype", "float32", "--launcher", "torchrun", "--parallel", "fsdp", "--json")
    report = json.loads(prove(tree, "train.py", "-n", "2", *arguments).stdout)
    [row] = report["rows"]
    assert report["passed"] and report["tolerance"] == 1e-6 and report["steps"] == len(report["losses"]) == 8
    assert 0 < row["found"]["parameters"]["relative"] <= 1e-6, "single precision: it does not agree to the last bit"


# tests/unit/train/test_proving.py trains with each of these faults every day, and finds the same causes.
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(
            "same samples",
            "step 1: every rank reads the same 8 samples, numbers 1-8 of the 16 that one process reads",
            marks=pytest.mark.matrix,
        ),
        ("sums", "gradients are summed over the 2 ranks instead of averaged"),
        pytest.param(
            "sampler without epochs", "the DistributedSampler shuffles every epoch alike", marks=pytest.mark.matrix
        ),
    ],
)
def test_wrong_script_fails_with_the_cause(tree: Path, fault: str, said: str) -> None:
    done = prove(tree, "train.py", "--launcher", "torchrun", "--parallel", "ddp", "--", fault, status=1)
    [cause] = [line for line in done.stdout.splitlines() if line.startswith("✗ torchrun ddp: ")]
    assert "✗ differs" in done.stdout and said in cause


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(  # tests/unit/proof/test_local_runner.py has it every day
            "no init", "the script recorded nothing: it never called shoal.train.init()", marks=pytest.mark.matrix
        ),
        ("no loss", "the script reported no loss"),
    ],
)
def test_script_without_the_training_calls_fails_with_the_missing_call(tree: Path, fault: str, said: str) -> None:
    assert f"error: {said}" in prove(tree, "train.py", "--", fault, status=1).stderr
