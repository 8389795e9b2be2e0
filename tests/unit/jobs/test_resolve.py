"""Defaults of a job, and what is rejected before anything is queued."""

from dataclasses import replace
from typing import Any

import pytest
from tests.support.cases import cases
from tests.unit.jobs.job_clusters import NODES, PARTITIONS, job, resolved

from shoal.errors import UsageError
from shoal.jobs.resolve import resolve


@cases(
    "options, expected",
    ({"nodes": 2}, {"partition": "main", "nodes": 2, "gpus_per_node": 4, "ranks_per_node": 4, "cpus_per_rank": 4}),
    ({"nodes": 2}, {"world_size": 8, "hosts": ("gpu1", "gpu2", "old1")}),
    ({"nodes": 3}, {"gpus_per_node": 1, "ranks_per_node": 1}),
    ({"gpus_per_node": 2}, {"ranks_per_node": 2, "cpus_per_rank": 4}),
    ({"gpus_per_node": 2, "exclusive": True}, {"cpus_per_rank": 8}),
    ({"partition": "cpu"}, {"gpus_per_node": 0, "ranks_per_node": 1, "cpus_per_rank": 1}),
    ({"partition": "cpu", "ntasks_per_node": 4, "cpus_per_task": 8}, {"world_size": 4}),
    ({"nodelist": "gpu[1-2]"}, {"nodes": 2, "hosts": ("gpu1", "gpu2")}),
    ({"launcher": "python"}, {"gpus_per_node": 4, "ranks_per_node": 1, "world_size": 1}),
    ({"constraint": "[a|b]"}, {"hosts": ("gpu1", "gpu2", "old1")}),
    ({"constraint": "a&fast"}, {"hosts": ("gpu1",)}),
)
def test_defaults_use_what_all_chosen_nodes_have(options: dict[str, Any], expected: dict[str, Any]) -> None:
    found = resolved(**options)
    assert {name: getattr(found, name) for name in expected} == expected


def test_down_node_is_excluded_and_gets_no_bundle() -> None:
    nodes = [replace(node, state=("DOWN", "NOT_RESPONDING")) if node.name == "gpu2" else node for node in NODES]
    found = resolve(job(), nodes, PARTITIONS)
    assert (found.hosts, found.exclude) == (("gpu1", "old1"), ("gpu2",))
    with pytest.raises(UsageError) as caught:
        resolve(job(nodes=3), nodes, PARTITIONS)
    assert caught.value.message == ("the job asks for 3 nodes; partition main has 2 (gpu1,old1), and gpu2 is down")


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown partition": ({"partition": "mian"}, "there is no partition 'mian'", "did you mean `main`?"),
    "closed partition": ({"partition": "closed"}, "partition closed is down", "choose another with --partition"),
    "too many nodes": (
        {"nodes": 4},
        "the job asks for 4 nodes; partition main has 3 (gpu[1-2],old1)",
        "use --nodes 3 or fewer",
    ),
    "more nodes than the partition allows": (
        {"nodes": 2, "partition": "short"},
        "the job asks for 2 nodes; partition short has 1 (old1)",
        "use --nodes 1 or fewer",
    ),
    "more GPUs than any node has": (
        {"gpus_per_node": 8},
        "the job asks for 8 GPUs a node; no node it may use has more than 4 (gpu1: 4, gpu2: 4, old1: 1)",
        "use --gpus-per-node 4, or leave it out to use all",
    ),
    "more GPUs than so many nodes have": (
        {"gpus_per_node": 4, "nodes": 3},
        "the job asks for 3 nodes with 4 GPUs each; only gpu[1-2] has them",
        "use --gpus-per-node 1, or --nodes 2",
    ),
    "two ranks on one GPU": (
        {"ntasks_per_node": 8},
        "8 processes a node would share 4 GPUs: two of them on one",
        "use --ntasks-per-node 4, or --gpus-per-node 0 for none at all",
    ),
    "more CPUs than any node has": (
        {"cpus_per_task": 8},
        "4 processes with 8 CPUs each need 32 CPUs a node; no node it may use has more than 16",
        "use --cpus-per-task 4",
    ),
    "more processes than CPUs": (
        {"ntasks_per_node": 20, "gpus_per_node": 0},
        "20 processes a node need a CPU each; no node it may use has more than 16",
        "use --ntasks-per-node 16",
    ),
    "more memory than any node has": (
        {"mem": "1T"},
        "the job asks for 1T of memory a node; no node it may use has more than 64000M",
        "use --mem 64000M, or --mem 0 for all of a node's",
    ),
    "longer than the partition allows": (
        {"time": "01:00:00", "partition": "short"},
        "the job asks for a time limit of 01:00:00; partition short allows 00:30:00",
        "use --time 00:30:00, or choose another partition",
    ),
    "a warning before the start": (
        {"time": "2", "signal": "USR1@120"},
        "--signal USR1@120 warns 120 s before the end, and --time 2 is no longer than that",
        "use --signal USR1@60",
    ),
    "a nodelist longer than nodes": (
        {"nodes": 1, "nodelist": "gpu[1-2]"},
        "--nodelist gpu[1-2] names 2 nodes and --nodes says 1",
        "use --nodes 2",
    ),
    "a node of another partition": ({"nodelist": "cpu1"}, "partition main has no node cpu1", "it has gpu[1-2],old1"),
    "features that no node has": (
        {"constraint": "a&b"},
        "no node of partition main has the features a&b",
        "they have: a, fast",
    ),
    "python on two nodes": (
        {"launcher": "python", "nodes": 2},
        "the python launcher starts one process, and --nodes says 2",
        "leave out --nodes, or use --launcher srun or torchrun",
    ),
    "python with many tasks": (
        {"launcher": "python", "ntasks_per_node": 2},
        "the python launcher starts one process, and --ntasks-per-node says 2",
        "leave it out, or use --launcher srun or torchrun",
    ),
}


@cases("case", *REFUSED)
def test_impossible_request_is_rejected_with_the_fix(case: str) -> None:
    options, message, hint = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        resolved(**options)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_missing_default_partition_requires_an_explicit_partition() -> None:
    with pytest.raises(UsageError, match="no default partition"):
        resolve(job(), NODES, PARTITIONS[1:])
