"""How a proof is shown, and which options the command rejects."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.cases import cases
from typer.testing import CliRunner

from shoal.cli.app import make_app
from shoal.cli.progress import TerminalProgress
from shoal.cli.prove_commands import finish, progress_of, show_proof
from shoal.cli.session import Session
from shoal.proof.compare import Comparison, Difference
from shoal.proof.types import ProofResult, ProofRow

SAME = Comparison(
    Difference(1.7e-16, "step 4"), Difference(0.0), Difference(4e-16, "[w]"), Difference(0.0), (5, 5), True, False, True
)
OTHER = replace(
    SAME, losses=Difference(0.5, "step 1"), gradient=Difference(3.0, "step 1"), parameters=Difference(0.25, "w")
)


@cases("json, terminal, seen", (0, 0, 1), (0, 1, 1), (1, 1, 1), (1, 0, 0))
def test_progress_is_shown_on_a_terminal_with_json_too(json: int, terminal: int, seen: int) -> None:
    session = Session(bool(json))
    session.errors = Console(file=io.StringIO(), force_terminal=bool(terminal))
    assert isinstance(progress_of(session), TerminalProgress) == bool(seen)


def shown(*rows: ProofRow) -> list[str]:
    out = io.StringIO()
    show_proof(Console(file=out, width=200), ProofResult("train.py", 4, "float64", 1e-12, 5, (1.0,), rows))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_passed_proof_shows_its_largest_differences() -> None:
    assert shown(ProofRow("srun", "ddp", True, SAME), ProofRow("torchrun", "fsdp", True, SAME)) == [
        "largest relative differences between 4 processes and one, over 5 steps in float64:",
        "launcher  parallel  losses            first gradient  parameters",
        "srun      ddp       1.7e-16 (step 4)  none            4.0e-16 ([w])  ✓ same",
        "torchrun  fsdp      1.7e-16 (step 4)  none            4.0e-16 ([w])  ✓ same",
        "✓ train.py trains the same with 4 processes as with one: nothing differs by more than 1e-12",
    ]


def test_failed_proof_shows_each_cause_once_with_its_runs() -> None:
    cause = "the [first] gradient is 4 times"
    rows = [ProofRow("spawn", parallel, False, OTHER, cause) for parallel in ("ddp", "fsdp")]
    lines = shown(
        *rows, ProofRow("srun", "ddp", False, cause="it ended with status 1:\n  ValueError: \x1b[2J\n  fix: look")
    )
    assert lines[2:] == [
        "spawn     ddp       5.0e-01 (step 1)  3.0e+00         2.5e-01 (w)  ✗ differs",
        "spawn     fsdp      5.0e-01 (step 1)  3.0e+00         2.5e-01 (w)  ✗ differs",
        "srun      ddp       -                 -               -            ✗ failed",
        "✗ spawn ddp, spawn fsdp: the [first] gradient is 4 times",
        "✗ srun ddp: it ended with status 1:",
        "    ValueError: \\x1b[2J",
        "    fix: look",
    ]


@cases(
    "words, said, fix",
    (["--launcher", "zun,srun"], "--launcher names zun", "use srun, torchrun, spawn, pmix, mpirun, comma-separated"),
    (["--launcher", "srun"], "srun needs a cluster; on this machine", "name the cluster with --file or --cluster"),
    (["--parallel", ","], "--parallel names nothing", "use ddp, fsdp, comma-separated"),
    (["--dtype", "bf16"], "--dtype is 'bf16'", "use float64 or float32"),
    (["--keep", "."], "--keep . is not empty", "name a new directory"),
    (["--keep", "train.py"], "cannot use --keep train.py: Not a directory", "name a new directory"),
    (["-N", "2"], "--nodes is for jobs on a cluster", "name the cluster with --file or --cluster"),
    (["--cluster", "reef", "-N", "3"], "cannot divide 4 processes equally among 3 nodes", "use -n 6"),
)
def test_impossible_request_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    done = CliRunner().invoke(make_app("prove"), ["prove", "train.py", "-n", "4", "--json", *words])
    told = json.loads(done.stdout)
    assert done.exit_code == 2 and told["message"].startswith(said) and told["fix"] == fix


def test_infinite_difference_is_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    boundless = Comparison(Difference(math.inf), *(Difference(0.0),) * 3, (5, 5), True, False, True)
    session = Session(True)
    finish(
        session,
        ProofResult("t.py", 2, "float64", 1e-12, 5, (math.nan, 1.0), (ProofRow("spawn", "ddp", False, boundless),)),
    )
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["losses"] == [None, 1.0] and told["rows"][0]["found"]["losses"]["relative"] is None
    assert session.status == 1
