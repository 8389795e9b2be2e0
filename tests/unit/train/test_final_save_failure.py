"""Training whose final state cannot be saved: code after the loop runs, and the job fails."""

import subprocess
import sys
from pathlib import Path

from tests.support.cases import cases

from shoal.contract import EXIT_UNSAVED

LIMIT = 600
PROGRAM = """
import atexit, logging, pathlib, sys, torch
from shoal.train import Run, TrainState
logging.basicConfig(format="%(message)s")
place, elsewhere, then = map(pathlib.Path, sys.argv[1:])
atexit.register(print, "a library's own end")
model = torch.nn.Linear(2, 1)
for step in Run(TrainState(model), place, save_every=2).steps(3):
    if step == 2:
        place.rename(elsewhere)
        place.write_text("a file where the directory was")
torch.save(model.state_dict(), elsewhere / "model.pt")
print("exported", end="")
exec(str(then))
"""


def train(tmp_path: Path, then: str) -> subprocess.CompletedProcess[str]:
    words = [str(tmp_path / "saved"), str(tmp_path / "elsewhere"), then]
    return subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=LIMIT)


def test_script_continues_and_exits_with_the_unsaved_status(tmp_path: Path) -> None:
    done = train(tmp_path, "pass")
    assert done.returncode == EXIT_UNSAVED
    assert (tmp_path / "elsewhere/model.pt").exists(), "the state could be saved by other means"
    assert done.stdout == "exporteda library's own end\n", "nothing that others do at the end is left out"
    failed, message = done.stderr.splitlines()
    assert failed.startswith("the checkpoint of step 3 (end) FAILED: ")
    assert message == (
        "training is complete, but its final state could not be saved (the newest checkpoint is step 2): fix the "
        f"cause and run it again with {tmp_path}/saved, or save the state after the loop by other means. The script "
        f"continues, and exits with status {EXIT_UNSAVED}"
    )


@cases("then, status", ("raise ValueError('later')", 1), ("sys.exit(3)", EXIT_UNSAVED))
def test_script_that_fails_later_keeps_its_own_status(tmp_path: Path, then: str, status: int) -> None:
    done = train(tmp_path, then)
    assert done.returncode == status and ("ValueError: later" in done.stderr) is (status == 1)
