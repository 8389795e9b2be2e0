"""The batch script: whole texts, and no value of the user is ever run as code."""

import shlex
import subprocess
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.goldens import assert_golden
from tests.support.cases import cases
from tests.unit.jobs.job_clusters import SHIPPED, resolved

from shoal.jobs.launchers import LAUNCHERS
from shoal.jobs.model import LAUNCHER_NAMES
from shoal.jobs.script import sbatch_script

CASES: dict[str, dict[str, Any]] = {
    "srun": {"nodes": 2},
    "torchrun": {"nodes": 2, "launcher": "torchrun", "python": "/opt/env/bin/python"},
    "spawn": {"nodes": 2, "launcher": "spawn"},
    "pmix": {"nodes": 2, "launcher": "pmix"},
    "mpirun": {"nodes": 2, "launcher": "mpirun"},
    "python": {"launcher": "python", "gpus_per_node": 1},
    "every-option": {
        "args": ("--lr", "0.1", "two words", "$HOME `id` 'x' \"y\""),
        "export": {"DATA": "/data/$USER's", "LEVEL": "2"},
        **{"nodes": 2, "gpus_per_node": 2, "ntasks_per_node": 1, "cpus_per_task": 3, "mem": "16G"},
        "time": "1-00:00:00",
        **{"partition": "main", "constraint": "a&fast|[b*2]", "account": "lab", "qos": "high", "nodelist": "gpu[1,2]"},
        **{"switches": 2},
        **{"array": "0-9%2", "dependency": "afterok:17:18,singleton", "exclusive": True, "requeue": False},
        **{"signal": "sigusr2@300", "output": "/scratch/%A-%a.log", "error": "/scratch/%A-%a.err", "job_name": "big"},
    },
    "profiled-and-tracked": {
        **{"profile": "torch", "tracking_uri": "http://mlflow:5000", "experiment": "it's $5", "gpus_per_node": 1}
    },
    "program": {"script": "bin/go", "partition": "cpu", "directory": "/shared/jobs"},
}


@cases("case", *CASES)
def test_script_matches_its_golden(case: str) -> None:
    options = dict(CASES[case])
    text = sbatch_script(resolved(options.pop("script", "train.py"), **options), SHIPPED)
    assert_golden(f"jobs/{case}.sbatch", text)
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_job_without_gpus_hides_all_gpus() -> None:
    hidden = "\nexport CUDA_VISIBLE_DEVICES=  #"
    assert hidden in sbatch_script(resolved("train.py", gpus_per_node=0), SHIPPED)
    assert hidden not in sbatch_script(resolved("train.py"), SHIPPED)


def test_every_launcher_name_has_a_launcher() -> None:
    assert tuple(LAUNCHERS) == LAUNCHER_NAMES


@given(
    args=st.lists(
        st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=20), max_size=3
    )
)
def test_arguments_reach_the_script_unchanged(args: list[str]) -> None:
    text = sbatch_script(resolved(args=tuple(args)), SHIPPED)
    command = text[text.index("srun --kill-on-bad-exit=1") : text.rindex(' <&"$SHOAL_WARNINGS" &\nranks=')]
    assert shlex.split(command)[-1 - len(args) :] == ["train.py", *args]
