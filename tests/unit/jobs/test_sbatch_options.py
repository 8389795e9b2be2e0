"""Options of sbatch in a job: what is passed on, what becomes a number of the job, and what is rejected."""

from typing import Any

import pytest
from tests.support.cases import cases
from tests.unit.jobs.job_clusters import SHIPPED, job, resolved

from shoal.errors import SpecError, UsageError
from shoal.jobs.model import load_job_text
from shoal.jobs.sbatch_options import FLAGS, OWN_OPTIONS, REJECTED, SHORT_OPTIONS, parse_options
from shoal.jobs.script import sbatch_script


def script_options(**options: Any) -> list[str]:
    text = sbatch_script(resolved(**options), SHIPPED)
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


@cases(
    "texts, lines",
    (["--mem-per-cpu=3200"], ["--mem-per-cpu=3200"]),
    (["--mem-per-cpu 3200", "--hold"], ["--mem-per-cpu=3200", "--hold"]),
    (["--cores-per-socket=5 --sockets-per-node 1"], ["--cores-per-socket=5", "--sockets-per-node=1"]),
    (["-b now+1hour", "-H"], ["--begin=now+1hour", "--hold"]),
    (["-bnow+1hour", "-L matlab:2"], ["--begin=now+1hour", "--licenses=matlab:2"]),
    (["--exclusive=user"], ["--exclusive=user"]),
    (["--wckey='two \"words\" # \\x'"], ['--wckey="two \\"words\\" # \\\\x"']),
    (["--gres=tmpdisk:5,license:1"], ["--gres=tmpdisk:5,license:1"]),
    (["--unheard-of=1"], ["--unheard-of=1"]),
)
def test_option_is_passed_on(texts: list[str], lines: list[str]) -> None:
    assert script_options(sbatch=texts)[-len(lines) :] == lines


def test_job_file_takes_a_list_or_a_mapping() -> None:
    listed = load_job_text("script: a.py\nsbatch: [--hold, --mem-per-cpu=2G]\n", "job.yaml")
    mapped = load_job_text("script: a.py\nsbatch: {hold: true, mem_per_cpu: 2G}\n", "job.yaml")
    assert listed.sbatch == mapped.sbatch == ("--hold", "--mem-per-cpu=2G")
    assert load_job_text("script: a.py\nsbatch: {nice: 5}\n", "job.yaml", {"sbatch": ["--hold"]}).sbatch == ("--hold",)


