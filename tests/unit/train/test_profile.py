"""--profile torch, with the real torch.profiler: which files there are, and which steps are in them."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.train.procs import start_script

from shoal.train import profile
from shoal.train.profile import ACTIVE_STEPS, WAIT_STEPS, WARMUP_STEPS

TRAIN = """
import sys
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    {after}
print("done", __name__, sys.argv, sys.path[0])
"""
VARIABLES = {"SHOAL_PROFILE": "torch", "RANK": "3", "OMP_NUM_THREADS": "1"}
ENOUGH = str(1 + WAIT_STEPS + WARMUP_STEPS + ACTIVE_STEPS + 3)


def profiled(place: Path, script: str, *arguments: str, status: int = 0, **more: str) -> str:
    """Run a script under the recorder, in a process that has torch already; what it printed."""
    path = write_script(place, script)
    env, errors = {**VARIABLES, "SHOAL_JOB_DIR": str(place), **more}, place / "errors"
    recorder, output = start_script(Path(profile.__file__), str(path), *arguments, errors=errors, **env)
    with output:
        printed = output.read()
    recorder.join(120)
    assert recorder.exitcode == status, errors.read_text()
    return printed + errors.read_text()


def profiled_by_command(place: Path, script: str, *arguments: str, **more: str) -> str:
    """Run a script under the recorder as a job does; what it printed."""
    write_script(place, script)
    env = {**os.environ, **VARIABLES, "SHOAL_JOB_DIR": str(place), **more}
    line = [sys.executable, "-m", "shoal.train.profile", "sub/train.py", *arguments]
    done = subprocess.run(line, cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def write_script(place: Path, script: str) -> Path:
    (place / "sub").mkdir(exist_ok=True)
    (place / "sub" / "train.py").write_text(script)
    return place / "sub" / "train.py"


def traces(place: Path) -> dict[str, list[str]]:
    """The names of the events in each trace."""
    found = {}
    for path in sorted((place / "profile").glob("*")):
        with gzip.open(path) as file:
            found[path.name] = [event["name"] for event in json.load(file)["traceEvents"]]
    return found


def test_any_script_has_traces_of_its_start_and_a_few_steps(tmp_path: Path) -> None:
    printed = profiled_by_command(tmp_path, TRAIN.format(after=""), ENOUGH, SLURM_RESTART_COUNT="2")
    assert f"done __main__ ['sub/train.py', '{ENOUGH}'] {tmp_path}/sub" in printed, "it runs as python would run it"
    found = traces(tmp_path)
    assert list(found) == ["rank-3.2.start.json.gz", "rank-3.2.steps.json.gz"]
    assert found["rank-3.2.start.json.gz"].count("Optimizer.step#SGD.step") == 1
    steps = [name for name in found["rank-3.2.steps.json.gz"] if name.startswith("ProfilerStep#")]
    assert len(steps) == ACTIVE_STEPS, "the rest of a long run is not in it"


def test_library_steps_count_for_a_script_with_two_optimizer_steps(tmp_path: Path) -> None:
    script = "from shoal.train.progress import Progress\nprogress = Progress()\n" + TRAIN.format(
        after="optimizer.step(); progress.step(step)"
    )
    profiled(tmp_path, script, ENOUGH, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    steps = traces(tmp_path)["rank-0.0.steps.json.gz"]
    assert steps.count("Optimizer.step#SGD.step") == 2 * ACTIVE_STEPS


def test_script_without_steps_is_traced_as_a_whole(tmp_path: Path) -> None:
    profiled(tmp_path, "import torch\ntorch.ones(3).cumsum(0)\n")
    assert "aten::cumsum" in traces(tmp_path)["rank-3.0.start.json.gz"]


def test_failed_script_keeps_its_status_and_its_partial_trace(tmp_path: Path) -> None:
    printed = profiled(tmp_path, TRAIN.format(after="sys.exit(7) if step == 5 else None"), ENOUGH, status=7)
    assert "done" not in printed
    assert [name for name in traces(tmp_path)["rank-3.0.steps.json.gz"] if name.startswith("ProfilerStep#")]


def test_child_process_of_the_script_is_traced_from_its_first_step(tmp_path: Path) -> None:
    script = """
import os
from shoal.train.profile import step
import torch
for number in range({enough}):
    torch.ones(3).cumsum(0)
    step("run")
"""
    path = write_script(tmp_path, script.format(enough=ENOUGH))
    env = {**VARIABLES, "SHOAL_JOB_DIR": str(tmp_path), "RANK": "1"}
    child, output = start_script(path, errors=tmp_path / "errors", **env)
    output.close()
    child.join(120)
    assert child.exitcode == 0, (tmp_path / "errors").read_text()
    assert list(traces(tmp_path)) == ["rank-1.0.steps.json.gz"]


def test_script_runs_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')\n")
    printed = profiled_by_command(
        tmp_path, "print('done')", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    )
    assert printed == "done\nshoal: --profile torch: this Python has no torch; the script runs without it\n"


def test_unwritable_directory_does_not_stop_the_script(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file where the directory should be")
    printed = profiled(tmp_path, TRAIN.format(after=""), ENOUGH)
    assert "done __main__" in printed and "shoal: --profile torch: [Errno 17] File exists" in printed


def test_step_without_the_variable_does_nothing(tmp_path: Path) -> None:
    code = "import sys\nfrom shoal.train.profile import step\nstep('run')\nprint('torch' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name != "SHOAL_PROFILE"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.stdout, list(tmp_path.iterdir())) == ("False\n", [])
