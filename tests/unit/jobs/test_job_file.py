"""`job.yaml` and the options: valid values, and every finding about invalid ones."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.unit.jobs.job_clusters import job

from shoal.errors import SpecError
from shoal.jobs.model import job_from_options, load_job, load_job_text

FILE = """\
script: train.py
args: ["--lr", "0.1"]
launcher: torchrun
nodes: 2
time: 01:30:00
export: {OMP_NUM_THREADS: 4}
"""


def test_file_has_the_same_fields_as_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(FILE)
    assert load_job(path) == job(
        args=("--lr", "0.1"), launcher="torchrun", nodes=2, time="01:30:00", export={"OMP_NUM_THREADS": "4"}
    )


def test_options_override_the_file() -> None:
    found = load_job_text(FILE, "job.yaml", {"nodes": 4, "script": "other.py"})
    assert (found.nodes, found.script, found.launcher) == (4, "other.py", "torchrun")


def test_all_findings_have_their_place_and_the_nearest_name() -> None:
    with pytest.raises(SpecError) as caught:
        load_job_text("script: a.py\ngpu_per_node: 2\nnodes: 0\nsignal: B:USR1@60\n", "job.yaml")
    assert str(caught.value).splitlines() == [
        'job.yaml:2:1: unknown key, found "gpu_per_node", did you mean `gpus_per_node`?',
        "job.yaml:3:8 nodes: out of range, found 0, give one from 1 to 65533",
        'job.yaml:4:9 signal: `B:` sends the signal to the batch shell alone, found "B:USR1@60", leave it out: USR1@60',
    ]


def test_findings_of_file_and_options_are_reported_together() -> None:
    with pytest.raises(SpecError) as caught:
        load_job_text("nodes: 0\nmem: 3X\n", "job.yaml", {"script": "a.py", "mem": "4X"})
    assert [str(finding).partition(",")[0] for finding in caught.value.findings] == [
        "--mem: not a size",
        "job.yaml:1:8 nodes: out of range",
    ]


def test_job_without_a_script_is_rejected() -> None:
    with pytest.raises(SpecError, match="no script is named"):
        job_from_options({"nodes": 2})


def test_unknown_field_from_python_is_rejected() -> None:
    with pytest.raises(SpecError) as caught:
        job(gpus=2)
    assert 'unknown field, found "gpus"' in str(caught.value)


@cases("time", "90", "1:30", "0:01", "01:30:00", "1-12:00:00")
def test_time_limit_means_what_it_means_to_sbatch(time: str) -> None:
    assert job(time=time).time == time


UNCAUGHT = "a process cannot catch this signal, so it cannot save its work"
WRONG: dict[str, Any] = {
    "launcher": (
        "ssh",
        '--launcher: unknown launcher, found "ssh", choose one of srun, torchrun, spawn, pmix, mpirun, python',
    ),
    "mem": ("3X", '--mem: not a size, found "3X", write a number and K, M, G or T: 512M, 16G; 0 is the whole node'),
    "array": ("1..3", '--array: not a range of an array, found "1..3", as 0-9%2'),
    "dependency": (
        "afterok:x",
        '--dependency: not a dependency, found "afterok:x", write it like afterok:17, afterany:17:18 or singleton',
    ),
    "nodelist": ("gpu[1", "--nodelist: not a hostlist"),
    "time": ("1:75", '--time: not a time, found "1:75"'),
    "signal": (
        "USR1",
        '--signal: not a signal, found "USR1", write it like USR1@120: the signal, and how many seconds before the end',
    ),
    "job_name": ("a b", '--job-name: not a name, found "a b", use letters, digits, `-`, `_`, `.` and `+`'),
    "constraint": ("a b", "--constraint: not a constraint"),
    "output": ("/tmp/x\n#SBATCH --uid=0", "--output: not a path"),
    "partition": ("main --uid=0", "--partition: not a name"),
    "directory": ("relative/path", "--directory: not a directory"),
    "python": ("-c", "--python: not a Python"),
    "export": ({"SLURM_X": "1"}, "Slurm and Shoal set this variable themselves"),
    "profile": ("perf", '--profile: unknown profiler, found "perf", choose one of torch, nsys, line'),
    "tracking_uri": (
        "ftp://x",
        '--tracking-uri: not the address of a tracking server, found "ftp://x", write it like'
        " http://tracking.example:5000",
    ),
    "experiment": ("a\nb", "--experiment: not the name of an experiment"),
}
SIGNALS = {
    "R:USR1@60": ("`R:` is about a reservation, and `shoal run` asks for none", "leave it out: USR1@60"),
    "B:USR1@60": ("`B:` sends the signal to the batch shell alone", "leave it out: USR1@60"),
    "RB:USR1@60": ("`B:` sends the signal to the batch shell alone", "leave it out: USR1@60"),
    **{signal: (UNCAUGHT, "use USR1@60") for signal in ("SIGKILL@60", "9@60", "stop@60")},
}


@cases("name", *WRONG)
def test_invalid_value_is_rejected_in_plain_words(name: str) -> None:
    value, text = WRONG[name]
    with pytest.raises(SpecError) as caught:
        job(**{name: value})
    assert text in str(caught.value)


@cases("signal", *SIGNALS)
def test_signal_that_does_not_reach_the_ranks_is_rejected_with_the_fix(signal: str) -> None:
    said, fix = SIGNALS[signal]
    with pytest.raises(SpecError) as caught:
        job(signal=signal)
    assert str(caught.value) == f'--signal: {said}, found "{signal}", {fix}'


@cases("name", "job_name", "partition", "constraint", "account", "qos", "output", "nodelist", "array")
@cases("text", "a b", "a\nb", "a#b", 'a"b', "a'b", "a\\b", "$(id)", "`id`", "")
def test_text_that_ends_a_line_or_word_is_rejected_in_sbatch_options(name: str, text: str) -> None:
    with pytest.raises(SpecError):
        job(**{name: text})


@cases("uri", "http://ann:hunter2@mlflow:5000", "ann:hunter2@mlflow", "http://hunter2@mlflow/x")
def test_password_in_the_tracking_uri_is_rejected_and_not_shown(uri: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(tracking_uri=uri)
    assert "the address has a password in it" in str(caught.value) and "hunter2" not in str(caught.value)
    with pytest.raises(SpecError) as caught:
        load_job_text(f"script: a.py\ntracking_uri: {uri}\n", "job.yaml")
    assert "the address has a password in it" in str(caught.value) and "hunter2" not in str(caught.value)


@cases("name", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME")
def test_secret_in_export_is_rejected_and_not_shown(name: str) -> None:
    for refused in (
        lambda: job(export={name: "hunter2"}),
        lambda: load_job_text(f"script: a\nexport: {{{name}: hunter2}}", "f"),
    ):
        with pytest.raises(SpecError) as caught:
            refused()
        assert "this variable is a secret, and every user can read a batch script" in str(caught.value)
        assert "hunter2" not in str(caught.value)


def test_job_name_defaults_to_the_script_name() -> None:
    assert job("src/my train.py").name == "my_train" and job("run.sh", job_name="x").name == "x"
    assert job("...py").name == "job"


def test_missing_job_file_is_reported_without_a_hint_to_init(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_job(tmp_path / "job.yaml")
    assert str(caught.value) == f"{tmp_path}/job.yaml: no such file, name one that describes a job"