@cases("name", *OWN_OPTIONS)
def test_option_of_shoal_itself_is_named(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(sbatch=[f"--{name}=7"])
    text = str(caught.value)
    assert f"--{name}: `shoal run` has this option itself" in text and f"leave out --sbatch: --{name}=7" in text


@cases(
    "text, words",
    ("-N2", "leave out --sbatch: --nodes=2"),
    ("-t 10", "leave out --sbatch: --time=10"),
    ("--exclusive", "leave out --sbatch: --exclusive"),
    ("--ntasks-per-n=2", "--ntasks-per-n is not the whole name of an option, "),
    ("--part=main", "write --partition"),
    ("--comment=x", "Shoal keeps a note"),
    ("--wait", "leave out --sbatch: --wait"),
    ("--gpu-bind=closest", "takes that of its local rank"),
    ("--distribution=arbitrary", "unequal numbers of processes"),
    ("--ntasks=many", "not a number of processes"),
    ("--gpus=0", "not a number of GPUs"),
    ("--gres=gpu:h100:x", "not a number of GPUs"),
    ("--exclude=gpu[1", "not a hostlist"),
    ("--hold yes", "--hold has no value"),
    ("hold", "write it as sbatch has it"),
    ("", "write it as sbatch has it"),
    ("--begin='now", "close the quotes"),
    ("--begin='a\nb'", "not one line of text"),
)
def test_wrong_option_is_rejected_with_a_fix(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(sbatch=[text])
    assert words in str(caught.value)


def test_option_that_is_there_twice_is_rejected() -> None:
    with pytest.raises(SpecError, match="--nice is there twice"):
        job(sbatch=["--nice=1", "--nice=2"])


def test_nothing_but_options_is_taken() -> None:
    for value in (7, None, [7], {7: "x"}, {"hold": False}, {"nice": [1]}):
        with pytest.raises(SpecError):
            job(sbatch=value)
    assert parse_options([]) == ()


@cases(
    "options, numbers, lines",
    ({"sbatch": ["--ntasks=4"], "nodes": 2}, (2, 4, 2), ["--ntasks-per-node=2", "--gpus-per-node=4"]),
    ({"sbatch": ["-n 4"], "nodes": 2, "launcher": "torchrun"}, (2, 4, 2), ["--ntasks-per-node=1"]),
    ({"sbatch": ["--gpus=4"], "nodes": 2}, (2, 2, 2), ["--gpus-per-node=2"]),
    ({"sbatch": ["-Gh100:4"], "nodes": 2}, (2, 2, 2), ["--gpus-per-node=h100:2"]),
    ({"sbatch": ["--gres=gpu:3"]}, (1, 3, 3), ["--gpus-per-node=3"]),
    ({"sbatch": ["--gres=gpu"]}, (1, 1, 1), ["--gpus-per-node=1"]),
    ({"sbatch": ["--gres=gpu:t4:1"]}, (1, 1, 1), ["--gpus-per-node=t4:1"]),
    ({"sbatch": ["--gres=gpu:2,tmpdisk:5"]}, (1, 2, 2), ["--gpus-per-node=2", "--gres=tmpdisk:5"]),
    ({"sbatch": ["--gpus-per-task=1"], "ntasks_per_node": 2}, (1, 2, 2), ["--gpus-per-node=2"]),
    ({"sbatch": ["--gpus-per-task=2"]}, (1, 4, 2), ["--gpus-per-node=4", "--ntasks-per-node=2"]),
    ({"sbatch": ["--gpus-per-task=2", "--ntasks=2"]}, (1, 4, 2), ["--gpus-per-node=4"]),
    ({"sbatch": ["--gpus-per-task=2"], "launcher": "python"}, (1, 2, 1), ["--gpus-per-node=2"]),
    ({"sbatch": ["--exclude=gpu1"]}, (1, 4, 4), ["--exclude=gpu1"]),
    ({"sbatch": ["--gres=shard:2"]}, (1, 0, 1), ["--gres=shard:2"]),
)
def test_totals_become_numbers_of_each_node(
    options: dict[str, Any], numbers: tuple[int, int, int], lines: list[str]
) -> None:
    made = resolved(**options)
    assert (made.nodes, made.gpus_per_node, made.ranks_per_node) == numbers
    shown = script_options(**options)
    assert set(lines) <= set(shown)
    assert not [line for line in shown if line.startswith(("--ntasks=", "--gpus=", "--gpus-per-task"))]


def test_gres_without_gpus_hides_those_of_other_jobs() -> None:
    assert "\nexport CUDA_VISIBLE_DEVICES=  #" in sbatch_script(resolved(sbatch=["--gres=gpu:0"]), SHIPPED)
    assert "\nexport CUDA_VISIBLE_DEVICES=  #" not in sbatch_script(resolved(sbatch=["--gres=shard:1"]), SHIPPED)


def test_excluded_nodes_get_no_code_and_no_job() -> None:
    made = resolved(sbatch=["-x gpu[1-2]"])
    assert made.hosts == ("old1",) and made.exclude == ("gpu1", "gpu2")


@cases(
    "options, words, fix",
    ({"sbatch": ["--ntasks=5"], "nodes": 2}, "--ntasks=5 cannot be divided equally among 2 nodes", "multiple of 2"),
    ({"sbatch": ["--ntasks=1"], "nodes": 2}, "cannot be divided equally", "use --nodes 1"),
    ({"sbatch": ["--ntasks=4"], "ntasks_per_node": 2}, "is 4 a node, and --ntasks-per-node says 2", "leave out"),
    ({"sbatch": ["--gpus=3"], "nodes": 2}, "--gpus=3 cannot be divided equally among 2 nodes", "multiple of 2"),
    ({"sbatch": ["--gres=gpu:2"], "gpus_per_node": 4}, "--gpus-per-node is 4, --gres is 2", "leave out one"),
    ({"sbatch": ["--gres=gpu:a100:1"]}, "1 a100 GPUs a node; no node it may use has more than 0", "leave it out"),
    ({"sbatch": ["--gpus-per-task=5"]}, "more than the 4 GPUs of a node", "smaller"),
    ({"sbatch": ["--gres=shard:2"], "gpus_per_node": 1}, "parts of GPUs, and --gpus-per-node for whole", "leave"),
    ({"sbatch": ["--mem-per-cpu=1G"], "mem": "4G"}, "--mem and --mem-per-cpu exclude each other", "leave out one"),
    ({"sbatch": ["--threads-per-core=1"]}, "Slurm counts fewer CPUs on a node", "--cpus-per-task"),
    ({"sbatch": ["--exclude=gpu[1-2],old1"]}, "partition main has 0", "shoal status"),
    ({"sbatch": ["--ntasks=8"]}, "8 processes a node would share 4 GPUs", "--ntasks-per-node 4"),
)
def test_contradiction_to_the_job_is_rejected(options: dict[str, Any], words: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolved(**options)
    assert words in caught.value.message and fix in caught.value.hint


def test_fewer_cpus_are_taken_with_a_number_of_them() -> None:
    made = resolved(sbatch=["--threads-per-core=1"], cpus_per_task=2)
    assert made.sbatch == ("--threads-per-core=1",) and made.cpus_per_rank == 2
    assert resolved(sbatch=["--hint=nomultithread"], partition="cpu").cpus_per_rank == 1


def test_tables_name_options_once() -> None:
    assert not set(FLAGS) & set(REJECTED) and len(set(SHORT_OPTIONS.values())) == len(SHORT_OPTIONS)
